"""The command `replay`: the products of a black box, computed again under every recipe."""

import argparse
import dataclasses
import json
import math
import pathlib
from typing import Any

from ..recipes.catalog import by_name
from ..statistics import BlackBox, Replay, replay
from .help_text import Paragraphs
from .load import UsageError
from .screen import screen


_EPILOG = """\
examples:
  %(prog)s step-1200.safetensors
  %(prog)s step-1200.safetensors --recipe rowwise --recipe mxfp8 --json

exit status: 0 success, 2 the command or the file is wrong.
"""


def add_replay_parser(commands: Any) -> None:
    """Adds the command to the parser.

    Args:
        commands: What `add_subparsers` gave.
    """
    text = "compute the products of a black box again, under its recipe and others; name the operand to blame"
    parser = commands.add_parser(
        "replay",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. It needs no accelerator.",
        epilog=_EPILOG,
        formatter_class=Paragraphs,
    )
    parser.add_argument("file", type=pathlib.Path, metavar="FILE", help="what black_box(...).save(FILE) wrote")
    parser.add_argument(
        "--recipe", action="append", metavar="NAME", help="a recipe to try; may be repeated (default: all with a name)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_replay(options: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        options: The parsed flags.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: If the file is not a black box, or a recipe is unknown.
    """
    try:
        for name in options.recipe or ():
            by_name(name)
        box = BlackBox.load(options.file)
    except ValueError as error:
        raise UsageError(str(error)) from None
    found = replay(box, options.recipe)
    if options.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        screen().print(box)
        screen().print()
        screen().print(found)
    return 0


def _as_json(found: Replay) -> dict[str, Any]:
    # JSON has no infinities.
    number = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
    products = [{name: number(x) for name, x in dataclasses.asdict(p).items()} for p in found.products]
    box = {name: getattr(found.box, name) for name in ("layer", "index", "operand", "product", "reason", "step")}
    return {"box": box, "culprit": dataclasses.asdict(found.culprit), "best": found.best, "products": products}
