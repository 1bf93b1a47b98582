"""Where a run starts: a checkpoint to resume, if the config is the same experiment, or the weights that
`training.init_from` names, if they mean the same there as here.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vesuvius.config import Config
from vesuvius.config.describe import DRAWS_SAMPLES, EFFECTS, OTHER_EXPERIMENT, OTHER_VOXELS, flatten
from vesuvius.config.load import parse_stored
from vesuvius.config.yaml_source import read_yaml
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.plan.plan import differences
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.checkpoint.format import (
    CONFIG,
    MANIFEST,
    STATE,
    check_files,
    find_checkpoint,
    load_checkpoint,
    load_state,
    load_weights_file,
    permission_checked,
    step_of,
    weights_file,
)
from vesuvius.training.checkpoint.model_file import is_model_file
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.checkpoint.trained import (
    CheckpointInfo,
    DataFacts,
    TrainedVolume,
    load_weights,
    read_checkpoint_info,
    trained_volumes,
)
from vesuvius.training.ranks.share import batch_advice
from vesuvius.training.step.setup import build_meta_network
from vesuvius.training.step.step import TrainStep, learning_rate, weight_problems

_PLAN_VERSION = "plan.version: "
_THREADS = "OMP_NUM_THREADS"  # torch's number of threads
_SIGMA_MAX, _NOISE_INPUT = "diffusion.sigma_max", "diffusion.noise_embedding"
_CONTEXT = "data.volumes[].condition.context"
_LEVELS = ("diffusion.timesteps", "diffusion.sigma_m")  # only t depends on them
# Keys that give weights their meaning, and further ones that a new run may change.
_MEANING = (
    *("model.", *_LEVELS, "diffusion.noise", "diffusion.prediction"),
    *("data.condition_classes", _CONTEXT),
)
# What validation errors depend on.
_JUDGES = OTHER_VOXELS, "training.validate_patches", "diffusion.sampler_condition_noise"
_NAMED = ("diffusion.", "data.normalize.", "data.condition_", "voxel size")


def run_state(
    config: Config, data: PreparedData, facts: DataFacts, step: TrainStep, progress: Progress
) -> dict[str, Any]:
    """All that a resume needs, and what sampling needs to know about the volumes, as tensors and plain data."""
    return {
        **step.state_dict(),
        **progress.state_dict(),
        **facts.state_dict(),
        "plan_hash": data.plan.hash,
        "plan": data.plan.describe(),
        "condition_dtype": data.job.condition_dtype,
        "config": config.model_dump(mode="json"),
        "torch_threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get(_THREADS),
    }


def is_finished(checkpoint: Path, config: Config) -> bool:
    """Whether a complete checkpoint is that of the last step, with no validation or preview outstanding."""
    if step_of(checkpoint) < config.stop_step:
        return False
    progress = Progress.from_state(load_state(checkpoint / STATE, mmap=True))
    return not (progress.validation_due(config) or progress.preview_due(config))


def read_resume_point(path: Path, config: Config, data: PreparedData, allow_drift: bool = False) -> CheckpointInfo:
    """Read a verified checkpoint and compare its experiment with the requested one.

    Raises ConfigError, with the differences: the order of samples, the model or the meaning of the weights has changed
    without `allow_drift`, or the weights do not fit the network.
    """
    state = load_checkpoint(path, verified=True)
    stored = parse_stored(state["config"], source=str(path / STATE))
    stored, config = with_network_of(stored, stored), with_network_of(stored, config)
    before, now = stored.model_dump(mode="json"), config.model_dump(mode="json")
    if stored.training.optimizer != config.training.optimizer:
        raise ConfigError(
            f"Cannot resume with training.optimizer={config.training.optimizer}: {path} holds the moments of "
            f"{stored.training.optimizer}; undo the change, or start a new run with training.init_from"
        )
    drift = differences(flatten(before), flatten(now))
    refused = [line for line in drift if line.startswith(OTHER_EXPERIMENT) and not line.startswith(DRAWS_SAMPLES)]
    if _without_paths(before["data"]["volumes"]) != _without_paths(now["data"]["volumes"]):
        refused += [line for line in drift if line.startswith("data.volumes")]
    facts = DataFacts.from_state(state, path)
    stored_voxels = _voxel_properties(facts.volumes, state["condition_dtype"])
    refused += differences(stored_voxels, _voxel_properties(trained_volumes(data), data.job.condition_dtype))
    if state["plan_hash"] != data.plan.hash:
        refused = _plan_changes(state["plan"], data.plan.describe()) + refused
    if refused and not allow_drift:
        raise ConfigError(
            f"Cannot resume: data or model differ from {path}:\n  "
            + "\n  ".join(refused)
            + "\nundo these changes, start a new run under another name (training.init_from keeps the weights), or "
            "continue anyway with --allow-drift"
        )
    if refused and (problems := weight_problems(build_meta_network(config).state_dict(), state["model"])):
        remedy = "undo the change of model.* or data.volumes[].condition"
        raise ConfigError(
            f"The weights in {path} do not fit the network, even with --allow-drift: {problems}; {remedy}"
        )
    drift = [line for line in drift if line not in refused]
    drift += drift_effects(stored, config, state["step"])
    # A new plan version alone keeps intensity ranges and quarantine valid.
    of_data = [line for line in refused if line.startswith(("plan.", "data.", "dtype "))]
    other_data = any(not line.startswith(_PLAN_VERSION) for line in of_data)
    return CheckpointInfo(path, state["step"], stored, facts, state, drift, refused, other_data)


def with_network_of(stored: Config, config: Config) -> Config:
    """Return the config with the checkpoint's kernel and noise embedding where it leaves the choice open.  Pure."""
    model = {"patch_embed_kernel": config.model.patch_embed_kernel or stored.model.patch_embed_kernel}
    diffusion = {"noise_embedding": config.diffusion.noise_embedding or stored.diffusion.noise_embedding or "log_sigma"}
    same = {"model": config.model.model_copy(update=model), "diffusion": config.diffusion.model_copy(update=diffusion)}
    return config.model_copy(update=same)


def drift_effects(before: Config, now: Config, step: int) -> list[str]:
    """Effects of a changed config on training after optimizer step `step`, one line each.  Pure.

    Each line starts with one of EFFECTS; harmless changes, such as a longer run at a constant rate, give none.
    """
    old, new, lines = before.training, now.training, []
    horizon = max(before.horizon_steps, now.horizon_steps, step + 1)
    ahead = sorted({step + (horizon - step) * percent // 100 for percent in range(101)})
    differs = [at for at in ahead if not math.isclose(learning_rate(at, old), learning_rate(at, new), rel_tol=1e-6)]
    if differs:
        at, last = differs[0], f"{learning_rate(step - 1, old):.2g} in step {step}, " if step else ""
        rates = learning_rate(at, new), learning_rate(at, old)
        # As few digits as tell them apart.
        one, two = next(pair for n in range(2, 9) if len(set(pair := [f"{rate:.{n}g}" for rate in rates])) == 2)
        lines.append(f"{EFFECTS[0]}: {last}{one} instead of {two} in step {at + 1}")
    if "auto" not in (old.ranks, new.ranks) and before.global_batch != now.global_batch:
        text = f"{EFFECTS[1]}: {before.global_batch} samples per step until now, {now.global_batch} from now on"
        advice = batch_advice(now, before)
        lines.append(f"{text}, {advice}" if advice else text)
    if old.ema_decay != new.ema_decay:
        spans = [1 / (1 - decay) for decay in (old.ema_decay, new.ema_decay)]
        lines.append(f"{EFFECTS[2]}: over about {spans[0]:.3g} steps until now, over {spans[1]:.3g} from now on")
    return lines


def _plan_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between two plans, one line each; different plan versions are not compared key by key.  Pure."""
    if before["version"] != now["version"]:
        other = "draws other samples; use the version that started the run"
        return [f"{_PLAN_VERSION}was {before['version']}, is {now['version']} (this version of vesuvius {other})"]

    whys = {
        ".foreground:": " (the mask, its level, the set of stored chunks, or how vesuvius counts it has changed)",
        ".transforms:": " (a transform.json of its condition has changed)",
        ".train:": " (the volume, its labels or mask has changed)",
    }
    named = [{f"volumes[{n}]": volume for n, volume in enumerate(plan["volumes"])} for plan in (before, now)]
    lines = differences(flatten(before | {"volumes": None} | named[0]), flatten(now | {"volumes": None} | named[1]))
    return [f"plan.{line}{''.join(why for key, why in whys.items() if key in line)}" for line in lines]


def restore(resumed: CheckpointInfo, step: TrainStep, device: torch.device) -> Progress:
    """Load the state into the training step and release it.  Returns the progress of the run."""
    state = resumed.state
    step.load_state_dict(state)
    requested = os.environ.get(_THREADS)
    if device.type == "cpu" and state["omp_num_threads"] == requested:
        # The summation order of threads is part of a CPU result.
        torch.set_num_threads(state["torch_threads"])
    progress = Progress.from_state(state)
    if resumed.other_data:
        progress.quarantined = []
    if resumed.accepted or any(line.startswith(_JUDGES) for line in resumed.drift):
        progress.best = None  # validation losses before and after are not comparable
    state.clear()  # frees gigabytes for the rest of the session
    return progress


def _voxel_properties(volumes: Sequence[TrainedVolume], condition_dtype: str | None) -> dict[str, Any]:
    lie = [f"{format_sizes(v.condition_factors)} at {format_sizes(v.condition_offsets)}" for v in volumes]
    return {
        "dtype of the volumes": ", ".join(volume.dtype.name for volume in volumes),
        "dtype of the conditions": condition_dtype,
        "alignment of the conditions (factors, offsets)": "; ".join(lie),
    }


def _without_paths(tree: Any) -> Any:
    """A config without paths: volumes may move."""
    if isinstance(tree, dict):
        return {key: _without_paths(value) for key, value in tree.items() if key not in ("path", "transform")}
    return [_without_paths(value) for value in tree] if isinstance(tree, list) else tree


def read_initial_weights(given: Path) -> tuple[dict[str, Tensor], Path]:
    """Averaged weights named by `training.init_from`, by name, in float32 on the CPU; and their file.

    `given` is as for `find_checkpoint`, or any `.safetensors` file.  Raises ConfigError: there are no weights;
    StorageError: they are damaged.
    """
    with permission_checked():
        alone = given.suffix == ".safetensors" and given.is_file()
    if not alone:
        found = find_checkpoint(given, "training.init_from")
        source, weights = found / weights_file("ema"), load_weights(found, "ema")
    else:
        if (given.parent / MANIFEST).is_file():
            check_files(given.parent, given.name)
        source, weights = given, load_weights_file(given)
    # Copies: the file is memory-mapped, and its run may delete it.
    return {name: weight.to(torch.float32, copy=True) for name, weight in weights.items()}, source


def compare_initial(source: Path, now: Config, data_now: DataFacts | None) -> list[str]:
    """Compare the config of a weights file, which lies next to it in a checkpoint, with the one of a new run.

    Returns differences that a new run may have, one line each.  Raises ConfigError: the weights mean something else.
    """
    path, data_then = source.parent / CONFIG, None
    is_checkpoint = (source.parent / MANIFEST).is_file()
    try:
        if is_model_file(source):
            info = read_checkpoint_info(source)
            path, before, data_then = source, info.config, info.data
        else:
            if is_checkpoint:
                check_files(source.parent, CONFIG)
            before = parse_stored(read_yaml(path.read_text(encoding="utf-8"), str(path))[0], source=str(path))
    except (OSError, ValueError, TypeError, AttributeError) as error:  # a ConfigError is a ValueError
        if is_checkpoint:
            raise
        cause = "" if isinstance(error, FileNotFoundError) else f" ({one_line(error)})"
        return [
            f"{source} comes without the config of its run{cause}; make sure yourself that prediction, noise, "
            "timesteps, strides, heads and intensities are those it was trained with"
        ]
    with suppress(StorageError):  # only the weights and their config were copied
        data_then = DataFacts.from_state(load_state(source.parent / STATE, mmap=True), source.parent / STATE)
    data_now = None if data_then is None else data_now
    old, new = _meaning(before, data_then), _meaning(now, data_now)
    lines = differences(old, new)
    if {old[_NOISE_INPUT], new[_NOISE_INPUT]} == {"log_sigma"}:
        lines = [line for line in lines if not line.startswith(_LEVELS)]
    same_key = before.diffusion.sigma_max == now.diffusion.sigma_max
    refused = [line for line in lines if line.startswith(_MEANING) and not (same_key and line.startswith(_SIGMA_MAX))]
    if refused:
        raise ConfigError(
            f"The weights of training.init_from={now.training.init_from} mean something else in this run:\n  "
            + "\n  ".join(refused)
            + f"\nset these keys to what they were ({path}), or give a copy of {source.name} without its config to "
            "start from the weights in spite of it"
        )
    kept = f" (it follows the data; {_SIGMA_MAX}={old.get(_SIGMA_MAX)} keeps the noise levels of the weights)"
    return [line + (kept if line.startswith(_SIGMA_MAX) else "") for line in lines if line.startswith(_NAMED)]


def _meaning(config: Config, data: DataFacts | None) -> dict[str, Any]:
    """Settings by key, with those that stand for others as what they come to."""
    found = flatten(config.model_dump(mode="json")) | {"voxel size, um": data and data.voxel_size_um}
    found |= {
        "model.strides": config.model.level_strides_zyx,
        _NOISE_INPUT: config.diffusion.noise_embedding or "log_sigma",
        _CONTEXT: config.data.context,
    }
    if config.diffusion.noise != "spectral":
        found["diffusion.sigma_min"] = found[_SIGMA_MAX] = None  # without effect
    elif data is not None:
        alpha_bar = float(Schedule.from_config(config.diffusion, data.spectrum).alpha_bar_64[-1])
        found[_SIGMA_MAX] = float(f"{math.sqrt(1 / alpha_bar - 1):.3g}")
    if not config.has_condition:
        found["diffusion.condition_dropout"] = None
    return found


def check_initial_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises ConfigError if weights do not fit a network, possibly on the meta device, or are not finite."""
    if problems := weight_problems(dict(network.named_parameters()), weights):
        raise ConfigError(
            f"The weights of training.init_from do not fit the network: {problems}; copy model.* "
            "(model.patch_embed_kernel=3 if it has no such key), and whether there is a condition, its classes and "
            "context, from their run, or remove training.init_from"
        )
    if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ConfigError(
            f"The weights of training.init_from are not finite: NaN or infinity in {', '.join(bad[:3])}{more}; use an "
            "earlier checkpoint of their run, or remove training.init_from"
        )
