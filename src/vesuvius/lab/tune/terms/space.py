"""What a tune may try, and the limits that it stays below."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, Self

from vesuvius.lab.tune.terms.setting import Knob, Setting

Goal = Literal["samples_s", "cost"]

WITHIN: dict[Goal, float] = {"samples_s": 0.03, "cost": 0.10}
"""The cheapest setting is taken whose samples a second are within this share of the best."""


_LOWERED = ("workers", "prefetch_factor", "train_batch_size")
"""Knobs that are turned down where memory is short."""


@dataclass(frozen=True)
class Space:
    """Caps of the knobs and limits of the machine; with a ledger, all that the policy knows.

    Attributes:
        source: the setting of the config.
        goal: `samples_s` takes the cheapest setting within 3 % of the fastest, `cost` within 10 %.
        scale_batch: whether the effective batch may grow.
        budget_s: seconds that all trials together may take.
        on_gpu: whether trials run on one.
        cores: processors that the run may use.
        most_workers: cap on readers.
        most_prefetch: cap on `prefetch_factor`.
        remote: whether any volume lies on a remote store, where requests in flight matter.
        most_requests: cap on them.
        most_batch: cap on the micro-batch, by tensors of 2^31 elements or by `scale_batch`.
        levels: of the network, from the highest resolution down: those that checkpointing may name; 0, full
            resolution, is one of them where the network has blocks there.
        deterministic: keeps cuDNN's benchmark off.
        ram_limit_bytes: predicted memory beyond which no trial starts: the guard's first rung.
        vram_limit_bytes: the same on the GPU; None on a CPU.
        trial_s: seconds that the first trial may take at most, as a guess for the plan.
        trial_steps: measured steps of a trial: at least, and at most unless they are short.
        trial_limit_s: at which a trial ends, however few its steps; baseline and first compiled one have twice as long.
        kept: knobs that stay as the source has them.
        most_ahead: batches of the source's size beyond which `training.prefetch_mib` lets no more be put together
            ahead; None = it sets no limit.
    """

    source: Setting
    goal: Goal
    scale_batch: bool
    budget_s: float
    on_gpu: bool
    cores: float
    most_workers: int
    most_prefetch: int
    remote: bool
    most_requests: int
    most_batch: int
    levels: tuple[int, ...]
    deterministic: bool
    ram_limit_bytes: int
    vram_limit_bytes: int | None
    trial_s: float
    trial_steps: tuple[int, int] = (50, 100)
    trial_limit_s: float = 300.0
    most_ahead: int | None = None
    kept: tuple[Knob, ...] = ()

    def allows(self, setting: Setting) -> bool:
        """Whether a setting leaves the knobs alone that are to be kept."""
        return not set(self.kept) & setting.changes(self.source).keys()

    @property
    def but_for_kept(self) -> str:
        """To be said where nothing smaller is left to try; '' where no knob that takes memory is to be kept."""
        kept = [knob for knob in self.kept if knob in _LOWERED]
        return f" with --keep {','.join(kept)}" if kept else ""

    def batches_ahead(self, setting: Setting) -> int:
        """Batches that a setting puts together ahead of the trainer."""
        wanted = max(setting.workers, 1) * setting.prefetch_factor
        if self.most_ahead is None:
            return wanted
        return min(wanted, max(self.most_ahead * self.source.train_batch_size // setting.train_batch_size, 1))

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From `record()`, by way of JSON."""
        tuples: dict[str, Any] = {key: tuple(record[key]) for key in ("levels", "trial_steps")}
        tuples["kept"] = tuple(record.get("kept", ()))  # ledgers of before have none
        return cls(**record | tuples | {"source": Setting.from_record(record["source"])})


class Planner(Protocol):
    """What a setting should take before it was tried.  Pure."""

    def ram_bytes(self, setting: Setting) -> int:
        """Host memory of a trial at its peak."""
        ...

    def vram_bytes(self, setting: Setting) -> int | None:
        """GPU memory at its peak, with the reserve; None on a CPU."""
        ...

    def later_bytes(self, setting: Setting) -> int:
        """Host memory that a long run takes beyond a trial: readers of two executions live while one hands over."""
        ...
