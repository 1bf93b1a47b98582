"""What an operator must learn of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["reader_died", "quarantine", "spill", "reconfigured"]


@dataclass(frozen=True)
class StreamEvent:
    """Something that the operator must learn of, though the batches go on unchanged.

    Attributes:
        kind: what happened.
        text: one line for the log.
        fields: the same as data.
    """

    kind: EventKind
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
