"""Going on with a run: which checkpoint, and whether the config still means the same experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vesuvius.config import Config
from vesuvius.config.describe import flatten
from vesuvius.config.drift import DRAWS_SAMPLES, EFFECTS, OTHER_EXPERIMENT
from vesuvius.config.load import parse_stored
from vesuvius.errors import ConfigError
from vesuvius.plan.plan import differences
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.checkpoint.data_facts import DataFacts, TrainedVolume, trained_volumes
from vesuvius.training.checkpoint.format import (
    STATE,
    load_checkpoint,
    map_state,
    step_of,
)
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.step import TrainStep, learning_rate, weight_problems

_PLAN_VERSION = "plan.version: "


@dataclass
class ResumePoint:
    """A checkpoint that a run continues from."""

    checkpoint: Path  # its directory
    step: int  # optimizer steps it has done
    state: dict[str, Any]  # what it holds; empty once `restore` has taken it over
    drift: list[str]  # config keys that have changed since and may, a line each, then what that changes
    accepted: list[str]  # differences that make it another experiment, let through by --allow-drift

    @property
    def other_data(self) -> bool:
        """Whether the grey ranges are those of other data."""
        other = [line for line in self.accepted if not line.startswith(_PLAN_VERSION)]
        return any(line.startswith(("plan.", "data.", "dtype ")) for line in other)

    @property
    def other_plan(self) -> bool:
        """Whether the list of unreadable regions is that of another plan."""
        return self.other_data or any(line.startswith(_PLAN_VERSION) for line in self.accepted)

    @property
    def comparable(self) -> bool:
        """Whether validation losses from before and after the resume compare."""
        return not self.accepted and not any(line.startswith("training.validate_patches") for line in self.drift)


def run_state(
    config: Config,
    data: PreparedData,
    facts: DataFacts,
    step: TrainStep,
    progress: Progress,
) -> dict[str, Any]:
    """All that a resume needs, and what sampling needs to know of the volumes, as tensors and plain data."""
    return {
        **step.state_dict(),
        **progress.state_dict(),
        **facts.state_dict(),
        "plan_hash": data.plan.hash,
        "plan": data.plan.describe(),
        "condition_dtype": data.job.condition_dtype,
        "config": config.model_dump(mode="json"),
        "torch_threads": torch.get_num_threads(),
    }


def is_finished(checkpoint: Path, config: Config) -> bool:
    """Whether a whole checkpoint is that of the last step, with nothing left to make up for."""
    if step_of(checkpoint) < config.stop_step:
        return False
    progress = Progress.from_state(map_state(checkpoint))
    return not (progress.validation_due(config) or progress.preview_due(config))


def read_resume_point(path: Path, config: Config, data: PreparedData, allow_drift: bool = False) -> ResumePoint:
    """Read a checkpoint that was found whole and compare its experiment with the one asked for.

    Raises:
        ConfigError: the order of samples, the model or what the weights mean has changed, and not `allow_drift`; or
            the weights do not fit the network.  Shows the differences.
    """
    state = load_checkpoint(path, verified=True)
    stored = parse_stored(state["config"], source=str(path / STATE))
    before, now = stored.model_dump(mode="json"), config.model_dump(mode="json")
    if stored.training.optimizer != config.training.optimizer:
        raise ConfigError(
            "a resumed run must keep its optimizer, whose moments are of no use to another; got training.optimizer="
            f"{config.training.optimizer}, was {stored.training.optimizer} in {path}; undo it, or start a new run "
            "under another name with training.init_from"
        )
    drift = differences(flatten(before), flatten(now))
    refused = [line for line in drift if line.startswith(OTHER_EXPERIMENT) and not line.startswith(DRAWS_SAMPLES)]
    if _without_paths(before["data"]["volumes"]) != _without_paths(now["data"]["volumes"]):
        refused += [line for line in drift if line.startswith("data.volumes")]
    dtypes = [volume["dtype"] for volume in state["volumes"]], [volume.dtype.name for volume in data.volumes]
    if dtypes[0] != dtypes[1]:
        refused.append(f"dtype of the volumes: was {', '.join(dtypes[0])}, is {', '.join(dtypes[1])}")
    if state["condition_dtype"] != data.job.condition_dtype:
        refused.append(f"dtype of the conditions: was {state['condition_dtype']}, is {data.job.condition_dtype}")
    lie = [_places(volumes) for volumes in (DataFacts.from_state(state).volumes, trained_volumes(data))]
    if lie[0] != lie[1]:
        refused.append(f"place of the conditions in their volumes (factors, offsets): was {lie[0]}, is {lie[1]}")
    if state["plan_hash"] != data.plan.hash:
        refused = _plan_changes(state["plan"], data.plan.describe()) + refused
    if refused and not allow_drift:
        if refused[0].startswith(_PLAN_VERSION):
            raise ConfigError(_other_version(path, refused))
        raise ConfigError(
            f"a resumed run must keep its data and its model; got differences to {path}:\n  "
            + "\n  ".join(refused)
            + "\nundo them, start a new run under another name (training.init_from brings the weights along), or "
            "continue anyway with --allow-drift"
        )
    if refused and (problems := weight_problems(lay_out_network(config).state_dict(), state["model"])):
        raise ConfigError(
            f"even with --allow-drift the weights must fit the network; got {problems} in {path}; undo the change of "
            "model.* or data.volumes[].condition"
        )
    drift = [line for line in drift if line not in refused]
    return ResumePoint(path, state["step"], state, drift + drift_effects(stored, config, state["step"]), refused)


def drift_effects(before: Config, now: Config, step: int) -> list[str]:
    """What a changed config does to the training beyond optimizer step `step`, a line each.  Pure.

    Each of EFFECTS may begin a line; a key that changes none of that, as a longer run at a constant rate, has none.
    """
    old, new, lines = before.training, now.training, []
    horizon = max(before.horizon_steps, now.horizon_steps, step + 1)
    ahead = sorted({step + (horizon - step) * percent // 100 for percent in range(101)})
    differs = [at for at in ahead if not math.isclose(learning_rate(at, old), learning_rate(at, new), rel_tol=1e-6)]
    if differs:
        at, last = differs[0], f"{learning_rate(step - 1, old):.2g} in step {step}, " if step else ""
        lines.append(
            f"{EFFECTS[0]}: {last}{learning_rate(at, new):.2g} in step {at + 1}, where it was to be "
            f"{learning_rate(at, old):.2g}"
        )
    if "auto" not in (old.ranks, new.ranks) and before.global_batch != now.global_batch:
        lines.append(f"{EFFECTS[1]}: {before.global_batch} samples a step until now, {now.global_batch} from now on")
    if old.ema_decay != new.ema_decay:
        spans = [1 / (1 - decay) for decay in (old.ema_decay, new.ema_decay)]
        lines.append(f"{EFFECTS[2]}: over about {spans[0]:.3g} steps until now, over {spans[1]:.3g} from now on")
    return lines


def check_same_config(config: Config, of_rank_0: dict[str, Any], rank: int) -> None:
    """Raises ConfigError where a rank was started with another config than rank 0.  Pure.

    Args:
        of_rank_0: its `model_dump(mode="json")`.
    """
    if lines := differences(flatten(of_rank_0), flatten(config.model_dump(mode="json"))):
        raise ConfigError(
            f"all ranks must be started with the same config; got a different one on rank {rank} than on rank 0: "
            f"{'; '.join(lines[:5])}; give all of them the same file, VESUVIUS_* variables and overrides"
        )


def _plan_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of the plan has changed, a line each.  Pure.

    Plans of two versions draw other samples, and what they say of themselves does not compare key by key.
    """
    versions = [plan.get("version", 1) for plan in (before, now)]
    if versions[0] != versions[1]:
        return [f"{_PLAN_VERSION}was {versions[0]}, is {versions[1]}"]

    def by_volume(plan: dict[str, Any]) -> dict[str, Any]:
        volumes = enumerate(plan.get("volumes", ()))
        keys = {f"volumes[{number}].{key}": value for number, volume in volumes for key, value in volume.items()}
        return {key: value for key, value in plan.items() if key != "volumes"} | keys

    why = " (another mask or level, or other chunks are stored than when the run began)"
    lines = differences(by_volume(before), by_volume(now))
    return [f"plan.{line}{why if '.foreground:' in line else ''}" for line in lines]


def _other_version(path: Path, refused: list[str]) -> str:
    """Why a checkpoint of another version of the plan is refused, in one line."""
    versions, *beside = (line.removeprefix(_PLAN_VERSION) for line in refused)
    more = f", and beside {'; '.join(beside)}" if beside else ""
    return (
        f"a resumed run must keep its plan, which says which voxels sample i is; got another version of it in {path} "
        f"({versions}){more}; continue with --allow-drift (weights, optimizer and step are kept, the order of "
        "samples starts over), or use the version of vesuvius that started the run"
    )


def restore(found: ResumePoint, step: TrainStep, device: torch.device, threads: int | None = None) -> Progress:
    """Put the state back into the training step and let go of it.  Returns how far the run was.

    `threads`: of the trainer on a CPU; None = as many as the run had.
    """
    state = found.state
    step.load_state_dict(state)
    if device.type == "cpu":
        # The order in which threads add up is part of a CPU result.
        torch.set_num_threads(threads or state["torch_threads"])
    progress = Progress.from_state(state)
    if found.other_plan:
        progress.quarantined = []
    if not found.comparable:
        progress.best = None
    state.clear()  # gigabytes that would stay in memory for the whole session
    return progress


def _places(volumes: Sequence[TrainedVolume]) -> str:
    """How the conditions lie in their volumes."""
    return "; ".join(f"{format_sizes(v.condition_factors)} at {format_sizes(v.condition_offsets)}" for v in volumes)


def _without_paths(tree: Any) -> Any:
    """A config but for where its volumes lie: they may move."""
    if isinstance(tree, dict):
        return {key: _without_paths(value) for key, value in tree.items() if key != "path"}
    return [_without_paths(value) for value in tree] if isinstance(tree, list) else tree
