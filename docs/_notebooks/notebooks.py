"""Makes `examples/notebooks/` from pages of the documentation, so that neither can differ from the other.

    python docs/_notebooks/notebooks.py           # writes every notebook again
    python docs/_notebooks/notebooks.py --run     # first runs the pages, and writes what they print today into them

Each `python` block is a cell. A `text` block or a picture right after one is its output; everything else is Markdown,
with links that lead from the notebook to the page's neighbours.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import textwrap
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
PAGES = (
    "tutorial.md",
    "tutorial-equinox.md",
    "primer/numbers.md",
    "primer/history.md",
    "primer/training.md",
)
"""The pages that are notebooks, below `docs/`."""

COLUMNS = 95
"""How wide code and what it prints may be, to fit the column of a page in a window of 1280 px, see `site.css`."""

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n|\n!\[(?P<picture>[^\]]*)\]\((?P<path>[^)]+\.svg)\)\n)?",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def notebook_path(page: str) -> pathlib.Path:
    """Where the notebook of a page lies."""
    return (
        ROOT
        / "examples"
        / "notebooks"
        / (page.removesuffix(".md").replace("/", "-") + ".ipynb")
    )


def notebook_of(page: str) -> dict[str, Any]:
    """A page as a notebook, with the outputs that the page shows."""
    text = (ROOT / "docs" / page).read_text()
    folder = f"../../docs/{pathlib.PurePosixPath(page).parent.as_posix()}/".replace("/./", "/")
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **parts: Any) -> None:
        name = f"{notebook_path(page).stem}-{len(cells)}"
        cells.append(
            {
                "cell_type": kind,
                "id": name,
                "metadata": {},
                "source": _lines(source.strip("\n")),
                **parts,
            }
        )

    def add_markdown(source: str) -> None:
        if source.strip():
            add("markdown", _LINK.sub(lambda match: f"]({folder}{match[1]})", source))

    name = pathlib.PurePosixPath(page).name
    add_markdown(
        f"*Made from the page [docs/{page}]({name}), with its outputs. Run the cells from top to bottom.*"
    )
    end = 0
    for block in _BLOCK.finditer(text):
        add_markdown(text[end : block.start()])
        add(
            "code",
            block["code"],
            execution_count=None,
            outputs=_outputs(block, (ROOT / "docs" / page).parent),
        )
        end = block.end()
    add_markdown(text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def as_text(notebook: dict[str, Any]) -> str:
    """A notebook as its file holds it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def with_todays_output(text: str) -> str:
    """The text of a page, with what its blocks print now where it shows what they print."""
    namespace: dict[str, Any] = {"__name__": "page"}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block["code"], namespace)
        if block["output"] is None:
            return block[0]
        lines = [
            part
            for line in printed.getvalue().rstrip().splitlines()
            for part in _that_fit(line.rstrip())
        ]
        return f"```python\n{block['code']}```\n\n```text\n" + "\n".join(lines) + "\n```\n"

    return _BLOCK.sub(run, text)


def _outputs(block: re.Match[str], folder: pathlib.Path) -> list[dict[str, Any]]:
    """What the page shows right after a block: text that it printed, or a picture."""
    if block["output"] is not None:
        return [{"name": "stdout", "output_type": "stream", "text": _lines(block["output"])}]
    if block["path"] is None:
        return []
    # On white, since its lines are dark and a notebook does not know the rules of the site.
    drawn = (
        (folder / block["path"])
        .read_text()
        .replace("<svg ", '<svg style="background: white" ', 1)
    )
    data = {
        "image/svg+xml": _lines(drawn),
        "text/plain": _lines(" ".join(block["picture"].split())),
    }
    return [{"data": data, "metadata": {}, "output_type": "display_data"}]


def _that_fit(line: str) -> list[str]:
    """A line that was printed, as the lines of the page: a terminal wraps it too, but a page does not."""
    return (
        textwrap.wrap(line, COLUMNS, break_long_words=False) if len(line) > COLUMNS else [line]
    )


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Writes every notebook."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--run",
        nargs="*",
        metavar="PAGE",
        help="run these pages before, or all of them if none is named",
    )
    run = parser.parse_args().run
    os.environ["COLUMNS"] = "80"
    for page in PAGES:
        path = ROOT / "docs" / page
        if run is not None and (not run or page in run):
            path.write_text(with_todays_output(path.read_text()))
        notebook_path(page).write_text(as_text(notebook_of(page)))


if __name__ == "__main__":
    main()
