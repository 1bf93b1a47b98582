"""`make test-long`: the long tests in parts, each a folder of tests/ or a file of tests/runs, in a pytest of its own.

    python tools/long_tests.py                           all parts that have not passed for this commit
    python tools/long_tests.py plan runs/test_kills.py   these

A part that passed leaves its JUnit file in build/long/COMMIT-PYTHON, and is not run again; one that failed or was
interrupted is, its failed tests first.  At the end: seconds of each part, skips with their reasons, failures.
"""

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SPLIT = "runs"  # a quarter of the time
PYTEST = (sys.executable, "-m", "pytest", "-m", "long or hypothesis", "--hypothesis-profile=full", "--ff")
PASSED = (0, 5)  # 5: a part without long tests


def parts() -> list[str]:
    """Return the parts in order: paths below tests/."""
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} - {SPLIT}
    return [*sorted(folders), *sorted(f"{SPLIT}/{path.name}" for path in (TESTS / SPLIT).glob("test_*.py"))]


def state() -> str:
    """Return the commit and the version of Python, with a digest of what differs from the commit.  Raises OSError and
    CalledProcessError: there is no git, or no commit."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    changed = git("diff", "--binary", "HEAD")
    for name in git("ls-files", "--others", "--exclude-standard", "-z").split(b"\0")[:-1]:
        path = ROOT / os.fsdecode(name)
        changed += name + (path.read_bytes() if path.is_file() else b"")
    digest = f"-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else ""
    commit, python = git("rev-parse", "--short=12", "HEAD").decode().strip(), sysconfig.get_python_version()
    return f"{commit}-py{python}{digest}"


def run_part(part: str, folder: Path, command: Sequence[str] = PYTEST) -> bool:
    """Run a part, unless it has passed; returns whether it has now.  Raises SystemExit: the state has changed."""
    name = part.replace("/", ".")
    passed, other = folder / f"{name}.xml", folder / f"{name}.failed.xml"
    if passed.exists():
        return True
    report = [f"--junit-xml={other}", "-o", "junit_family=xunit2", "-o", f"cache_dir={folder / 'cache' / name}"]
    with subprocess.Popen([*command, *report, str(TESTS / part)], cwd=ROOT) as pytest:
        try:
            code = pytest.wait()
        except KeyboardInterrupt:  # pytest got it too, and stops what its tests started
            pytest.wait()
            raise
    if state() != folder.name:
        sys.exit(f"error: files changed while {part} ran, so that its result counts for nothing; start again")
    if code in PASSED:
        other.replace(passed)
    return code in PASSED


def summary(folder: Path, chosen: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the summary from the JUnit files."""
    skips, total_s, counts = Counter[str](), 0.0, Counter[str]()
    for part in chosen:
        passed, other = (folder / f"{part.replace('/', '.')}{kind}.xml" for kind in ("", ".failed"))
        file = passed if passed.exists() else other
        suite = ElementTree.parse(file).getroot().find("testsuite") if file.exists() else None
        if suite is None:
            yield f"  not finished  {part}"
            continue
        seconds, total_s = float(suite.get("time", 0)), total_s + float(suite.get("time", 0))
        tests, bad = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        counts.update(tests=tests, bad=bad)
        ended = f"{bad} FAILED" if bad else "passed" if file == passed else "STOPPED"
        yield f"{seconds:8.0f} s  {tests:4} tests  {ended:10}  {part}"
        for case in suite.iter("testcase"):
            for kind in ("failure", "error"):
                if case.find(kind) is not None:
                    yield f"            {kind}: {case.get('classname')}::{case.get('name')}"
            if (skipped := case.find("skipped")) is not None:
                skips[re.sub(r"^Skipped: ", "", skipped.get("message", "no reason"))] += 1
    for reason, number in skips.most_common():
        yield f"skipped {number:4}: {reason}"
    ran = counts["tests"] - skips.total()
    yield f"{ran - counts['bad']} passed, {counts['bad']} failed, {skips.total()} skipped in {total_s / 60:.0f} min"


def main(asked: Sequence[str]) -> int:
    chosen = [part.removeprefix("tests/").rstrip("/") for part in asked] or parts()
    if unknown := [part for part in chosen if not (TESTS / part).exists()]:
        sys.exit(f"error: tests/ has no {', '.join(unknown)}; parts are {' '.join(parts())}")
    try:
        folder = ROOT / "build/long" / state()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}; run the long tests in a git checkout, by whose commit they continue")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        have_passed = [run_part(part, folder) for part in chosen]
        code = 0 if all(have_passed) else 1
    except KeyboardInterrupt:
        code = 130
    print(f"\n{folder.relative_to(ROOT)}:", *summary(folder, chosen), sep="\n", flush=True)
    if code:
        print("`make test-long` runs only what is left or failed, as long as no file changes")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
