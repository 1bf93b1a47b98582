"""A new run takes the weights of another one only if they mean the same in both, and says what differs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.support.runs import WriteConfig, steps_of, vesuvius_train
from vesuvius.config import ConditionConfig
from vesuvius.config.load import read_config
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import ConfigError
from vesuvius.training.checkpoint.format import load_state
from vesuvius.training.checkpoint.start import compare_initial
from vesuvius.training.checkpoint.trained import DataFacts

# Shapes stay the same, as with a stride along another axis and other numbers of heads.
MODEL = {"channels": [8, 16], "strides": [[1, 2, 2]], "attention_heads": 2, "stem_stride": [2, 2, 1]}
CLASSIC = {"noise": "cosine", "prediction": "v", "sampler_steps": 3}

REFUSED = {
    ("diffusion.prediction=flow",): 'diffusion.prediction: was "v", is "flow"',
    ("diffusion.prediction=eps", "diffusion.sampler_clip=1"): "diffusion.prediction",
    ("diffusion.noise=linear",): 'diffusion.noise: was "cosine", is "linear"',
    ("diffusion.noise_embedding=null",): 'diffusion.noise_embedding: was "t", is "log_sigma"',
    ("diffusion.timesteps=100",): "diffusion.timesteps: was 1000, is 100",
    ("model.strides=[[2, 2, 1]]",): "model.strides",
    ("model.stem_stride=[1, 2, 2]",): "model.stem_stride",
    ("model.attention_heads=4",): "model.attention_heads: was 2, is 4",
}
NAMED = {
    ("diffusion.sampler=ddim",): 'diffusion.sampler: was "dpmpp2m", is "ddim"',
    ("diffusion.min_snr_gamma=5",): "diffusion.min_snr_gamma: was null, is 5.0",
    ("data.normalize={low: 0, high: 200}",): "data.normalize.high: was null, is 200.0",
}
SAME = [
    (),
    ("model.strides=[[1, 2, 2]]",),
    ("diffusion.sigma_min=0.1",),
    ("diffusion.condition_dropout=0.3",),
    ("seed=7",),
]


def facts_of_a_run() -> DataFacts:
    state = next(Path("runs").rglob("state.pt"))
    return DataFacts.from_state(load_state(state), state)


def compared(config: Path, source: Path, facts: DataFacts, *overrides: str) -> tuple[bool, str]:
    """Whether a new run accepts the weights, and what is said."""
    try:
        return True, "\n".join(compare_initial(source, read_config(config, overrides), facts))
    except ConfigError as error:
        return False, str(error)


def test_keys_that_give_weights_their_meaning_are_refused_and_others_named(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    diffusion = CLASSIC | {"noise_embedding": "t"}
    config = tiny_config("first", model=MODEL, diffusion=diffusion, training={"max_steps": 1})
    assert vesuvius_train(config) == 0
    (checkpoint,) = Path("runs/first/checkpoints").glob("step_*")
    source, facts = checkpoint / "model.safetensors", facts_of_a_run()
    for overrides, line in REFUSED.items():
        accepted, said = compared(config, source, facts, *overrides)
        assert not accepted, overrides
        assert line in said
    for overrides, line in NAMED.items():
        accepted, said = compared(config, source, facts, *overrides)
        assert accepted, said
        assert line in said
    for overrides in SAME:
        assert compared(config, source, facts, *overrides) == (True, ""), overrides
    both = tmp_path / "both"
    both.mkdir()
    for name in ("model.safetensors", "config.yaml"):
        shutil.copy(checkpoint / name, both)
    source = both / "model.safetensors"
    assert not compared(config, source, facts, "diffusion.noise=linear")[0]
    for text in ("architectures: [of another project]", "- a list", "{"):
        (both / "config.yaml").write_text(text)
        assert "comes without the config of its run (" in compared(config, source, facts, "diffusion.noise=linear")[1]
    (both / "config.yaml").unlink()
    assert (
        "comes without the config of its run; make sure" in compared(config, source, facts, "diffusion.noise=linear")[1]
    )


@pytest.mark.long
def test_a_start_from_weights_that_mean_something_else_or_nothing_ends_before_it_writes(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tiny_config("first", diffusion=CLASSIC, training={"max_steps": 1})
    assert vesuvius_train(first) == 0
    again = tiny_config("second", diffusion=CLASSIC, training={"max_steps": 1, "init_from": "runs/first"})
    assert vesuvius_train(again, "diffusion.prediction=x_0") == 2
    assert "mean something else in this run" in capsys.readouterr().err
    (file,) = Path("runs/first/checkpoints").glob("step_*/model.safetensors")
    weights = load_file(file)
    name = list(weights)[-1]
    for value in (torch.nan, torch.inf):
        weights[name].view(-1)[-1] = value
        save_file(weights, tmp_path / "bad.safetensors")
        assert vesuvius_train(again, "training.init_from=bad.safetensors") == 2
        assert f"not finite: NaN or infinity in {name}" in capsys.readouterr().err
    assert not Path("runs/second").exists()
    assert vesuvius_train(again, "diffusion.sampler=ddim", "data.normalize={low: 0, high: 200}") == 0
    said = capsys.readouterr().err
    assert "WARNING training.init_from: diffusion.sampler: was" in said
    assert "WARNING training.init_from: data.normalize.high: was null, is 200.0" in said


def test_spectral_noise_levels_are_compared_as_what_they_come_to(tiny_config: WriteConfig) -> None:
    trained = tiny_config(diffusion={"noise_embedding": "t", "sampler_steps": 3}, training={"max_steps": 2})
    assert vesuvius_train(trained) == 0
    source = Path("runs/tiny/checkpoints/step_00000002/model.safetensors")
    facts = DataFacts.from_state(load_state(source.with_name("state.pt")), source)
    now = read_config(trained)
    other = replace(facts, spectrum=Spectrum.white())
    assert compare_initial(source, now, facts) == []
    (line,) = compare_initial(source, now, other)
    sigma = float(line.split("was ")[1].split(",")[0])
    assert f"diffusion.sigma_max={sigma} keeps the noise levels of the weights" in line
    fixed = read_config(trained, [f"diffusion.sigma_max={sigma}"])
    assert compare_initial(source, fixed, other) == [], "as advised: the same levels in other words"
    for override in (f"diffusion.sigma_max={2 * sigma}", "diffusion.sigma_min=0.04"):
        with pytest.raises(ConfigError, match=r"diffusion.sigma_m.*: was"):
            compare_initial(source, read_config(trained, [override]), facts)


def test_weights_of_another_context_are_refused(trained: Path) -> None:
    source, config = Path("runs/tiny/checkpoints/step_00000002/model.safetensors"), read_config(trained)
    around = ConditionConfig(path="coarse.zarr", context=4)
    (volume,) = config.data.volumes
    volumes = (volume.model_copy(update={"condition": around}),)
    now = config.model_copy(update={"data": config.data.model_copy(update={"volumes": volumes})})
    with pytest.raises(ConfigError, match=r"data.volumes\[\].condition.context: was null, is 4"):
        compare_initial(source, now, None)


def test_weights_that_are_told_log_sigma_start_a_run_of_other_levels(trained: Path) -> None:
    source = Path("runs/tiny/checkpoints/step_00000002/model.safetensors")
    facts = DataFacts.from_state(load_state(source.with_name("state.pt")), source)
    levels = ["diffusion.sigma_max=99", "diffusion.sigma_min=0.04", "diffusion.timesteps=77", "data.patch_size=[8,8,8]"]
    now = read_config(trained, [*levels, "diffusion.noise_embedding=log_sigma"])
    assert compare_initial(source, now, replace(facts, spectrum=Spectrum.white())) == []
    with pytest.raises(ConfigError, match=r'noise_embedding: was "log_sigma", is "t"'):
        compare_initial(source, read_config(trained, ["diffusion.noise_embedding=t"]), facts)


RANK_1_READS_NO_WEIGHTS = """
import os, sys
from vesuvius.commands import train
if os.environ["RANK"] == "1":
    import vesuvius.training.checkpoint.start as initial
    def refused(*_):
        raise AssertionError("rank 1 read the weights")
    initial.load_file = initial.load_weights = initial.load_weights_file = refused
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_ranks_get_initial_weights_from_rank_0(trained: Path, tiny_config: WriteConfig, tmp_path: Path) -> None:
    start = {"init_from": str(tmp_path / "runs/tiny"), "max_steps": 2, "train_batch_size": 2}
    assert vesuvius_train(tiny_config("one", training=start)) == 0
    several = tiny_config("two", training=start | {"train_batch_size": 1, "ranks": 2})
    with started_ranks(several, tmp_path, 2, program=("-c", RANK_1_READS_NO_WEIGHTS)) as ranks:
        assert ends_of(ranks) == [0, 0], output_of(tmp_path, 2)
    losses = [[step["loss"] for step in steps_of(name)] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # sums in another order
