"""From a verdict to a list of things to try, with what each may gain and cost, and of things to leave alone.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml

from vesuvius.monitor.verdict import Verdict, judge
from vesuvius.monitor.window import Knobs, Thresholds
from vesuvius.runlog.units import format_percent

_MOST = 5
_RISKS = {
    "training.amp": "rounding to 16 bits; losses differ a little",
    "training.compile": "minutes at the start of each session",
    "training.channels_last": "none known; other kernels round differently",
    "training.cudnn_benchmark": "the first step takes longer, and tries kernels with large workspaces",
    "training.train_batch_size": "GPU memory; the effective batch stays the same",
    "training.accumulate_steps": "",
    "training.threads": "sums are rounded in another order",
    "training.workers": "RAM and a processor for each reader",
    "training.prefetch_factor": "RAM for each batch ahead",
    "training.prefetch_mib": "RAM for batches ahead",
    "data.store.requests": "more load on the store",
}


@dataclass(frozen=True)
class Advice:
    """Something to try."""

    what: str
    overrides: tuple[str, ...]  # to be written after `vesuvius train`; empty where no setting does it
    gain: str  # the most that it can give; what it will give has to be measured
    risk: str


def recommend(verdict: Verdict, knobs: Knobs, thresholds: Thresholds) -> list[Advice]:
    """What the verdict says first, then what it would say had that been done, while it names new settings."""
    found: list[Advice] = []
    tried: set[str] = set()
    while len(found) < _MOST:
        keys = {override.partition("=")[0] for override in verdict.overrides}
        if (found and not keys) or keys & tried:
            break
        found.append(_advice(verdict))
        if not keys:
            break
        tried |= keys
        knobs = _with(knobs, verdict.overrides)
        verdict = judge(verdict.window, knobs, thresholds)
    return found


def leave_alone(verdict: Verdict, thresholds: Thresholds) -> list[str]:
    """What takes so little that no change of it is worth the time."""
    window, good = verdict.window, thresholds.data_share_good
    shares = (
        ("data loading, readers and prefetch", window.data_share),
        ("copies to the device", window.h2d_share),
        ("the host's own work", window.host_share),
    )
    found = [
        f"{name}: {format_percent(share)} of the time (good: below {format_percent(good)})"
        for name, share in shares
        if share <= good
    ]
    if window.compute_share >= thresholds.gpu_share_good:
        found.append(
            f"use of the device: it computes {format_percent(window.compute_share)} of the time "
            f"(good: above {format_percent(thresholds.gpu_share_good)})"
        )
    return found


def _advice(verdict: Verdict) -> Advice:
    risk = "; ".join(dict.fromkeys(r for o in verdict.overrides if (r := _RISKS.get(o.partition("=")[0], "not known"))))
    return Advice(verdict.advice, verdict.overrides, _most_gain(verdict), risk or "none")


def _most_gain(verdict: Verdict) -> str:
    """A wait can be removed at most; what makes computing faster cannot be told from shares."""
    window = verdict.window
    waits = {"data-bound": window.data_share, "transfer-bound": window.h2d_share, "host-bound": window.host_share}
    wait = waits.get(verdict.kind)
    if not verdict.overrides:
        return "none by a setting"
    if wait is None or not 0 < wait < 1:
        return "unknown from one setting: vesuvius tune measures it"
    return f"at most {1 / (1 - wait):.2f} times the speed"


def _with(knobs: Knobs, overrides: Sequence[str]) -> Knobs:
    """The knobs as overrides leave them; keys that are none of them are passed over."""
    names = {each.name for each in fields(Knobs)}
    changes: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        name = {"prefetch_mib": "prefetch_limit_mib"}.get(key.rpartition(".")[2], key.rpartition(".")[2])
        if name in names:
            changes[name] = yaml.safe_load(value)
    return replace(knobs, **changes)
