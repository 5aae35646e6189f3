"""Makes `examples/notebooks/` from pages of the documentation, so that neither can differ from the other.

    python docs/_notebooks/notebooks.py           # writes every notebook again
    python docs/_notebooks/notebooks.py --run     # first runs the pages, and writes what they print today into them

Each `python` block is a cell. A `text` block or a picture right after one is its output; everything else is Markdown,
with links that lead from the notebook to the page's neighbours. A page with content tabs makes a notebook for each tab.
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
    "tutorial.md#Haliax",
    "tutorial.md#Equinox",
    "primer/numbers.md",
    "primer/history.md",
    "primer/training.md",
)
"""The pages that are notebooks, below `docs/`. After `#`: the tab that the notebook shows."""

COLUMNS = 95
"""How wide code and what it prints may be, to fit the column of a page in a window of 1280 px, see `site.css`."""

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n+```text\n(?P<output>.*?)^```\n|\n+!\[(?P<picture>[^\]]*)\]\((?P<path>[^)]+\.svg)\)\n)?",
    re.DOTALL | re.MULTILINE,
)
_TAB = re.compile(r'^=== "(?P<label>[^"\n]+)"\n(?P<body>(?:\n|    .*\n)*)', re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def tabs_of(text: str) -> list[str]:
    """The labels of a page's content tabs, in order."""
    return list(dict.fromkeys(tab["label"] for tab in _TAB.finditer(text)))


def in_tab(text: str, label: str) -> str:
    """A page as it reads with this tab open everywhere. Every line keeps its number."""

    def body(tab: re.Match[str]) -> str:
        if tab["label"] != label:
            return "\n" * tab[0].count("\n")
        return "\n" + re.sub(r"^    ", "", tab["body"], flags=re.MULTILINE)

    return _TAB.sub(body, text)


def notebook_path(page: str) -> pathlib.Path:
    """Where the notebook of a page lies."""
    name = page.replace(".md", "").replace("/", "-").replace("#", "-").lower()
    return ROOT / "examples" / "notebooks" / f"{name}.ipynb"


def notebook_of(page: str) -> dict[str, Any]:
    """A page as a notebook, with the outputs that the page shows."""
    file, _, label = page.partition("#")
    text = in_tab((ROOT / "docs" / file).read_text(), label)
    folder = f"../../docs/{pathlib.PurePosixPath(file).parent.as_posix()}/".replace("/./", "/")
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
        source = re.sub(r"\n{3,}", "\n\n", source)
        if source.strip():
            add("markdown", _LINK.sub(lambda match: f"]({folder}{match[1]})", source))

    name = pathlib.PurePosixPath(file).name
    add_markdown(
        f"*Made from the page [docs/{file}]({name}), with its outputs. Run the cells from top to bottom.*"
    )
    end = 0
    for block in _BLOCK.finditer(text):
        add_markdown(text[end : block.start()])
        add(
            "code",
            block["code"],
            execution_count=None,
            outputs=_outputs(block, (ROOT / "docs" / file).parent),
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
    for label in tabs_of(text) or [""]:
        lines = text.splitlines(keepends=True)
        shown, namespace = in_tab(text, label), {"__name__": "page"}
        outputs: list[tuple[int, int, list[str]]] = []
        for block in _BLOCK.finditer(shown):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block["code"], namespace)
            if block["output"] is not None:
                start, end = (shown.count("\n", 0, at) for at in block.span("output"))
                indent = lines[end].partition("```")[0]
                today = printed.getvalue().rstrip().splitlines()
                fitting = [part for line in today for part in _that_fit(line.rstrip())]
                outputs.append(
                    (start, end, [f"{indent}{line}".rstrip() + "\n" for line in fitting])
                )
        for start, end, output in reversed(outputs):
            lines[start:end] = output
        text = "".join(lines)
    return text


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
    for file in dict.fromkeys(page.partition("#")[0] for page in PAGES):
        path = ROOT / "docs" / file
        if run is not None and (not run or file in run):
            path.write_text(with_todays_output(path.read_text()))
    for page in PAGES:
        notebook_path(page).write_text(as_text(notebook_of(page)))


if __name__ == "__main__":
    main()
