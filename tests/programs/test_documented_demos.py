"""The tables of `docs/preflight.md` are what its commands print today."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from haliax_fp8.preflight import compilable_devices


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "preflight.md"
# Each command with a demo, and what the page shows of its report.
SHOWN = re.compile(
    r"^uv run python -m haliax_fp8 (preflight --demo [^\n]*--compare)\n```\n(.*?)(?=^```|^`--demo`)", re.M | re.S
)
COMMANDS = dict(SHOWN.findall(PAGE.read_text()))


def facts(page: str) -> list[str]:
    """The rows of its table, and its findings."""
    rows = re.findall(r"^\|.*\d.*\|$|^- .*", page, re.MULTILINE)
    return [row for row in rows if "| FP8 | bf16 |" not in row]


def test_the_page_has_two_demos():
    assert [len(facts(page)) for page in COMMANDS.values()] == [5, 4]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_is_what_its_command_prints(command, tmp_path):
    if (missing := compilable_devices["h100"].missing()) is not None:
        pytest.skip(missing)
    report = tmp_path / "report.md"
    # In a process of its own: the tests' settings are stricter than a user's.
    arguments = [*shlex.split(command), "--markdown", str(report)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-m", "haliax_fp8", *arguments], env=environment, check=True, capture_output=True)
    text = report.read_text()
    assert [fact for fact in facts(COMMANDS[command]) if fact not in text] == []
    times = re.search(r"(\d+\.\d+) times as\s+fast\D*(\d+\.\d+) to (\d+\.\d+)", COMMANDS[command])
    assert times is not None
    assert f"{times[1]}× as fast as the baseline (estimate, {times[2]} to {times[3]})" in " ".join(text.split())
