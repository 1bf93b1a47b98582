"""A measurement of one setting: what the living trainer hands to the policy, and what the ledger stores."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from vesuvius.tuning.setting import Setting

Kind = Literal["run", "readers", "step"]
"""What is measured: `run` = the training loop; `readers` = batches taken as soon as they come, without a step: what the
readers can deliver; `step` = optimizer steps on one batch while the readers are idle: what the trainer can compute."""

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]

DEADLY: tuple[Ended, ...] = ("guard", "gpu_memory", "killed")
"""Ends that mean a lack of memory: such a setting is never recommended."""


@dataclass(frozen=True)
class Command:
    """What to measure, for about how many seconds, and the readers that are to be in force."""

    number: int
    kind: Kind
    seconds: float
    workers: int
    prefetch_factor: int
    requests: int

    def line(self) -> bytes:
        """For the trainer's standard input."""
        return json.dumps(vars(self)).encode() + b"\n"


@dataclass(frozen=True)
class Block:
    """A setting, what was measured, and how that ended.

    Attributes:
        cause: one line; '' where it ended ok.
        seconds: all of it: restart, reconfiguration, warm-up and measuring.
        samples: measured; 0 unless ok.
        measured_s: that these took, or would have taken where they had been read ahead.
        data_share: of the step time, spent waiting for data; of a `run` alone.
        cores_used: CPU seconds per second of trainer and readers, while measured; None = not known.
        reader_s: that one reader takes for a sample, with its waits for the store; None = nothing was read.
        decode_s: the decoding part of `reader_s`.
        ram_bytes: peak of trainer, readers and object store since the setting was in force; where it did not end ok,
            the last that was seen.  None = not known.
        vram_bytes: peak GPU memory of the trainer, with CUDA's own; None on a CPU.
        text: the verdict of a `run` in words.
    """

    setting: Setting
    kind: Kind
    ended: Ended
    cause: str
    seconds: float
    samples: int = 0
    measured_s: float = 0.0
    data_share: float | None = None
    cores_used: float | None = None
    reader_s: float | None = None
    decode_s: float | None = None
    ram_bytes: int | None = None
    vram_bytes: int | None = None
    text: str = ""

    @property
    def rate(self) -> float:
        """Samples per second; 0 unless ok."""
        return self.samples / self.measured_s if self.measured_s else 0.0

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From `record()`, by way of JSON."""
        return cls(**record | {"setting": Setting.from_record(record["setting"])})
