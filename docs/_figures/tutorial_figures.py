"""Draws the loss curves of the tutorials by running their code up to the block that draws."""

import ast
import contextlib
import functools
import io
import pathlib
import re
from typing import Any

from matplotlib.figure import Figure


DOCS = pathlib.Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def loss_curves(page: str) -> Figure:
    """The figure that the last line of a page's first block with `plots.loss_curves` makes."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for code in _BLOCK.findall((DOCS / page).read_text()):
        if "plots.loss_curves" in code:
            *body, last = ast.parse(code).body
            assert isinstance(last, ast.Expr), f"{page} does not end its block with the figure"
            exec(compile(ast.Module(body, []), page, "exec"), namespace)
            return eval(compile(ast.Expression(last.value), page, "eval"), namespace)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, page, "exec"), namespace)
    raise ValueError(f"{page} has no block with plots.loss_curves")


FIGURES = {
    "tutorial-losses": functools.partial(loss_curves, "tutorial.md"),
    "tutorial-equinox-losses": functools.partial(loss_curves, "tutorial-equinox.md"),
}
