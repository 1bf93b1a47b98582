"""`vesuvius evaluate RUN`: how near samples of a trained model come to real patches that it has not seen."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from vesuvius.commands.cli import as_command, natural, positive, say, whole
from vesuvius.commands.sample import add_keys, guide_of, overrides_of
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and evaluate.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius evaluate",
        description="Compare generated patches with held-out ones, and real with real as the floor: grey values and "
        "air, spectrum, correlation, planarity, a classifier, memorised training voxels.  "
        "Writes evaluation.json, evaluation.html and montage.png; the run's volumes must be there.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, name of a run, or one of its checkpoints")
    parser.add_argument("--count", type=whole(16), default=64, help="patches of each kind (default: 64)")
    parser.add_argument(
        "--generated",
        type=Path,
        metavar="PATH",
        help="samples to judge instead of drawing new ones: a folder or volume of `vesuvius sample`, or .npy or zarr "
        "of any program, patches [N, Z, Y, X] or a volume [Z, Y, X], in grey values of the training volume",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default: a new one in the run's reports/)"
    )
    parser.add_argument(
        "--training-volume",
        type=natural,
        default=0,
        metavar="N",
        help="whose grey values samples have (default: 0, the first)",
    )
    parser.add_argument("--seed", type=natural, default=0, help="of the samples that are drawn (default: 0)")
    parser.add_argument("--batch-size", type=positive, default=4, help="samples computed at once (default: 4)")
    parser.add_argument("--weights", default="ema", metavar="NAME", help="as in vesuvius sample (default: ema)")
    parser.add_argument(
        "--classifier-steps", type=positive, default=200, help="training of each classifier (default: 200)"
    )
    add_keys(parser)
    arguments = parser.parse_args(argv)
    from vesuvius.generate.evaluate.evaluate import EvaluationRequest, evaluate  # imports torch
    from vesuvius.generate.sampling import SampleRequest

    request = EvaluationRequest(
        SampleRequest(
            checkpoint=arguments.run,
            weights=arguments.weights,
            overrides=overrides_of(arguments),
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            volume_index=arguments.training_volume,
            count=arguments.count,
            out=None,
            overwrite=False,
            guide=guide_of(arguments),
        ),
        generated=arguments.generated,
        out=arguments.out,
        classifier_steps=arguments.classifier_steps,
        command=shlex.join(["vesuvius", "evaluate", *argv]),
    )
    with Progress("evaluating") as progress:
        folder, text = evaluate(request, progress.update)
    say(f"{text}\n{folder / 'evaluation.html'}")
    return EXIT_OK
