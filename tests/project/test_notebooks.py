"""The notebooks are made from their pages."""

import pathlib
import runpy


ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "_notebooks" / "notebooks.py"))


def test_notebooks_are_their_pages():
    made = {
        NOTEBOOKS["notebook_path"](page): NOTEBOOKS["as_text"](NOTEBOOKS["notebook_of"](page))
        for page in NOTEBOOKS["PAGES"]
    }
    kept = {path: path.read_text() for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    assert kept == made, "run docs/_notebooks/notebooks.py"
