"""Draws the loss curves of the tutorial by running its code, in the Haliax tab, up to the block that draws."""

import ast
import contextlib
import io
import pathlib
import re
import runpy
from typing import Any

from matplotlib.figure import Figure


DOCS = pathlib.Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def loss_curves() -> Figure:
    """The figure that the last line of the first block with `plots.loss_curves` makes."""
    namespace: dict[str, Any] = {"__name__": "page"}
    notebooks = runpy.run_path(str(DOCS / "_notebooks" / "notebooks.py"))
    page = notebooks["in_tab"]((DOCS / "tutorial.md").read_text(), "Haliax")
    for code in _BLOCK.findall(page):
        if "plots.loss_curves" in code:
            *body, last = ast.parse(code).body
            assert isinstance(last, ast.Expr), "the block does not end with the figure"
            exec(compile(ast.Module(body, []), "tutorial", "exec"), namespace)
            return eval(compile(ast.Expression(last.value), "tutorial", "eval"), namespace)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "tutorial", "exec"), namespace)
    raise ValueError("tutorial.md has no block with plots.loss_curves")


FIGURES = {"tutorial-losses": loss_curves}
