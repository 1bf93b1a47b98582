"""Where keys and values of a YAML text stand, to the character, so that one can be changed and the rest kept.  Pure.

PyYAML's nodes forget where an alias was written and where the text of a block ends; its events know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import yaml


@dataclass(frozen=True)
class Place:
    """A value of the text.

    Attributes:
        start, end: characters of the text; properties (`&anchor`, `!!tag`) included, comments behind it are not.
        line: counted from 0.
        column: of the start; of a mapping in block style that of its keys.
        flow: inside braces or brackets, or a pair of them itself.
        text: of a scalar.
        alias: name of the anchor whose value is repeated here; '' = this is a value itself.
        anchor: its own; '' = none.
        entries: keys and values of a mapping.
        items: of a sequence.
    """

    start: int
    end: int
    line: int
    column: int
    flow: bool
    text: str | None = None
    alias: str = ""
    anchor: str = ""
    entries: tuple[tuple[Place, Place], ...] = field(default=())
    items: tuple[Place, ...] = field(default=())

    def entry(self, key: str) -> tuple[Place, Place] | None:
        """The places of a key, or of nothing before an item of that index, and of the value; None where it is not."""
        if self.items and key.isdecimal() and int(key) < len(self.items):
            item = self.items[int(key)]
            return replace(item, end=item.start, text=key), item
        return next((entry for entry in self.entries if entry[0].text == key), None)

    def below(self) -> Iterator[Place]:
        """Itself and all that it holds."""
        yield self
        for inner in (*(place for entry in self.entries for place in entry), *self.items):
            yield from inner.below()


def find_places(text: str) -> Place:
    """The root of a text that is known to be one YAML document with a value in it."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    first = next(event for event in events if isinstance(event, yaml.NodeEvent))
    return _place(first, events, in_flow=False)


def _place(event: yaml.Event, events: Iterator[yaml.Event], in_flow: bool) -> Place:
    """The value that an event begins."""
    start, end = event.start_mark, event.end_mark
    assert start is not None
    assert end is not None
    place = Place(start.index, end.index, start.line, start.column, in_flow)
    match event:
        case yaml.AliasEvent():
            return replace(place, alias=event.anchor or "")
        case yaml.ScalarEvent():
            return replace(place, text=event.value, anchor=event.anchor or "")
    assert isinstance(event, yaml.CollectionStartEvent)
    flow = in_flow or bool(event.flow_style)
    children: list[Place] = []
    while not isinstance(inner := next(events), yaml.CollectionEndEvent):
        children.append(_place(inner, events, flow))
    # What ends a block is the start of whatever follows it: only its last child knows where the text of it ends.
    last = inner.end_mark.index if event.flow_style and inner.end_mark else children[-1].end
    place = replace(place, end=last, flow=flow, anchor=event.anchor or "")
    if isinstance(event, yaml.SequenceStartEvent):
        return replace(place, items=tuple(children))
    column = place.column if flow else end.column  # the properties may begin before it, on another line
    return replace(place, column=column, entries=tuple(zip(children[::2], children[1::2], strict=True)))
