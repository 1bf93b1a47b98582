"""First config for a volume on this machine: the largest preset that fits memory and half an hour."""

import logging
import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vesuvius.accelerator import choose_device, memory_info, properties
from vesuvius.config import (
    ArrayConfig,
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
from vesuvius.config.describe import to_yaml
from vesuvius.config.load import dump_set_keys
from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.loader.resident import ram_limit
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.plan.make_plan import split_volume
from vesuvius.runlog.units import GIB, format_gib, format_percent, format_sizes
from vesuvius.stream.options import StreamOptions, check_store
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.plan import device_memory_bytes, fit_micro_batch, plan_resident, plan_run
from vesuvius.training.forecast.start_log import step_range_s
from vesuvius.training.step.setup import build_meta_network, parameter_count
from vesuvius.volume_tools.info import LevelFacts, VolumeFacts, describe_volume
from vesuvius.volumes.store.objects import is_remote

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """A patch size and a matching network, for 8 patches per step."""

    patch: Triple
    channels: Triple
    blocks: int
    heads: int
    lr: float


_FULL: Triple = (72, 136, 136)
PRESETS = {
    "gpu": (
        Preset(_FULL, (128, 256, 512), 2, 8, 2e-4),
        Preset(_FULL, (64, 128, 256), 2, 8, 5e-4),
        Preset((32, 64, 64), (32, 64, 128), 1, 4, 1e-3),
    ),
    "cpu": (
        Preset((16, 48, 48), (32, 64, 128), 1, 4, 1e-3),
        Preset((16, 32, 32), (32, 64, 128), 1, 4, 1e-3),
        Preset((8, 32, 32), (16, 32, 64), 1, 4, 2e-3),
    ),
}
"""Largest first."""
_BATCH = 8
_STEP_S = {"gpu": 4.0, "cpu": 2.0}  # longest acceptable step
_READERS = {"gpu": 6, "cpu": 2}  # maximum; 1.5 times as many for a remote store
_CORES_WITHOUT_READERS = 2
_RUN_S = 0.9 * 1800  # half an hour minus validations, previews and checkpoints
_PATCHES: tuple[Triple, ...] = (
    _FULL, (48, 96, 96), (32, 64, 64), (16, 48, 48), (16, 32, 32), (8, 32, 32), (8, 16, 16), (8, 8, 8),
)  # fmt: skip
LEAST_WIDTH_UM, _MICROSCOPE_UM = 300.0, 10.0  # width of a patch: one or two scroll sheets and their gap; of no scroll
_LEAST_YX = 8
_FEW = 64  # patches next to each other: a network repeats them
_SPARSE = 0.95  # stored share below which patches are drawn from stored chunks
_COARSE_VOXELS = 32_000_000  # largest level used as a foreground mask
_SAMPLED_BOXES = 8  # for intensity statistics
_OUTAGE_MINUTES = 0.5  # a mistyped address must fail soon


def first_config(name: str, spec: ArrayConfig, level_given: bool = False) -> tuple[str, list[str]]:
    """Return the text of a config, and a summary of findings and choices, one line each.

    Unless `level_given`, a coarser level than that of `spec` is chosen if patches would show too little.

    Raises ConfigError: the volume is too small for any patch; DataError.
    """
    store, device = StoreConfig(outage_minutes=_OUTAGE_MINUTES), choose_device()
    volume = describe_volume(spec, store, num_boxes=_SAMPLED_BOXES)
    spec = volume.spec
    preset, micro, step_s = _choose_preset(shape_zyx(volume), device)
    if not level_given and (level := choose_level(volume, preset.patch)) != spec.level:
        spec = spec.model_copy(update={"level": level})
        volume = describe_volume(spec, store, num_boxes=_SAMPLED_BOXES)
    patch, held_out = fit_patch(shape_zyx(volume), preset.patch)
    patches = math.prod(shape_zyx(volume)) // math.prod(patch)
    if not level_given and spec.level > 0 and patches < _FEW:
        text = "level %d holds only %d patches; finer ones hold more, of less than %g µm: --level 0 is the finest"
        log.warning(text, spec.level, patches, LEAST_WIDTH_UM)
    training = _training(preset, micro, step_s, held_out, is_remote(spec.path), device)
    data_config = _data(volume, patch, held_out)
    try:
        data = prepare_data(0, data_config.with_store(cache_dir=None))
    except DataError as error:
        if not data_config.min_foreground:
            raise
        log.warning("keeping data.min_foreground at 0: %s", one_line(error))
        data_config = _data(volume, patch, held_out, everywhere=True)
        data = prepare_data(0, data_config.with_store(cache_dir=None))
    config = Config(name=name, seed=0, data=data_config, training=training, model=_model(preset, patch))
    config = config.with_training(workers=_workers(config, data, is_remote(spec.path)))
    gpu = "no GPU"
    if device.type != "cpu":
        gpu = f"{properties(device).name} with {format_gib(memory_info(device)[0])} GiB free"
    memory, steps = f"{format_gib(ram_limit(None).total_bytes)} GiB of memory", config.horizon_steps
    summary = {
        "volume": f"{spec.path}, level {spec.level} of {len(volume.levels)}: {format_sizes(volume.chosen.shape)} "
        f"{volume.chosen.dtype}{_stored(volume)[1]}",
        "machine": f"{usable_cores(os.getpid()):g} cores, {memory}, {gpu}",
        "patch": f"{format_sizes(patch)}; {config.global_batch} per step in micro-batches of {micro}; "
        f"{_width_words(volume, patch)}",
        "model": f"{parameter_count(build_meta_network(config)) / 1e6:.1f} M parameters, about {step_s:.2g} s per step",
        "run": f"{steps} steps, about {max(round(steps * step_s / 54), 1)} minutes",
    }
    config = config.with_training(train_batch_size="auto", accumulate_steps=_BATCH)
    return _text(config, summary, volume), [f"{key:10} {text}" for key, text in summary.items()]


def _choose_preset(shape: Triple, device: torch.device) -> tuple[Preset, int, float]:
    """The largest preset whose step fits into memory and takes at most 2 s on a CPU, 4 s on a GPU; else the smallest.

    Also its micro-batch and the predicted seconds per step.
    """
    for preset in PRESETS.get(device.type, PRESETS["gpu"]):
        patch, _ = fit_patch(shape, preset.patch)
        config = Config(
            name="any",
            data=DataConfig(volumes=(VolumeConfig(path="any"),), patch_size=patch),
            training=TrainingConfig(train_batch_size="auto", accumulate_steps=_BATCH, optimizer="muon"),
            model=_model(preset, patch),
        )
        found = fit_micro_batch(config, device_memory_bytes(config, device), device.type != "cpu")
        step_s = math.sqrt(math.prod(step_range_s(found.step.flops_per_step, device, config.training)))
        if found.fits and step_s <= _STEP_S.get(device.type, _STEP_S["gpu"]):
            break
    return preset, found.config.training.micro_batch, step_s


def _model(preset: Preset, patch: Triple) -> ModelConfig:
    model = ModelConfig(
        channels=preset.channels,
        blocks_per_level=preset.blocks,
        full_res_channels=preset.channels[0] // 2,
        attention_heads=preset.heads,
    )
    thin = {"strides": ((1, 2, 2), (1, 2, 2)), "stem_stride": (1, 2, 2)}  # too few slices to downsample along z
    return model.model_copy(update=thin) if patch[0] < _LEAST_YX else model


def fit_patch(shape: Triple, wanted: Triple) -> tuple[Triple, bool]:
    """Largest patch up to `wanted` that fits the volume, and whether a validation slab fits as well.

    Prefers smaller patches to a run without validation.  Raises ConfigError.  Pure.
    """
    if min(shape[1:]) < _LEAST_YX:
        raise ConfigError(
            f"A volume of {list(shape)} is too small: y and x need at least {_LEAST_YX} voxels; choose a finer level"
        )
    for validation in (ValidationConfig(), ValidationConfig(fraction=0)):
        for z, yx, _ in (patch for patch in _PATCHES if patch <= wanted):
            depth = shape[0] if shape[0] < _LEAST_YX else min(z, shape[0] // 8 * 8)
            edge = min(yx, min(shape[1:]) // 8 * 8)
            try:
                split_volume("the volume", shape, (depth, edge, edge), validation)
            except DataError:
                continue
            return (depth, edge, edge), validation.fraction > 0
    raise AssertionError(f"a patch of {_PATCHES[-1]} fits into any volume of {shape}")


def choose_level(volume: VolumeFacts, wanted: Triple) -> int:
    """Finest level, starting at the chosen one, of which a patch covers 300 µm; otherwise the level covering most.

    Smaller patches do not span a sheet, and samples look like fog.  Volumes of a microscope are no scrolls: the finest.
    """
    widths: dict[int, float] = {}
    for level in (each for each in volume.levels if each.level >= volume.chosen.level):
        with suppress(ConfigError):  # too small for any patch
            width = _width_um(level, fit_patch(shape_zyx(volume, level), wanted)[0])
            widths |= {} if width is None else {level.level: width}
    enough = (level for level, width in widths.items() if not _MICROSCOPE_UM < width < LEAST_WIDTH_UM)
    return next(enough, max(widths, key=lambda level: widths[level], default=volume.chosen.level))


def _width_um(level: LevelFacts, patch: Triple) -> float | None:
    """The shorter of y and x; None = voxel size unknown."""
    size_um = level.voxel_size_um
    return None if size_um is None else min(n * um for n, um in zip(patch[1:], size_um[1:], strict=True))


def _width_words(volume: VolumeFacts, patch: Triple) -> str:
    width = _width_um(volume.chosen, patch)
    if width is None:
        return "voxel size unknown: if samples show too little, choose a coarser --level"
    few = f", less than the {LEAST_WIDTH_UM:g} µm needed to show a sheet of a scroll"
    return f"{width:.4g} µm wide{few if _MICROSCOPE_UM < width < LEAST_WIDTH_UM else ''}"


def shape_zyx(volume: VolumeFacts, level: LevelFacts | None = None) -> Triple:
    """Shape of the chosen level or of `level`."""
    z, y, x = ((level or volume.chosen).shape[axis] for axis in volume.zyx)
    return z, y, x


def _training(
    preset: Preset, micro: int, step_s: float, held_out: bool, remote: bool, device: torch.device
) -> TrainingConfig:
    """Half an hour in four epochs, 80 to 20,000 steps in total.  Readers leave the trainer a core."""
    per_epoch = int(float(f"{min(max(_RUN_S / step_s, 80), 20_000) / 4:.1e}"))
    spare = usable_cores(os.getpid()) - (1 if device.type == "cpu" else 2)
    most = _READERS.get(device.type, _READERS["gpu"]) * (3 if remote else 2) // 2
    return TrainingConfig(
        train_batch_size=micro,
        accumulate_steps=_BATCH // micro,
        workers=max(min(most, int(spare * (1 + remote))), 1),
        steps_per_epoch=per_epoch,
        epochs=4,
        optimizer="muon",
        lr=preset.lr,
        lr_schedule="inverse_sqrt",
        warmup_steps=min(500, 4 * per_epoch // 10),
        ema_decay=0.999 if per_epoch >= 1250 else 0.995,
        save_every=per_epoch,
        validate_every=per_epoch if held_out else 0,
        validate_patches=8,
        preview_every=per_epoch * 2,
    )


def _data(volume: VolumeFacts, patch: Triple, held_out: bool, everywhere: bool = False) -> DataConfig:
    """Data section; patches of a sparse volume are drawn where chunks are stored, unless `everywhere`."""
    spec, keys = volume.spec, dict[str, Any]()
    if is_remote(spec.path):
        cache_gib = max(min(50, int(shutil.disk_usage(Path.cwd()).free / 4 / GIB)), 1)
        keys["store"] = StoreConfig(requests=32, cache_dir="volumes/cache", cache_gib=float(cache_gib))
    if not held_out:
        keys["validation"] = ValidationConfig(fraction=0.0)
    if _stored(volume)[0] < _SPARSE and not everywhere:
        coarser = [level for level in volume.levels if level.level > max(volume.chosen.level, 0)]
        masks = [level.level for level in coarser if math.prod(shape_zyx(volume, level)) <= _COARSE_VOXELS]
        if volume.occupancy.present is not None:
            keys["min_foreground"] = 0.5
        elif masks:
            keys |= {"min_foreground": 0.5, "foreground": ForegroundConfig(level=min(masks))}
    drawn_from = VolumeConfig(path=spec.path, level=spec.level)
    if spec.select:
        drawn_from = drawn_from.model_copy(update={"select": spec.select})
    return DataConfig(volumes=(drawn_from,), patch_size=patch, **keys)


def _workers(config: Config, data: PreparedData, remote: bool) -> int:
    """Number of readers, at most the configured one; 0 if threads of the trainer read as fast (on two cores, or if the
    volume soon fits into memory), as Ray needs memory and time to start.
    """
    if not remote and usable_cores(os.getpid()) <= _CORES_WITHOUT_READERS:
        return 0
    if plan_resident(config, data)[0] and data.plan.is_small:
        return 0
    return next((n for n in range(config.training.workers, 0, -1) if _fits(config.with_training(workers=n), data)), 0)


def _fits(config: Config, data: PreparedData) -> bool:
    with suppress(ConfigError):
        check_store(data.job, StreamOptions.from_config(config.training, config.cluster))
        return not plan_run(config, data).problems()
    return False


def _stored(volume: VolumeFacts) -> tuple[float, str]:
    """Share of stored chunks (1 if unknown), and a description: of all chunks or of a random sample."""
    present, total, intensity = volume.occupancy.present, max(volume.occupancy.total, 1), volume.intensity
    if present is not None:
        return present / total, f", {format_percent(present * 1000 // total / 1000)} of the chunks are stored"
    if intensity is None or not intensity.chunks_tried or intensity.chunks_found is None:
        return 1.0, ""
    return (
        intensity.chunks_found / intensity.chunks_tried,
        f", {intensity.chunks_found} of {intensity.chunks_tried} randomly chosen chunks are stored",
    )


def _text(config: Config, summary: dict[str, str], volume: VolumeFacts) -> str:
    level, others = volume.chosen, len(volume.levels) - 1
    reasons = {
        "name": f"the run directory is runs/{config.name}",
        "data.volumes[].level": f"{format_sizes(level.shape)} {level.dtype}, chunks {format_sizes(level.chunk_zyx)}; "
        f"{others} other level{'s' * (others != 1)}",
        "data.patch_size": f"voxels z, y, x: {_width_words(volume, config.data.patch_size)}",
        "data.min_foreground": "at least half of each patch lies in stored chunks",
        "data.validation": "the volume is too small for a validation slab",
        "training.train_batch_size": "micro-batch: as large as memory allows",
        "training.accumulate_steps": f"{config.global_batch} patches per step",
        "training.workers": "worker processes; 0 = the trainer reads: best on two cores, for a small volume, and "
        "if memory or /dev/shm is too small for Ray",
        "training.epochs": f"{summary['run']} here; to continue, raise epochs and add --resume",
        "training.lr_schedule": "independent of the horizon, so the run can be extended at any time",
        "model": summary["model"],
    }
    share, words = _stored(volume)
    if share < _SPARSE and not config.data.min_foreground:
        reasons["data"] = f"{words[2:]}; run vesuvius volume occupancy, then set min_foreground: 0.5"
    head = [
        f"# Written by vesuvius init for {to_yaml(volume.spec.path)} on {summary['machine']}.",
        "# All keys and their meanings: docs/config.md, or vesuvius train --config FILE --print-config",
    ]
    return "\n".join([*head, dump_set_keys(config, reasons)])
