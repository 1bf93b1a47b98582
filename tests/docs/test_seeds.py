"""What docs/seeds.md shows as output is what the program prints today: headings of tables, bands, doctor lines."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY
from tests.docs.test_troubleshooting import strings_of_the_sources
from vesuvius.experiments.bench.results import BANDS

PAGE = (REPOSITORY / "docs" / "seeds.md").read_text()
ROWS = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
# Tables of the page itself, which compare; those of output have none of these.
OURS = {"in the document", "here", "its mistake, and what was done", "command", ""}
HEADINGS = [row for row, rule in itertools.pairwise(ROWS) if set(rule[0]) == {"-"} and not set(row) & OURS]
CHECKS = set(re.findall(r'Check\(\s*"([^"]+)"', (REPOSITORY / "src/vesuvius/doctor/examination.py").read_text()))
DOCTOR = re.findall(r"^(ok   |warn |fail ) (?!config )(.{12}) (.+)$", PAGE, re.MULTILINE)


@cache
def templates() -> list[re.Pattern[str]]:
    """F-strings of the doctor and what it asks, as patterns: any text in the place of an expression."""
    found = []
    for path in (REPOSITORY / "src" / "vesuvius").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else None for each in node.values]
                if sum(len(str(part).strip()) for part in parts if part) >= 6:
                    found.append(re.compile(".*".join("" if part is None else re.escape(str(part)) for part in parts)))
    return found


def test_there_is_output_to_check() -> None:
    assert len(HEADINGS) >= 5
    assert {name.strip() for _, name, _ in DOCTOR} == CHECKS


@pytest.mark.parametrize("heading", sorted({column for row in HEADINGS for column in row}))
def test_every_column_that_is_shown_exists(heading: str) -> None:
    assert re.search(rf"(^|\0){re.escape(heading)}(\0|$)", strings_of_the_sources(), re.MULTILINE)


@pytest.mark.parametrize("row", [row for row in ROWS if row[0].startswith("training.ranks=")], ids=lambda row: row[0])
def test_a_band_is_one_that_exists(row: list[str]) -> None:
    (heading,) = [each for each in HEADINGS if "band" in each]
    names = [name for _, name in BANDS]
    assert set(row[heading.index("band")].split(" to ")) <= set(names)


@pytest.mark.parametrize(("level", "name", "value"), DOCTOR, ids=lambda each: str(each).strip()[:14])
def test_every_line_of_the_doctor_is_one_that_it_says(level: str, name: str, value: str) -> None:
    found, _, remedy = value.partition("; ")
    assert found in strings_of_the_sources() or any(template.search(found) for template in templates()), found
    for part in remedy.split("; ") if level.strip() != "ok" and remedy else []:
        assert part in strings_of_the_sources() or any(each.search(part) for each in templates()), part
