"""A first config for a volume on a machine: what `vesuvius init` chooses.  Pure.

VolumeFacts, Machine -> `suggest` -> Suggestion
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from vesuvius.config import (
    Config,
    DataConfig,
    ForegroundConfig,
    ModelConfig,
    StoreConfig,
    TrainingConfig,
    Triple,
    ValidationConfig,
    VolumeConfig,
)
from vesuvius.errors import ConfigError, DataError
from vesuvius.plan.split import split_volume
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast.machine import Machine
from vesuvius.volume_tools.info import LevelFacts, VolumeFacts

FIRST_RUN_S = 1800.0
"""How long the first run is to take."""

_STEP_S = {"cpu": 2.0, "gpu": 4.0}  # longest step
_RUN_SHARE = 0.9  # of the first run's time; validations, previews and checkpoints take the rest
_VRAM_SHARE, _RAM_SHARE = 0.9, 0.4  # of what is free, for a training step
SPARSE = 0.95  # stored share below which patches are drawn from stored chunks
_COARSE_VOXELS = 32_000_000  # of a level that is small enough to be read as a foreground mask
_LEAST_YX = 8
_LEAST_VOXELS = 8 * 32 * 32  # of a patch, where the volume has room for it: smaller ones show nothing of a scroll
_CACHE_GIB, _CACHE_SHARE = 50, 0.25
LEAST_WIDTH_UM = 300.0  # of a patch: one or two sheets of a scroll and what lies between them


@dataclass(frozen=True)
class NetworkSize:
    """A network to choose."""

    model: ModelConfig
    parameters: int
    flops_per_voxel: int  # of forward and backward pass; a multiply-add is 2
    update_flops: int  # of Muon's update, once a step
    lr: float
    least_voxels: int = 0  # patches smaller than this do not need so large a network


def _model(channels: Triple, blocks: int, heads: int, groups: int) -> ModelConfig:
    return ModelConfig(
        channels=channels,
        blocks_per_level=blocks,
        full_res_channels=channels[0] // 2,
        attention_heads=heads,
        norm_groups=groups,
    )


FULL = NetworkSize(_model((128, 256, 512), 2, 8, 32), 155_293_057, 11_960_000, 1_300_000_000_000, 2e-4, 48 * 96 * 96)
HALF = NetworkSize(_model((64, 128, 256), 2, 8, 32), 38_853_313, 3_006_000, 160_000_000_000, 5e-4, 32 * 64 * 64)
SMALL = NetworkSize(_model((32, 64, 128), 1, 4, 8), 6_664_257, 570_000, 20_000_000_000, 1e-3)
TINY = NetworkSize(_model((16, 32, 64), 1, 4, 8), 1_672_737, 144_000, 3_000_000_000, 2e-3)
_THIN = {"strides": ((1, 2, 2), (1, 2, 2)), "stem_stride": (1, 2, 2)}  # too few slices to be downsampled along z

PATCH: Triple = (72, 136, 136)
_PATCHES: tuple[Triple, ...] = (PATCH, (48, 96, 96), (32, 64, 64), (16, 48, 48), (16, 32, 32), (8, 32, 32), (8, 16, 16))
_SMALLEST: Triple = (8, 8, 8)


@dataclass(frozen=True)
class Suggestion:
    """What to train with, and the figures behind it.

    In `config` the keys are set that were chosen; `step_s` is predicted; the volume has room for `largest_patch_zyx`;
    `stored_share` is of the chunks, None where it is not known.
    """

    config: Config
    network: NetworkSize
    step_s: float
    largest_patch_zyx: Triple
    stored_share: float | None
    # what a patch shows of the object, along the shorter of y and x; None = the size of voxels is not known
    width_um: float | None = None

    @property
    def minutes(self) -> int:
        """Of the run, with validations, previews and checkpoints."""
        return max(round(self.config.horizon_steps * self.step_s / _RUN_SHARE / 60), 1)

    def without_foreground(self) -> Self:
        """The same with patches from everywhere."""
        kept = self.config.data.model_fields_set - {"min_foreground", "foreground"}
        data = DataConfig(**{name: getattr(self.config.data, name) for name in kept})
        return replace(self, config=self.config.model_copy(update={"data": data}), stored_share=None)

    def with_workers(self, workers: int) -> Self:
        """The same with other readers."""
        return replace(self, config=self.config.with_training(workers=workers))


def level_for(
    volume: VolumeFacts, remote: bool, machine: Machine, step_bytes: Callable[[Config], int]
) -> tuple[int, float | None]:
    """The finest level, from the chosen one on, of which this machine's patch shows 0.3 mm; else that which shows most.

    Smaller patches show no sheet from side to side, and samples are fog.

    Returns:
        The level, and what a patch of the chosen one would show; None where the size of voxels is not known.
    """
    first, widest = None, (0.0, volume.chosen.level)
    for level in (each for each in volume.levels if each.level >= volume.chosen.level):
        try:
            width = suggest("width", replace(volume, chosen=level), remote, machine, step_bytes).width_um
        except ConfigError:  # too small for any patch
            break
        if width is None:
            break
        first = width if first is None else first
        widest = max(widest, (width, level.level), key=lambda each: each[0])
        if width >= LEAST_WIDTH_UM:
            break
    return widest[1], first


def suggest(
    name: str, volume: VolumeFacts, remote: bool, machine: Machine, step_bytes: Callable[[Config], int]
) -> Suggestion:
    """Choose patch, network, batch and length of a first run.

    The largest patch and network whose step takes at most 2 s on a CPU, 4 s on a GPU; patches shrink before a run
    without validation is chosen.  Raises ConfigError where the volume is too small for any patch.

    Args:
        remote: whether readers wait for a network.
        step_bytes: memory that a training step of a config takes, on the GPU or, without one, in RAM.
    """
    shape = shape_zyx(volume)
    patches, held_out = _fitting_patches(shape)
    on_gpu = machine.gpu is not None
    room = machine.vram_bytes * _VRAM_SHARE if machine.vram_bytes else machine.ram_bytes * _RAM_SHARE
    choices = _choices(patches, on_gpu)
    for patch, network in choices:
        model = network.model.model_copy(update=_THIN) if shape[0] < _LEAST_YX else network.model
        batch = 8 if math.prod(patch) <= 32 * 64 * 64 or network in (FULL, HALF) else 4
        step_s = (batch * math.prod(patch) * network.flops_per_voxel + network.update_flops) / machine.flops_s
        last = (patch, network) == choices[-1]
        if step_s > _STEP_S["gpu" if on_gpu else "cpu"] and not last:
            continue
        divisors = [n for n in range(batch, 0, -1) if batch % n == 0]
        micro = next((n for n in divisors if step_bytes(_config(patch, model, n)) <= room), None)
        if micro is not None or last:
            break
    training = _training(network, batch, micro or 1, step_s, held_out, _workers(machine, remote))
    data = _data(volume, patch, held_out, StoreConfig(**_cache(machine)) if remote else None)
    config = Config(name=name, seed=0, data=data, training=training, model=model)
    size_um = volume.chosen.voxel_size_um
    width_um = None if size_um is None else min(n * um for n, um in zip(patch[1:], size_um[1:], strict=True))
    return Suggestion(config, network, step_s, patches[0], _stored_share(volume), width_um)


def _choices(patches: list[Triple], on_gpu: bool) -> list[tuple[Triple, NetworkSize]]:
    """Patches and networks, from the largest to the smallest."""
    networks = [network for network in (FULL, HALF) if on_gpu and math.prod(patches[0]) >= network.least_voxels]
    small = [patch for patch in patches if math.prod(patch) >= _LEAST_VOXELS] or patches[:1]
    choices = [(patches[0], network) for network in networks]
    return choices + [(patch, SMALL) for patch in small] + [(patch, TINY) for patch in small[-2:]]


def _training(
    network: NetworkSize, batch: int, micro: int, step_s: float, held_out: bool, workers: int
) -> TrainingConfig:
    steps_per_epoch, epochs = _length(step_s)
    steps = steps_per_epoch * epochs
    return TrainingConfig(
        train_batch_size=micro,
        accumulate_steps=batch // micro,
        workers=workers,
        prefetch_factor=2,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        amp="auto",
        optimizer="muon",
        lr=network.lr,
        lr_schedule="inverse_sqrt",
        warmup_steps=max(min(500, steps // 10), 1),
        ema_decay=0.999 if steps >= 5000 else 0.995,
        save_every=steps_per_epoch,
        validate_every=steps_per_epoch if held_out else 0,
        validate_patches=8,
        preview_every=steps_per_epoch * 2,
    )


def _data(volume: VolumeFacts, patch: Triple, held_out: bool, store: StoreConfig | None) -> DataConfig:
    spec = volume.spec
    drawn_from = VolumeConfig(path=spec.path, level=spec.level)
    if spec.select:
        drawn_from = drawn_from.model_copy(update={"select": spec.select})
    keys: dict[str, Any] = {} if store is None else {"store": store}
    if not held_out:
        keys["validation"] = ValidationConfig(fraction=0.0)
    stored = _stored_share(volume)
    if stored is not None and stored < SPARSE:
        if volume.occupancy.present is not None:
            keys["min_foreground"] = 0.5
        elif (mask := _mask_level(volume)) is not None:
            keys |= {"min_foreground": 0.5, "foreground": ForegroundConfig(source="level", level=mask)}
    return DataConfig(volumes=(drawn_from,), patch_size=patch, **keys)


def shape_zyx(volume: VolumeFacts, level: LevelFacts | None = None) -> Triple:
    """Of the chosen level or another."""
    shape, names = (level or volume.chosen).shape, volume.axes or ()
    axes = [names.index(axis) for axis in "zyx"] if set("zyx") <= set(names) else [-3, -2, -1]
    z, y, x = (shape[axis] for axis in axes)
    return z, y, x


def _fitting_patches(shape_zyx: Triple) -> tuple[list[Triple], bool]:
    """Patch sizes that the volume can give, largest first, and whether it can hold out a validation slab too."""
    if min(shape_zyx[1:]) < _LEAST_YX:
        raise ConfigError(
            f"a volume must measure at least {_LEAST_YX} voxels in y and x; got {list(shape_zyx)}; choose a finer level"
        )
    for validation in (ValidationConfig(), ValidationConfig(fraction=0)):
        found = []
        for z, yx, _ in (*_PATCHES, _SMALLEST):
            depth = shape_zyx[0] if shape_zyx[0] < _LEAST_YX else min(z, shape_zyx[0] // 8 * 8)
            edge = min(yx, min(shape_zyx[1:]) // 8 * 8)
            patch = (depth, edge, edge)
            try:
                split_volume("the volume", shape_zyx, patch, validation)
            except DataError:
                continue
            if patch not in found:
                found.append(patch)
        if found:
            return found, validation.fraction > 0
    raise AssertionError(f"a patch of {_SMALLEST} fits into any volume of {shape_zyx}")


def _config(patch: Triple, model: ModelConfig, batch: int) -> Config:
    """What decides the memory of a step."""
    return Config(
        name="suggested",
        data=DataConfig(volumes=(VolumeConfig(path="volume"),), patch_size=patch),
        training=TrainingConfig(train_batch_size=batch, accumulate_steps=2, optimizer="muon"),
        model=model,
    )


def _length(step_s: float) -> tuple[int, int]:
    """Steps of an epoch and epochs, for half an hour; at least 80 steps, at most 20,000."""
    steps = min(max(_RUN_SHARE * FIRST_RUN_S / step_s, 80), 20_000)
    epochs = 4
    unit = 10 ** max(int(math.log10(steps / epochs)) - 1, 0)
    return max(round(steps / epochs / unit), 1) * unit, epochs


def _stored_share(volume: VolumeFacts) -> float | None:
    """Share of the chunks that are stored: counted, or estimated from those that were asked for at random."""
    if volume.occupancy.present is not None:
        return volume.occupancy.present / max(volume.occupancy.total, 1)
    grey = volume.grey
    return grey.found / grey.tried if grey and grey.tried and grey.found is not None else None


def _mask_level(volume: VolumeFacts) -> int | None:
    """The finest coarser level that is quick to read whole."""
    coarser = [level for level in volume.levels if level.level > volume.chosen.level and level.level > 0]
    small = [level.level for level in coarser if math.prod(shape_zyx(volume, level)) <= _COARSE_VOXELS]
    return min(small, default=None)


def _workers(machine: Machine, remote: bool) -> int:
    """Readers that leave the trainer a core; on a CPU, whose steps are long, one or two keep up."""
    most = (8 if remote else 6) if machine.gpu else (4 if remote else 2)
    spare = machine.cores - (2 if machine.gpu else 1)
    return max(min(most, int(spare * (2 if remote else 1))), 1)


def _cache(machine: Machine) -> dict[str, Any]:
    gib_kept = max(min(_CACHE_GIB, int(_CACHE_SHARE * machine.disk_bytes / GIB)), 1)
    return {"requests": 32, "cache_dir": "volumes/cache", "cache_gib": float(gib_kept)}
