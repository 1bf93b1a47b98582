"""`vesuvius evaluate RUN`: compare patches of a trained model with held-out ones."""

import logging
import shlex
from argparse import ArgumentTypeError
from itertools import pairwise

from vesuvius.commands.cli import Parser, as_command, at_least, full_path, natural, naturals, option, say
from vesuvius.commands.sample import KEYS, add_sampling, sampling_of
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress

log = logging.getLogger(__name__)


def _efforts(text: str) -> tuple[int, ...]:
    efforts = naturals(text)
    if min(efforts) < 1 or any(one >= other for one, other in pairwise(efforts)):
        raise ArgumentTypeError(f"{text!r} is not a list of ascending numbers of at least 1; try 200,1000")
    return efforts


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius evaluate",
        description="Compare generated patches with held-out ones (and real with real, as the floor): intensities, "
        "spectrum, correlation, planarity, a classifier, memorization.  Writes evaluation.html, evaluation.json "
        "and montage.png.",
        examples=("vesuvius evaluate demo", "vesuvius evaluate demo --generated runs/demo/samples/generated.zarr"),
    )
    option(parser, "run RUN", "run directory, name of a run, or one of its checkpoints")
    option(parser, "--count N", "number of patches of each kind", at_least(16), 64)
    generated = (
        "evaluate this instead of new samples: .npy or zarr, patches [N, Z, Y, X] or a volume, in its intensities"
    )
    option(parser, "--generated PATH", generated, full_path)
    option(parser, "--out DIR", "folder to write (default: a new one in the run's reports/)", full_path)
    more = parser.add_argument_group("more options")
    option(more, "--training-volume N", "training volume whose intensities the samples have", natural, 0)
    steps = "training steps after which the classifier is tested, ascending"
    option(more, "--classifier-steps N,N", steps, _efforts, (200, 1000))
    add_sampling(parser, more)
    arguments = parser.parse_args(argv)
    of_sampling = ("seed", "batch_size", "weights", "guide", *KEYS) if arguments.generated else ()
    if given := [name for name in of_sampling if getattr(arguments, name) != parser.get_default(name)]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        log.warning("%s: no effect on existing samples; remove it, or --generated", options)
    from vesuvius.generate.evaluate.evaluate import evaluate  # imports torch
    from vesuvius.generate.sampling import SampleRequest

    common = sampling_of(arguments, arguments.run, arguments.training_volume)
    asked = SampleRequest(**common, count=arguments.count, out=None)
    said = shlex.join(["vesuvius", "evaluate", *argv])
    with Progress("evaluating") as progress:
        folder, text = evaluate(
            asked, arguments.generated, arguments.out, arguments.classifier_steps, said, progress.update
        )
    say(f"{text}\n{folder / 'evaluation.html'}")
    return EXIT_OK
