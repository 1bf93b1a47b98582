"""A config of nonsense is refused in one message: no traceback, no hang, no memory of its size."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import pytest
import yaml

from vesuvius.commands import train
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK

CASES = 100
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "auto", "x" * 100_000,
    "é\u202e", "../../etc", "${HOME}", "!!python/object:os.system", [], [1, 2, 3], [[1]], [None] * 10_000, {}, {"a": 1},
    {"training": {"lr": 1}}, "1e9", "0x10", "2001-01-01", "~",
)  # fmt: skip
_BASE: dict[str, Any] = {
    "name": "fuzz",
    "seed": 1,
    "data": {
        "volumes": [{"path": "nowhere.zarr", "level": 0, "weight": 1.0}],
        "patch_size": [8, 16, 16],
        "store": {"requests": 4, "timeout_s": 5},
        "validation": {"fraction": 0.1},
        "normalize": "none",
        "reader_mib": 64,
    },
    "model": {"channels": [8, 16], "blocks_per_level": 1, "full_res_channels": 4, "norm_groups": 2},
    "diffusion": {"noise": "edm", "timesteps": 100, "sampler": "ddim", "sampler_steps": 4},
    "training": {"epochs": 1, "steps_per_epoch": 4, "train_batch_size": 2, "lr": 1e-3, "workers": 0, "max_hours": 1},
    "monitor": {"verdict_every": 10, "guard": "act", "webhook": None, "prometheus_port": None},
}


def mutated(rng: random.Random) -> dict[str, Any]:
    """The base with one to three keys that have another value, a wrong name, or are gone."""
    config = yaml.safe_load(yaml.safe_dump(_BASE))
    for _ in range(rng.randint(1, 3)):
        node = config
        while True:
            key = rng.choice(sorted(node, key=str)) if isinstance(node, dict) and node else None
            if key is None:
                break
            child = node[key]
            if isinstance(child, dict) and child and rng.random() < 0.8:
                node = child
                continue
            change = rng.random()
            if change < 0.7:
                node[key] = rng.choice(_VALUES)
            elif change < 0.85:
                node[f"{key}s"] = node.pop(key)
            else:
                del node[key]
            break
    return config


@pytest.mark.sample(3)
@pytest.mark.parametrize("seeds", [range(10 * n, 10 * n + 10) for n in range(CASES // 10)], ids=str)
def test_a_config_of_nonsense_ends_in_one_message(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in seeds:
        rng = random.Random(seed)
        Path("fuzz.yaml").write_text(yaml.safe_dump(mutated(rng), allow_unicode=True))
        key = rng.choice(
            ["training.lr", "data.volumes", "model.channels.0", "nowhere.at.all", "data.volumes[0].level", ""]
        )
        override = f"{key}={rng.choice(_VALUES)}"[:1000]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            code = train.main(["--config", "fuzz.yaml", *([override] if rng.random() < 0.5 else []), "--print-config"])
        except SystemExit as usage:  # argparse's own
            code = usage.code if isinstance(usage.code, int) else EXIT_CONFIG
        said = capsys.readouterr()
        assert code in (EXIT_OK, EXIT_CONFIG, EXIT_DATA), (seed, code, said.err[-500:])
        assert "Traceback" not in said.err, seed
        assert "defect" not in said.err, (seed, said.err[-500:])
        assert code == EXIT_OK or said.err.strip(), seed
        assert len(said.err) < 5000, seed
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, seed  # KiB
