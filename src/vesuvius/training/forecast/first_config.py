"""The first config of a volume on this machine: look at both, choose, and check the choice.  Does I/O."""

from __future__ import annotations

import logging
import math

from vesuvius.config import ArrayConfig, Config, StoreConfig
from vesuvius.config.describe import to_yaml
from vesuvius.config.load import dump_set_keys
from vesuvius.errors import DataError, one_line
from vesuvius.runlog.units import format_percent, format_sizes, gib
from vesuvius.stream.options import StreamOptions, store_bytes
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.machine import Machine, look_at_machine
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.forecast.ram_plan import plan_ram
from vesuvius.training.forecast.suggest import LEAST_WIDTH_UM, PATCH, SPARSE, Suggestion, level_for, shape_zyx, suggest
from vesuvius.volume_tools.info import VolumeFacts, describe_volume
from vesuvius.volumes.store.object_store import is_remote

log = logging.getLogger(__name__)

_PLACES = 8  # boxes whose grey values are read
_RAM_SHARE = 0.8  # of what is there, for the whole run
_OUTAGE_MINUTES = 0.5  # an address with a typing error is to be told at once


def first_config(name: str, spec: ArrayConfig, level_given: bool = False) -> tuple[str, list[str]]:
    """The text of a config, and what was found and chosen, a line each.  Raises ConfigError and DataError.

    Args:
        level_given: the level of `spec` is wanted; else a coarser one is chosen where patches would show too little.
    """
    remote = is_remote(spec.path)
    store = StoreConfig(outage_minutes=_OUTAGE_MINUTES)
    volume = describe_volume(spec, PATCH, store, places=_PLACES)
    machine = look_at_machine()

    def step_bytes(config: Config) -> int:
        plan = plan_memory(config, amp=machine.amp)
        return plan.vram_bytes if machine.gpu else plan.ram_bytes

    level, finest_um = (spec.level, None) if level_given else level_for(volume, remote, machine, step_bytes)
    if level != spec.level:
        spec = spec.model_copy(update={"level": level})
        volume = describe_volume(spec, PATCH, store, places=_PLACES)
    chosen = suggest(name, volume, remote, machine, step_bytes)
    try:
        data = _prepare(chosen.config)
    except DataError as error:
        if not chosen.config.data.min_foreground:
            raise
        log.warning("data.min_foreground is left at 0: %s", one_line(error))
        chosen = chosen.without_foreground()
        data = _prepare(chosen.config)
    chosen = chosen.with_workers(_fitting_workers(chosen, data, machine))
    return suggestion_text(volume, machine, chosen, finest_um), _words(spec, volume, machine, chosen, finest_um)


def _prepare(config: Config) -> PreparedData:
    return prepare_data(config.seed, config.data.with_store(cache_dir=None))


def _fitting_workers(chosen: Suggestion, data: PreparedData, machine: Machine) -> int:
    """The most readers, at most those chosen, whose memory fits; 0, reading without Ray, where no reader fits."""

    def fits(workers: int) -> bool:
        config = chosen.with_workers(workers).config
        shm_bytes = store_bytes(data.job, StreamOptions.from_config(config.training, config.cluster))
        ram_bytes = plan_ram(config, data, machine.gpu is not None).total_bytes
        in_shm = machine.shm_bytes is None or shm_bytes <= machine.shm_bytes
        return in_shm and ram_bytes <= _RAM_SHARE * machine.ram_bytes

    return next(filter(fits, range(chosen.config.training.workers, 0, -1)), 0)


def _width(chosen: Suggestion, finest_um: float | None) -> str:
    """What a patch shows, and why this level was chosen.

    Args:
        finest_um: what a patch of the finest level would show, where a level was chosen.
    """
    if chosen.width_um is None:
        return "voxel size unknown: if samples show too little, choose a coarser --level"
    shown = f"{chosen.width_um / 1000:.2g} mm wide"
    if finest_um is not None and finest_um < chosen.width_um:
        return f"{shown}, at the finest level only {finest_um / 1000:.2g} mm: too little of a sheet"
    if chosen.width_um < LEAST_WIDTH_UM:
        remedy = "choose a coarser --level" if finest_um is None else "no level shows more"
        return f"{shown}: less than {LEAST_WIDTH_UM / 1000:g} mm show too little of a sheet, {remedy}"
    return shown


def _words(
    spec: ArrayConfig, volume: VolumeFacts, machine: Machine, chosen: Suggestion, finest_um: float | None
) -> list[str]:
    level, grey = volume.chosen, volume.grey
    config = chosen.config
    stored = "" if chosen.stored_share is None else f", {_stored_words(volume, chosen.stored_share)}"
    greys = f", grey values {grey.percentiles[0]:g} to {grey.percentiles[-1]:g}" if grey and grey.percentiles else ""
    shm = "" if machine.shm_bytes is None else f", {gib(machine.shm_bytes)} GiB free in /dev/shm"
    return [
        f"volume     {spec.path}, level {level.level} of {len(volume.levels)}: {format_sizes(level.shape)} "
        f"{level.dtype}{stored}{greys}",
        f"machine    {machine.words()}{shm}",
        f"patch      {format_sizes(config.data.patch_size)}; {config.global_batch} a step, "
        f"{config.training.train_batch_size} at once; {_width(chosen, finest_um)}",
        f"model      {chosen.network.parameters / 1e6:.1f} M parameters, about {chosen.step_s:.2g} s a step",
        f"run        {config.horizon_steps} steps, about {chosen.minutes} minutes",
    ]


def _stored_words(volume: VolumeFacts, share: float) -> str:
    """How many chunks are stored: a share where they were counted, what was seen where only some were asked for."""
    if volume.occupancy.present is None and volume.grey is not None:
        return f"{volume.grey.found} of {volume.grey.tried} chunks asked for at random are stored"
    return f"{format_percent(math.floor(1000 * share) / 1000)} of the chunks are stored"


def suggestion_text(volume: VolumeFacts, machine: Machine, chosen: Suggestion, finest_um: float | None = None) -> str:
    """The config as commented YAML."""
    head = [
        f"# Written by vesuvius init for {to_yaml(volume.spec.path)} on {machine.words()}.",
        "# All keys and their meanings: docs/config.md, or vesuvius train --config FILE --print-config",
    ]
    return "\n".join([*head, dump_set_keys(chosen.config, _reasons(volume, machine, chosen, finest_um))])


def _reasons(volume: VolumeFacts, machine: Machine, chosen: Suggestion, finest_um: float | None) -> dict[str, str]:
    """Why keys have their values."""
    config, training, level = chosen.config, chosen.config.training, volume.chosen
    others = len(volume.levels) - 1
    model = f"{chosen.network.parameters / 1e6:.1f} M parameters: about {chosen.step_s:.2g} s a step on"
    reasons = {
        "name": f"the run directory is runs/{config.name}",
        "data.volumes[].level": f"{format_sizes(level.shape)} {level.dtype}, chunks "
        f"{format_sizes(level.chunk_zyx)}; {others} other level{'s' * (others != 1)}; "
        f"a patch: {_width(chosen, finest_um).partition(':')[0]}",
        "data.patch_size": f"voxels z, y, x: {_patch_reason(volume, chosen)}",
        "data.min_foreground": "at least half of each patch lies in stored chunks",
        "data.foreground": "a coarse level says where material is",
        "data.validation": "the volume is too small to hold out a part",
        "data.store.requests": "in flight per reader",
        "data.store.cache_dir": "fetched chunks are kept on this disk",
        "data.store.cache_gib": f"hard limit; {gib(machine.disk_bytes)} GiB were free",
        "training.train_batch_size": "what memory holds at once",
        "training.accumulate_steps": f"{config.global_batch} patches a step; only the product of both matters",
        "training.workers": f"reader processes, of {machine.cores:g} cores",
        "training.epochs": f"{config.horizon_steps} steps of about {chosen.step_s:.2g} s: about {chosen.minutes} "
        "minutes here; to continue, raise epochs and add --resume",
        "training.amp": "bf16 or fp16 on a GPU, float32 on a CPU",
        "training.lr_schedule": "needs no horizon: a longer run continues as if planned from the start",
        "training.preview_every": f"pictures in runs/{config.name}/samples",
        "model": f"{model} {machine.gpu or 'a CPU'} at {machine.flops_s / 1e12:.2g} TFLOP/s",
        "model.stem_stride": "too few slices to downsample z",
    }
    if training.workers == 0:
        reasons["training.workers"] = "the trainer itself reads: memory or /dev/shm is too small for Ray"
    if chosen.stored_share is not None and chosen.stored_share < SPARSE:
        share = _stored_words(volume, chosen.stored_share)
        reasons["data.min_foreground"] = f"{share}; {reasons['data.min_foreground']}"
        if not config.data.min_foreground:
            reasons["data"] = (
                f"{share}, but which is not known: run vesuvius volume occupancy, then set min_foreground: 0.5"
            )
    return reasons


def _patch_reason(volume: VolumeFacts, chosen: Suggestion) -> str:
    if chosen.config.data.patch_size == PATCH:
        return "the size that the defaults are made for"
    if chosen.config.data.patch_size == chosen.largest_patch_zyx:
        return f"the largest that fits a volume of {list(shape_zyx(volume))}"
    return f"what this machine computes in about {chosen.step_s:.2g} s; {list(chosen.largest_patch_zyx)} would fit"
