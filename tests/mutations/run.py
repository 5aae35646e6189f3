"""Do the tests fail when the code is wrong? Makes each wrong change of `changes.py` in a copy, and runs its tests.

    uv run python tests/mutations/run.py                 # all of them: about half a minute each
    uv run python tests/mutations/run.py ragged mxfp8    # those with one of these words in their description or file
    uv run python tests/mutations/run.py --check         # only whether every change still fits the code

The tests first have to pass as the code is. Exit code: 0 if every change was noticed, 1 if one survived, did not fit or
gave no answer in time.
"""

import argparse
import dataclasses
import enum
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from changes import CHANGES, Change
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "haliax_fp8"
# What the tests read; a copy needs nothing else.
COPIED = (PACKAGE, "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md")
PASSED, FAILED = 0, 1  # pytest's exit codes


class Outcome(enum.Enum):
    """What became of a change."""

    NOTICED = "noticed"
    SURVIVED = "SURVIVED"
    STALE = "does not fit"
    LATE = "no answer in time"
    BROKEN = "tests did not run"


@dataclasses.dataclass(frozen=True)
class Result:
    """A change, what became of it, and the test that failed or what went wrong."""

    change: Change
    outcome: Outcome
    detail: str
    seconds: float = 0.0


class Stale(Exception):
    """A snippet that is not in the code, or there more than once."""


def position_of(change: Change, root: Path) -> tuple[Path, int, int]:
    """The file, and where the snippet begins and ends in it.

    Spaces and line ends count as one another, so that formatting does not matter; and code that was moved into another
    file is found there.

    Args:
        change: The change.
        root: The folder that holds the package.

    Raises:
        Stale: If the snippet is nowhere, or there several times.
    """
    pattern = re.compile(r"\s+".join(map(re.escape, change.old.split())))
    files = sorted((root / PACKAGE).rglob("*.py"))
    where = [path for path in files if path.as_posix().endswith(f"/{change.file}")]
    for candidates in (where, files):
        found = [(path, *match.span()) for path in candidates for match in pattern.finditer(path.read_text())]
        if len(found) == 1:
            return found[0]
        if found:
            lines = ", ".join(
                f"{path.relative_to(root)}:{path.read_text()[:start].count(chr(10)) + 1}" for path, start, _ in found
            )
            raise Stale(f"{change.old!r} is there {len(found)} times, in {lines}: make the snippet longer")
    raise Stale(
        f"{change.old!r} is not in {change.file}, nor anywhere else in {PACKAGE}: write the same mistake for the code "
        "as it is now, or remove it from changes.py if it cannot be made any more"
    )


def changed(change: Change, root: Path) -> tuple[Path, str]:
    """The file, and its text with the change.

    Args:
        change: The change.
        root: The folder that holds the package.

    Raises:
        Stale: As `position_of`.
    """
    path, start, end = position_of(change, root)
    text = path.read_text()
    return path, text[:start] + change.new + text[end:]


def file_of_test(test: str, root: Path) -> Path:
    """A test as on the command line, in whichever folder of tests its file is."""
    file, *names = test.split("::")
    (path,) = (root / "tests").rglob(file)
    return Path("::".join([str(path.relative_to(root)), *names]))


def run_tests(root: Path, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Pytest's exit code, None if it did not end in time; and what it printed.

    Args:
        root: A copy of the repository.
        tests: Files or tests, by the file's name.
        limit: Seconds.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-rf",
        "-m",
        "not slow",
    ]
    # No bytecode: a change within the second, and of the same length, would not be seen.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root), "COLUMNS": "200"}
    try:
        done = subprocess.run(
            [*command, *(str(file_of_test(test, root)) for test in tests)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return None, f"more than {limit:g} s"
    return done.returncode, done.stdout + done.stderr


def judged(change: Change, code: int | None, output: str) -> tuple[Outcome, str]:
    """What a run of the tests says of a change."""
    if code is None:
        return Outcome.LATE, output
    if code == PASSED:
        return Outcome.SURVIVED, ", ".join(change.tests)
    if code == FAILED:
        failed = re.search(r"^FAILED tests/(\S+)", output, re.MULTILINE)
        return Outcome.NOTICED, failed.group(1) if failed else "a failure without a name"
    return Outcome.BROKEN, output.strip().splitlines()[-1]


def attempt(change: Change, root: Path, limit: float) -> Result:
    """Makes a change in a copy, runs its tests, and takes it back.

    Args:
        change: The change.
        root: The copy.
        limit: Seconds.
    """
    start = time.monotonic()
    try:
        path, text = changed(change, root)
    except Stale as error:
        return Result(change, Outcome.STALE, str(error))
    before = path.read_text()
    path.write_text(text)
    try:
        outcome, detail = judged(change, *run_tests(root, change.tests, limit))
    finally:
        path.write_text(before)
    return Result(change, outcome, detail, time.monotonic() - start)


def chosen(words: Sequence[str]) -> list[Change]:
    """The changes with one of the words in their description or file; all without words."""
    return [c for c in CHANGES if not words or any(word.lower() in f"{c.what} {c.file}".lower() for word in words)]


def table_of(results: Sequence[Result]) -> Table:
    """A row for each change, in the order of the list."""
    table = Table("change", "file", "outcome", "by", "s")
    for result in results:
        style = "" if result.outcome is Outcome.NOTICED else "bold red"
        cells = result.change.what, result.change.file, result.outcome.value, result.detail, f"{result.seconds:.0f}"
        table.add_row(*cells, style=style)
    return table


def checked(changes: Sequence[Change]) -> list[Result]:
    """The changes that do not fit the code."""
    stale = []
    for change in changes:
        try:
            position_of(change, ROOT)
        except Stale as error:
            stale.append(Result(change, Outcome.STALE, str(error)))
    return stale


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only changes with one of these words in their description or file")
    parser.add_argument("--check", action="store_true", help="do not run tests: only see whether every change fits")
    parser.add_argument("--trusted", action="store_true", help="do not run the tests on the code as it is first")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one change")
    options = parser.parse_args(arguments)
    console, changes = Console(width=None if sys.stdout.isatty() else 160), chosen(options.words)
    if not changes:
        parser.error(f"no change has one of {options.words} in its description or file")
    if options.check:
        stale = checked(changes)
        console.print(table_of(stale) if stale else f"all {len(changes)} changes fit the code")
        return bool(stale)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    results = []
    with tempfile.TemporaryDirectory() as folder, progress:
        root = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            options_of_copy = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
            copy(ROOT / name, root / name, **options_of_copy)
        task = progress.add_task("the code as it is", total=len(changes))
        tests = sorted(set(itertools.chain.from_iterable(change.tests for change in changes)))
        code, output = (PASSED, "") if options.trusted else run_tests(root, tests, len(changes) * options.limit)
        if code != PASSED:
            console.print(output, markup=False)
            console.print("the tests do not pass as the code is: nothing can be said of changes", style="bold red")
            return 1
        for change in changes:
            progress.update(task, description=change.what)
            result = attempt(change, root, options.limit)
            results.append(result)
            progress.console.print(f"{result.outcome.value}: {change.what} ({result.seconds:.0f} s)", markup=False)
            progress.advance(task)
    console.print(table_of(results))
    noticed = sum(result.outcome is Outcome.NOTICED for result in results)
    console.print(f"{noticed} of {len(results)} wrong changes were noticed")
    return int(noticed < len(results))


if __name__ == "__main__":
    sys.exit(main())
