"""The commands `checkpoint check`, `convert` and `merge`: folders of quantized weights, without an accelerator."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any, get_args

from ..folders import (
    BrokenCheckpoint,
    CheckReport,
    Conversion,
    NotSupported,
    check_folder,
    convert_folder,
)
from ..folders.convert import ScalePrecision
from ..folders.layout import written
from ..layouts import PLAIN
from .help_text import Paragraphs
from .load import UsageError
from .screen import fitted, on_error, screen


_EPILOG = """\
examples:
  %(prog)s check DIR
  %(prog)s check DIR --headers
  %(prog)s convert DIR --to FP8_DYNAMIC --output NEW
  %(prog)s merge DIR ADAPTER --to FP8_DYNAMIC --output NEW

exit status: 0 sound, 1 broken, 2 the command is wrong, 3 the layout is not
supported here: what does not depend on it was checked.
"""


_STATUS = {"sound": 0, "values not read": 0, "broken": 1, "not supported here": 3}


def add_parsers(commands: Any) -> None:
    """Adds the commands to the parser.

    Args:
        commands: What `add_subparsers` gave.
    """
    text = "check or convert a folder of quantized weights, such as those that vLLM and Transformers load, or "
    text += "merge an adapter into it"
    group = commands.add_parser(
        "checkpoint",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EPILOG,
        formatter_class=Paragraphs,
    )
    actions = group.add_subparsers(dest="action", required=True, metavar="check | convert | merge")
    check = actions.add_parser("check", help="say what is wrong, by file and tensor")
    check.add_argument(
        "--headers", action="store_true", help="read no values: say what it holds, in which formats and bytes"
    )
    convert = actions.add_parser("convert", help="write it in another layout")
    merge = actions.add_parser("merge", help="write it with an adapter, ours or PEFT's, merged into its weights")
    layouts = [*written, PLAIN]
    for action in (convert, merge):
        action.add_argument(
            "--to", required=True, choices=layouts, metavar="LAYOUT", help=f"one of {', '.join(layouts)}"
        )
        action.add_argument("--output", required=True, type=pathlib.Path, metavar="NEW", help="a new or empty folder")
    precisions = get_args(ScalePrecision)
    convert.add_argument(
        "--scales",
        choices=precisions,
        metavar="NAME",
        default="bfloat16",
        help=f"how precise new scales are: {', '.join(precisions)} (default: bfloat16)",
    )
    kinds = ("bfloat16", "float16", "float32")
    convert.add_argument(
        "--dtype",
        choices=kinds,
        metavar="DTYPE",
        default="bfloat16",
        help=f"of plain weights: {', '.join(kinds)} (default: bfloat16)",
    )
    group.set_defaults(run=run_checkpoint)
    for action in (check, convert):
        action.add_argument("--json", action="store_true", help="print JSON")
    for action in (check, convert, merge):
        action.add_argument("directory", type=pathlib.Path, metavar="DIR", help="config.json and safetensors")
        action.add_argument(
            "--follow-links", action="store_true", help="allow files that are links to elsewhere, as in a hub's cache"
        )
    merge.add_argument("adapter", type=pathlib.Path, metavar="ADAPTER", help="adapter_config.json and safetensors")


def run_checkpoint(options: argparse.Namespace) -> int:
    """Runs one of the three.

    Args:
        options: The parsed flags.

    Returns:
        The exit status: 0, 1 if the checkpoint is broken, or 3 if its layout is not supported.

    Raises:
        UsageError: If the folder does not exist, or a conversion cannot be as asked.
    """
    if not options.directory.is_dir():
        raise UsageError(f"DIR={str(options.directory)!r} is not a folder; give the one that holds config.json")
    try:
        if options.action == "check":
            report = check_folder(options.directory, follow_links=options.follow_links, values=not options.headers)
            _show(report, options.json)
            return _STATUS[report.verdict]
        if options.action == "merge":
            return _merge(options)
        done = convert_folder(
            options.directory,
            options.output,
            options.to,
            scales=options.scales,
            dtype=options.dtype,
            follow_links=options.follow_links,
        )
        _show(done, options.json)
        return 0
    except NotSupported as other:
        on_error().print(fitted(f"not supported here: {other.layout}; {other.remedy}"), style="yellow")
        return _STATUS["not supported here"]
    except BrokenCheckpoint as broken:
        on_error().print(fitted(f"broken: {broken}"), style="red")
        return 1
    except (ValueError, OSError) as error:
        # The flag is what the argument is called here.
        raise UsageError(str(error).replace("destination=", "--output=", 1)) from None


def _merge(options: argparse.Namespace) -> int:
    # The others start without JAX.
    from ..huggingface import export_model, import_adapter, load
    from ..models import merge_lora

    base = load(options.directory, follow_links=options.follow_links)
    merged = merge_lora(import_adapter(options.adapter, base))
    links = {"like": options.directory, "follow_links": options.follow_links}
    screen().print(export_model(merged, options.output, options.to, **links))
    return 0


def _show(result: CheckReport | Conversion, in_json: bool) -> None:
    if in_json:
        print(json.dumps(_as_json(result), indent=2))
    else:
        screen().print(result)


def _as_json(result: CheckReport | Conversion) -> dict[str, Any]:
    if isinstance(result, CheckReport):
        faults = [
            {"file": f.file, "tensor": f.tensor, "problem": f.problem, "remedy": f.remedy, "error": f.is_error}
            for f in result.faults
        ]
        fields = {"layout": result.layout, "verdict": result.verdict, "sound": result.is_sound}
        fields |= {"converter": result.converter, "quantized": result.quantized, "faults": faults}
        return fields | {"tensors": {kind: dataclasses.asdict(one) for kind, one in result.contents.items()}}
    fields = {"before": result.before, "after": result.after, "exact": result.is_exact, "error": result.error}
    weights = {weight.name: {"exact": weight.is_exact, "error": weight.error} for weight in result.weights}
    return fields | {"copied": result.copied, "skipped": result.skipped, "weights": weights}
