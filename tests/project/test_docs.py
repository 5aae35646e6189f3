"""Every Python block of the pages runs, and prints what the page says that it prints.

A `text` block right after a `python` block is its output. Code in a comment `<!-- setup ... -->` runs and is not shown.
A page with content tabs (`=== "Haliax"`) runs once for each tab, as a reader sees it who has that tab open.
"""

import contextlib
import dataclasses
import doctest
import io
import json
import math
import pathlib
import re
import runpy
from collections.abc import Callable

import jax
import pytest


ROOT = pathlib.Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "_figures"
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "_notebooks" / "notebooks.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "haliax_fp8").rglob("README.md")),
]
NAMES = {page: page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES}

# A fenced block, or code that a page needs and does not show.
_BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$|^<!-- setup\n(?P<setup>.*?)^-->$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code, the line that it starts at, and what it prints, where the page says so."""

    code: str
    line: int
    output: str | None


def blocks_of(text: str) -> list[Block]:
    """The Python blocks of a page in order. A `text` block right after one is its output."""
    blocks: list[Block] = []
    end_of_python = None
    for match in _BLOCK.finditer(text):
        if match["kind"] == "text" and end_of_python is not None and not text[end_of_python : match.start()].strip():
            blocks[-1] = dataclasses.replace(blocks[-1], output=match["code"])
        is_python = match["kind"] == "python" or match["setup"] is not None
        end_of_python = match.end() if is_python else None
        if is_python:
            line = text.count("\n", 0, match.start()) + 1
            blocks.append(Block(match["setup"] or match["code"], line, None))
    return blocks


def run_page(text: str, name: str, is_same_output: Callable[[str, str], bool]) -> list[str]:
    """Runs the blocks of a page in one namespace, under the settings that a user starts with.

    Returns:
        What blocks print that is not what the page says; as a description, for each of them.
    """
    namespace, differences = {"__name__": "page"}, []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks_of(text):
            printed = io.StringIO()
            # Empty lines in front: a traceback names the line of the page.
            code = compile("\n" * block.line + block.code, name, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
            got = printed.getvalue()
            if block.output is not None and not is_same_output(got, block.output):
                differences.append(f"{name}:{block.line} says that it prints\n{block.output}\nbut it prints\n{got}")
    return differences


def too_wide(text: str) -> list[str]:
    """Lines of code and of output that are wider than the column of a page."""
    visible = re.sub(r"^<!-- setup\n.*?^-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [match["code"] for match in _BLOCK.finditer(visible) if match["code"]]
    lines = [line for block in blocks for line in block.splitlines()]
    indented = [line.removeprefix("    ") for line in visible.splitlines() if line.startswith("    ")]
    return [line for line in lines + indented if len(line) > NOTEBOOKS["COLUMNS"]]


def is_same_output(got: str, expected: str) -> bool:
    """As doctest compares: white space is free, and `...` stands for anything."""
    return doctest.OutputChecker().check_output(expected, got, doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)


def is_close_output(got: str, expected: str) -> bool:
    """The same words, and numbers within 10 % or 0.02: after some steps of training, each processor has its own."""
    number = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
    words = [" ".join(re.sub("─+", "─", number.sub("#", text)).split()) for text in (got, expected)]
    if words[0] != words[1]:
        return False
    pairs = zip(number.findall(got), number.findall(expected), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.02) for a, b in pairs)


# Their code takes from 5 to 120 s.
LONG = {
    *("docs/tutorial", "docs/training-step", "docs/troubleshooting", "docs/recipes", "docs/looking-inside"),
    *("docs/experts-and-attention", "docs/many-devices", "docs/performance", "docs/preflight", "docs/checkpoints"),
    *("docs/serving", "docs/how-it-works", "docs/migration/haliax", "docs/migration/flax"),
    *("docs/primer/numbers", "docs/primer/history", "docs/primer/training"),
}
# They train, and print losses.
NOTEBOOK_PAGES = {ROOT / "docs" / page.partition("#")[0] for page in NOTEBOOKS["PAGES"]}
CODE = [
    pytest.param(
        *(page, tab),
        id=f"{NAMES[page]}-{tab}".rstrip("-"),
        marks=[pytest.mark.more] if NAMES[page] in LONG else [],
    )
    for page in PAGES
    for tab in NOTEBOOKS["tabs_of"](page.read_text()) or [""]
    if blocks_of(NOTEBOOKS["in_tab"](page.read_text(), tab))
]


def test_long_pages_exist():
    assert set(NAMES.values()) > LONG


@pytest.mark.parametrize(("page", "tab"), CODE)
def test_code_of_page_runs(page, tab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    text = NOTEBOOKS["in_tab"](page.read_text(), tab)
    same = is_close_output if page in NOTEBOOK_PAGES else is_same_output
    assert run_page(text, str(page.relative_to(ROOT)), same) == []


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / "docs" in page.parents], ids=NAMES.get)
def test_code_and_output_fit_the_column(page):
    assert too_wide(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_links_to_files_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_tests_that_a_page_names_exist(page):
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page.read_text()) if f"def {name}(" not in tests]
    assert not missing


def test_files_that_contributors_are_sent_to_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:haliax_fp8|benchmarks|examples|tests|docs)/[\w./]+|(?:\w+/)+\w+\.py)`", text)
    assert len(named) > 5
    tops = ROOT, ROOT / "haliax_fp8"
    assert [name for name in named if not any((top / name).exists() for top in tops)] == []


def test_readme_shows_how_to_run_and_test():
    shell = [m["code"] for m in _BLOCK.finditer((ROOT / "README.md").read_text()) if m["kind"] == "bash"]
    lines = [line for block in shell for line in block.splitlines()]
    assert "pip install uv && uv run examples/quickstart.py" in lines
    assert "uv run python -m examples.train_lm" in lines
    assert "pip install uv && uv run pytest" in lines


def test_tables_of_files_name_files():
    package = ROOT / "haliax_fp8"
    for page in package.rglob("README.md"):
        cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("|")]
        files = re.findall(r"`([\w/.-]+\.py)`", " ".join(cells))
        assert [name for name in files if not (page.parent / name).exists()] == [], page


def test_figures_are_those_of_their_script(monkeypatch):
    """By name."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(FIGURES)  # as when it is run as a script
    scripts = runpy.run_path(str(FIGURES / "figures.py"))
    drawn = {f"{name}.svg" for name in (*scripts["FIGURES"], *scripts["kept_report"].PICTURES)}
    assert drawn == {path.name for path in (ROOT / "docs" / "images").iterdir()}
    shown = {pathlib.Path(target).name for page in PAGES for target in re.findall(r"\((\S+\.svg)\)", page.read_text())}
    assert shown == drawn


def test_the_picture_of_a_report_is_of_the_step_on_its_page():
    """The page shows the code that was compiled; `test_kept_report.py` compares that with what is drawn."""
    page, step = (ROOT / "docs" / "preflight.md").read_text(), (FIGURES / "my_training.py").read_text()
    assert step.partition('"""\n\n')[2] in page


# --- The machinery itself ---------------------------------------------------------------------------------------------


def test_blocks_share_a_namespace_and_setup_runs():
    page = "<!-- setup\na = 2\n-->\ntext\n```python\nb = a + 1\n```\n```python\nprint(b)\n```\n\n```text\n3\n```\n"
    assert run_page(page, "page", is_same_output) == []


def test_what_is_too_wide_is_found():
    narrow, wide = "x" * NOTEBOOKS["COLUMNS"], "x" * (NOTEBOOKS["COLUMNS"] + 1)
    assert too_wide(f"{wide}\n\n```text\n{narrow}\n```\n\n    {narrow}\n\n<!-- setup\n    {wide}\n-->\n") == []
    assert too_wide(f"```python\n{wide}\n```\n") == too_wide(f"    {wide}\n") == [wide]


def test_a_failing_block_fails_and_names_the_line():
    page = "one\n\n```python\nx = 1\nx.missing\n```\n"
    with pytest.raises(AttributeError) as error:
        run_page(page, "page.md", is_same_output)
    assert error.traceback[-1].lineno + 1 == 5


def test_output_is_compared():
    page = "```python\nprint(1.25, 'b')\n```\n\n```text\n{}\n```\n"
    for same in ("1.25   b", "1... b"):
        assert run_page(page.format(same), "page", is_same_output) == []
    (difference,) = run_page(page.format("1.26 b"), "page", is_same_output)
    assert "1.26" in difference and "1.25" in difference


def test_a_text_block_elsewhere_is_no_output():
    assert run_page("```python\nprint(1)\n```\nFor example:\n\n```text\n2\n```\n", "page", is_same_output) == []


def test_a_page_with_tabs_runs_once_for_each():
    page = "\n".join(
        (
            *('=== "A"', "", "    ```python", "    a = 1", "    ```", "", '=== "B"', "", "    ```python"),
            *("    a = 2", "    ```", "", "Both:", "", "```python", "print(a)", "```", "", '=== "A"', ""),
            *("    ```text", "    1", "    ```", "", '=== "B"', "", "    ```text", "    2", "    ```", ""),
        )
    )
    assert NOTEBOOKS["tabs_of"](page) == ["A", "B"]
    shown = [NOTEBOOKS["in_tab"](page, tab) for tab in "AB"]
    assert [[block.output for block in blocks_of(text)] for text in shown] == [[None, "1\n"], [None, "2\n"]]
    assert all(run_page(text, "page", is_same_output) == [] for text in shown)
    assert all(text.count("\n") == page.count("\n") for text in shown)
    assert NOTEBOOKS["with_todays_output"](page.replace("    2\n", "    3\n")) == page


def test_numbers_may_differ_a_little_and_words_may_not():
    assert is_close_output("loss 1.02, step 100\n ────", "loss 1.00, step 99\n ───────")
    assert not is_close_output("loss 1.2", "loss 1.0")
    assert not is_close_output("lost 1.0", "loss 1.0")
    assert not is_close_output("1.0 2.0", "1.0")


WIDE = "topics, 128 wide"


@pytest.mark.parametrize(
    ("header", "count", "columns"),
    [
        (
            "400 steps, 8 seeds",
            10,
            [("over_steps", case, of) for case in (WIDE, f"{WIDE}, constant rate") for of in ("gap", "interval")],
        ),
        ("200 steps, 8 seeds", 7, [("recipes middle", text, "gap") for text in ("topics", "source")]),
        ("200 steps, NVFP4", 12, [("four_bits", text, "gap") for text in ("topics", "source")]),
        ("200 steps, NVFP4", 12, [None, None, ("four_bits", "all together", "change_interval")]),
        ("200 steps, MXFP4", 4, [("mxfp4", text, "gap") for text in ("topics", "source")]),
        ("200 steps, MXFP4", 4, [None, None, ("mxfp4", "all together", "change_interval")]),
        ("128 wide, 8 seeds", 4, [("four_bits", f"{text}, 128 wide", "gap") for text in ("topics", "source")]),
    ],
)
def test_tables_of_convergence_are_their_runs(header, count, columns):
    """Tables and picture are drawn of one file. An empty cell was not run, or is of the variant compared with."""
    rows = json.loads((ROOT / "benchmarks" / "convergence.json").read_text())["rows"]
    table = (ROOT / "docs" / "convergence.md").read_text().partition(f"| {header}")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(cells) == count
    for name, *found in cells:
        for column, cell in zip(columns, found, strict=False):
            if column is None or not cell:
                continue
            suites, case, of = column
            (value,) = {
                row[of] for row in rows if row["suite"] in suites and (row["case"], row["variant"]) == (case, name)
            }
            assert cell == value, (name, column)
