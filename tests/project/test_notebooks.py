"""The notebooks are their pages, run from beginning to end in a fresh Jupyter kernel, and print what the pages show."""

import math
import pathlib
import re
import runpy

import pytest


ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "_notebooks" / "notebooks.py"))
PAGES = NOTEBOOKS["PAGES"]

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def is_close_output(got: str, expected: str) -> bool:
    """The same words, and numbers within 10 % or 0.02: after some steps of training, each processor has its own."""
    words = [" ".join(re.sub("─+", "─", _NUMBER.sub("#", text)).split()) for text in (got, expected)]
    pairs = zip(_NUMBER.findall(got), _NUMBER.findall(expected), strict=words[0] == words[1])
    return words[0] == words[1] and all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.02) for a, b in pairs)


@pytest.mark.parametrize("page", PAGES)
def test_notebook_is_its_page(page):
    made = NOTEBOOKS["as_text"](NOTEBOOKS["notebook_of"](page))
    assert NOTEBOOKS["notebook_path"](page).read_text() == made, "run docs/_notebooks/notebooks.py"


def test_no_notebook_is_left_over():
    written = {path.name for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    assert written == {NOTEBOOKS["notebook_path"](page).name for page in PAGES}


# The tutorial always runs with the slow tests; of the others CI draws some.
RUN = [page if page == "tutorial.md" else pytest.param(page, marks=pytest.mark.more) for page in PAGES]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_notebook_runs_and_prints_what_its_page_shows(page, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("XLA_FLAGS")  # as its reader runs it
    shown = nbformat.read(NOTEBOOKS["notebook_path"](page), as_version=4)
    nbformat.validate(shown)
    ran = nbformat.from_dict(shown)
    options = {"timeout": 600, "kernel_name": "python3", "resources": {"metadata": {"path": tmp_path}}}
    nbclient.NotebookClient(ran, **options).execute()
    for before, after in zip(shown.cells, ran.cells, strict=True):
        if before.cell_type == "code":
            expected, got = ("".join(output.get("text", "") for output in cell.outputs) for cell in (before, after))
            assert is_close_output(got, expected), f"{before.source}\nprints\n{got}\nbut the page shows\n{expected}"


# --- The machinery itself ---------------------------------------------------------------------------------------------


def test_numbers_may_differ_a_little_and_words_may_not():
    assert is_close_output("loss 1.02, step 100\n ────", "loss 1.00, step 99\n ───────")
    assert not is_close_output("loss 1.2", "loss 1.0")
    assert not is_close_output("lost 1.0", "loss 1.0")
    assert not is_close_output("1.0 2.0", "1.0")
