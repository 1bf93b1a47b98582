"""Foreign messages are quoted as one plain line."""

from __future__ import annotations

from vesuvius.errors import one_line


def test_foreign_messages_become_one_line_without_terminal_codes() -> None:
    said = "\x1b[36mray::MapWorker\x1b[39m\n  died\x1b[1;31m here\x1b[0m"
    assert one_line(said) == "ray::MapWorker died here"
    assert one_line("x" * 300) == "x" * 197 + "..."
