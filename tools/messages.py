"""Print every message that src/ can show: errors, log lines, warnings, printed lines and help texts, by file.

    python tools/messages.py [PATH ...] [--docstrings]          # paths below src/vesuvius; default: all
    python tools/messages.py --sample 60 --seed 0               # as many at random, for a reader with fresh eyes

A message is a string with a space that is an argument of a call: of an exception, a logger, `print`, `add_argument` and
all others.  `{}` stands for a value.  --docstrings prints the docstrings instead.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "vesuvius"


def text_of(node: ast.expr) -> str | None:
    """Text of a string expression, with `{}` for each value, or None if it is not one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = text_of(node.left), text_of(node.right)
        return None if sides == (None, None) else "".join("{}" if side is None else side for side in sides)
    return None


def messages_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string with a space, docstrings left out; parts of a longer string come with it."""
    covered: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            covered.add(id(node.value))
        if id(node) in covered or not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        text = text_of(node)
        if text is not None:
            covered.update(id(part) for part in ast.walk(node))
            if " " in text.strip():
                yield node.lineno, " ".join(text.split())


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstring of the module and of each class and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), f"{getattr(node, 'name', '')}: {text}"


def main() -> None:
    """Print the messages or docstrings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: src/vesuvius")
    parser.add_argument("--docstrings", action="store_true", help="docstrings instead of messages")
    parser.add_argument("--sample", type=int, help="print only this many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = []
    for root in arguments.paths or [SOURCE]:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            tree = ast.parse(path.read_text())
            listed = docstrings_of(tree) if arguments.docstrings else messages_of(tree)
            found += [(path, line, text) for line, text in sorted(listed)]
    if arguments.sample is not None:
        found = random.Random(arguments.seed).sample(found, min(arguments.sample, len(found)))
    for path, line, text in found:
        print(f"{path.resolve().relative_to(SOURCE.parents[1])}:{line}: {text}")


if __name__ == "__main__":
    main()
