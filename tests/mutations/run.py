"""Do the tests fail when the code is wrong? Makes each wrong change of `changes.py` in a copy, and runs its tests.

    uv run python tests/mutations/run.py                 # all of them, two at a time: about an hour
    uv run python tests/mutations/run.py ragged mxfp8    # those with one of these words in their description or file
    uv run python tests/mutations/run.py --check         # only whether every change still fits the code

The tests first have to pass as the code is. Exit code: 0 if every change was noticed, 1 if one survived, did not fit or
gave no answer in time. Run it before a release. The list need not grow with every mistake.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from changes import CHANGES, Change


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "haliax_fp8"
# What the tests read; a copy needs nothing else.
COPIED = (PACKAGE, "tests", "examples", "pyproject.toml")
LIMIT = 900  # seconds for the tests of one change
PASSED, FAILED = 0, 1  # pytest's exit codes


class Stale(Exception):
    """A snippet that is not in the code, or there more than once."""


def changed(change: Change, root: Path) -> tuple[Path, str]:
    """The file, and its text with the change.

    Spaces and line ends count as one another, so formatting does not matter. Code that was moved into another file is
    found there.

    Raises:
        Stale: If the snippet is nowhere, or there several times.
    """
    pattern = re.compile(r"\s+".join(map(re.escape, change.old.split())))
    files = sorted((root / PACKAGE).rglob("*.py"))
    for candidates in ([path for path in files if path.as_posix().endswith(f"/{change.file}")], files):
        found = [(path, match) for path in candidates for match in pattern.finditer(path.read_text())]
        if len(found) == 1:
            ((path, match),) = found
            text = path.read_text()
            return path, text[: match.start()] + change.new + text[match.end() :]
        if found:
            raise Stale(f"there {len(found)} times, in {', '.join(str(p.relative_to(root)) for p, _ in found)}")
    raise Stale("not in the code: write the same mistake for the code as it is now, or remove the entry")


def run_tests(root: Path, tests: list[str], programs: str, *, processes: int = 0) -> tuple[int | None, str]:
    """Pytest's exit code, None if it did not end in time; and what it printed."""
    paths = []
    for test in tests:
        file, *names = test.split("::")
        (path,) = (root / "tests").rglob(file)
        paths.append("::".join([str(path.relative_to(root)), *names]))
    # No bytecode: a change within the second, and of the same length, would not be seen. What was compiled for one
    # change serves another whose program is the same.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root), "COLUMNS": "200"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": programs}
    options = ["-q", "-x", f"-n{processes}", "-p", "no:cacheprovider", "--no-header", "-rf", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    limit = LIMIT * (len(tests) if processes else 1)
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def outcome(change: Change, root: Path, programs: str) -> str:
    """Makes a change in a copy, runs its tests and takes it back: "noticed by ...", or what went wrong."""
    try:
        path, text = changed(change, root)
    except Stale as error:
        return f"DOES NOT FIT: {error}"
    before = path.read_text()
    path.write_text(text)
    try:
        code, output = run_tests(root, list(change.tests), programs)
    finally:
        path.write_text(before)
    if code is None:
        return f"NO ANSWER in {LIMIT} s"
    if code == PASSED:
        return f"SURVIVED {', '.join(change.tests)}"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
    if code == FAILED and failed:
        return f"noticed by {failed[1]}"
    return f"TESTS DID NOT RUN: {(output.strip().splitlines() or [''])[-1]}"


def copied(folder: Path) -> Path:
    """A new copy of what the tests read."""
    root = Path(tempfile.mkdtemp(dir=folder))
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    return root


def main() -> int:
    """The command; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only changes with one of these words in their description or file")
    parser.add_argument("--check", action="store_true", help="do not run tests: only see whether every change fits")
    parser.add_argument("--trusted", action="store_true", help="do not run the tests on the code as it is first")
    parser.add_argument("--processes", type=int, default=2, help="how many changes are tried at the same time")
    options = parser.parse_args()
    matches = lambda c: any(word.lower() in f"{c.what} {c.file}".lower() for word in options.words)
    changes = [change for change in CHANGES if not options.words or matches(change)]
    if options.check:
        stale = 0
        for change in changes:
            try:
                changed(change, ROOT)
            except Stale as error:
                stale += 1
                print(f"{change.what} ({change.file}): {change.old!r} is {error}")
        print(f"{len(changes) - stale} of {len(changes)} changes fit the code")
        return bool(stale)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        programs = tempfile.mkdtemp(dir=folder)
        roots: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(options.processes):
            roots.put(copied(Path(folder)))
        if not options.trusted:
            tests = sorted({test for change in changes for test in change.tests})
            code, output = run_tests(copied(Path(folder)), tests, programs, processes=options.processes)
            if code != PASSED:
                print(output, "\nThe tests do not pass as the code is, so they say nothing of changes.")
                return 1

        def attempt(change: Change) -> bool:
            start, root = time.monotonic(), roots.get()
            try:
                said = outcome(change, root, programs)
            finally:
                roots.put(root)
            print(f"{change.what} ({change.file}, {time.monotonic() - start:.0f} s): {said}", flush=True)
            return said.startswith("noticed")

        noticed = sum(pool.map(attempt, changes))
    print(f"{noticed} of {len(changes)} wrong changes were noticed")
    return int(noticed < len(changes))


if __name__ == "__main__":
    sys.exit(main())
