"""`vesuvius evaluate RUN`: compare patches of a trained model with held-out ones."""

import shlex
from argparse import ArgumentTypeError
from itertools import pairwise

from vesuvius.commands.cli import Parser, as_command, at_least, full_path, natural, naturals, say
from vesuvius.commands.sample import add_sampling, sampling_of
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress


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
    parser.add_argument("run", metavar="RUN", help="run directory, name of a run, or one of its checkpoints")
    parser.add_argument("--count", type=at_least(16), default=64, help="number of patches of each kind (default: 64)")
    generated = (
        "evaluate this instead of new samples: .npy or zarr, patches [N, Z, Y, X] or a volume, in its intensities"
    )
    parser.add_argument("--generated", type=full_path, metavar="PATH", help=generated)
    out = "folder to write (default: a new one in the run's reports/)"
    parser.add_argument("--out", type=full_path, metavar="DIR", help=out)
    more = parser.add_argument_group("more options")
    index = "training volume whose intensities the samples have (default: 0, the first)"
    more.add_argument("--training-volume", type=natural, default=0, metavar="N", help=index)
    steps = "training steps after which the classifier is tested, ascending (default: 200,1000)"
    more.add_argument("--classifier-steps", type=_efforts, default=(200, 1000), metavar="N,N", help=steps)
    add_sampling(parser, more)
    arguments = parser.parse_args(argv)
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
