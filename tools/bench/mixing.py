"""Measure how the order of samples mixes a large volume: one line of JSON for the plan of a config.  Reads no voxels.

Noise of an average: the standard deviation, over places in the order, of the mean of a smooth function of the position
over 1, 8, 64 and 512 batches, divided by that of as many independent patches.  To compare with another checkout, run
it with `PYTHONPATH=OTHER/src`:

    python tools/bench/mixing.py [data.stream_gib=1 ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math

import numpy as np
import yaml

from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.plan.make_plan import make_plan, plan_volume, split_volume
from vesuvius.plan.plan import Plan

_SHAPE, _CHUNK, _BATCH, _BATCHES = (4096, 4096, 4096), (128, 128, 128), 8, (1, 8, 64, 512)
_WAVES = [(z, y, x) for z in range(3) for y in range(3) for x in range(3) if z + y + x]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="keys of the data section, e.g. data.stream_gib=1")
    parser.add_argument("--seeds", type=int, default=40, help="orders that are averaged (default: %(default)s)")
    args = parser.parse_args()
    pairs = (override.removeprefix("data.").split("=", 1) for override in args.overrides)
    options = {key: yaml.safe_load(value) for key, value in pairs}
    config = DataConfig(**{"volumes": (VolumeConfig(path="v"),), **options})
    split = split_volume("v", _SHAPE, config.patch_size, config.validation)
    volume = plan_volume("v", split, _SHAPE, _CHUNK, "uint8", 1.0, config)
    plans = [make_plan(seed, config, [volume]) for seed in range(args.seeds)]
    plan = plans[0]
    slots, starts = map(np.array, zip(*[_drawn(each, max(_BATCHES) * _BATCH) for each in plans], strict=True))
    batches = slots.reshape(args.seeds, -1, _BATCH)
    pairs_apart = starts[:, :-_BATCH].reshape(-1, 3), starts[:, _BATCH:].reshape(-1, 3)
    apart = [np.corrcoef(pairs_apart[0][:, axis], pairs_apart[1][:, axis])[0, 1] for axis in range(3)]
    next_too = [len({*one} & {*other}) for order in batches.tolist() for one, other in itertools.pairwise(order)]
    figures = {
        "regions_in_flight": plan.regions_in_flight,
        "patches_per_region": plan.patches_per_region,
        "read_amplification": round(plan.read_amplification(0), 3),
        "reads_per_region": {
            world: round(plan.reads_per_region(world), 2) for world in (1, 2, 3, 4, 8, 16, 32, 64, 128)
        },
        "regions_per_batch": round(float(np.mean([len({*batch}) for order in batches.tolist() for batch in order])), 3),
        "regions_of_the_next_batch_too": round(float(np.mean(next_too)), 3),
        "correlation_a_batch_apart": [round(float(value), 3) for value in apart],
        "noise_of_averages": {count: _noise(starts, volume.train, count * _BATCH) for count in _BATCHES},
    }
    print(json.dumps(figures))


def _drawn(plan: Plan, count: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return slots and starts of consecutive samples, from a batch long after the first window on."""
    first = 20 * plan.regions_in_flight * plan.patches_per_region // _BATCH * _BATCH
    indices = range(first, first + count)
    return [plan.mixing.slot_of(index) for index in indices], [plan.sample(index).start_zyx for index in indices]


def _noise(starts: np.ndarray, train: tuple[tuple[int, ...], tuple[int, ...]], samples: int) -> float:
    """Return the noise of averages over so many samples, relative to independent ones: root mean square over waves."""
    unit = (starts - train[0]) / (np.subtract(train[1], train[0]))
    ratios = []
    for wave in _WAVES:
        values = np.prod([np.sqrt(2) ** (k > 0) * np.cos(np.pi * k * unit[..., a]) for a, k in enumerate(wave)], axis=0)
        means = values.reshape(len(values), -1, samples).mean(axis=2)
        ratios.append((means - values.mean()).var() * samples / values.var())
    return round(math.sqrt(float(np.mean(ratios))), 3)


if __name__ == "__main__":
    main()
