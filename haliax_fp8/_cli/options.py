"""The command line's flags."""

import argparse
import functools
import importlib.metadata
import inspect
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..preflight import PreflightReport, compilable_devices
from ..preflight.compilers import compilers
from ..recipes.catalog import named
from .checkpoint import add_checkpoint_parser
from .demo import demos, stackings
from .help_text import Paragraphs, Parser, program_name


# `--compare` without a value: the demo in bf16.
IN_BFLOAT16 = ""

_EPILOG = """\
examples:
  %(prog)s train.py:make_step --device h100 --require fp8_flops=0.9
  %(prog)s train.py:make_step --compare train.py:bf16_step --json -
  %(prog)s --demo llama-8b --layers 4 --device b200 --compare

FILE.py:FUNCTION takes no arguments and returns (step_fn, args), where args is the tuple of the step's arguments:
arrays, or ShapeDtypeStructs from eqx.filter_eval_shape. It may return (step_fn, args, shardings), with a PartitionSpec
or None for each argument. The step is compiled, not run.

exit status: 0 success, 1 a requirement is not met, 2 the command or a package is wrong, 130 interrupted.
"""


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags and checks those that depend on one another.

    Raises:
        SystemExit: With status 2, and a message that names the flag, its value and the remedy.
    """
    parser = Parser(
        prog=program_name(),
        description="Shows which matrix products of a training step run in FP8 on a device that this machine need not "
        "have, and checks and converts checkpoints with FP8 weights.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    # Without a command the help says what there is, which argparse's own error does not.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    preflight = _preflight_parser(commands)
    for name, text in (
        ("devices", "list devices, what they run natively, and which of them this machine can compile for"),
        ("formats", "list the FP8 formats with range, precision and subnormals"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("--json", action="store_true", help="print JSON")
    add_checkpoint_parser(commands)
    text = "install XLA's compiler for devices that this machine lacks, for preflight; JAX keeps its own devices"
    install = commands.add_parser("install-compiler", help=text, description=text[0].upper() + text[1:] + ".")
    known = ", ".join(f"{name} ({compiler.megabytes} MB)" for name, compiler in compilers.items())
    install.add_argument("compiler", choices=compilers, metavar="NAME", help=f"one of {known}")
    options = parser.parse_args(argv)
    if options.version:
        print(f"haliax-fp8 {importlib.metadata.version('haliax-fp8')}")
        parser.exit()
    if options.command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if options.command == "preflight":
        _check(preflight, options)
    return options


def _preflight_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "preflight",
        # argparse's own usage names all options in twenty lines, and errors begin with it.
        usage="%(prog)s [options] [FILE.py:FUNCTION]",
        help="compile a step and list its products",
        description="Compiles a training step for a device that this machine need not have, and lists every matrix "
        "product with its formats, its implementation, and the reason if it is not in FP8.",
        epilog=_EPILOG,
        formatter_class=Paragraphs,
    )
    parser.add_argument("step", nargs="?", metavar="FILE.py:FUNCTION", help="function that makes the step, see below")
    known = f"default h100; one of {', '.join(compilable_devices)}"
    parser.add_argument("--device", default="h100", metavar="NAME", help=known)
    parser.add_argument("--devices", type=_positive, metavar="N", help="how many devices (default: from --mesh, or 1)")
    parser.add_argument("--mesh", type=_mesh, metavar="AXIS=N,...", help="mesh axes and their sizes, such as data=8")
    parser.add_argument(
        "--compare",
        nargs="?",
        const=IN_BFLOAT16,
        metavar="FILE.py:FUNCTION",
        help="a baseline to compare with; with --demo without a value: the same model in bf16",
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        type=_requirement,
        metavar="NAME=VALUE",
        help=f"exit with status 1 if not met; may be repeated; names: {', '.join(requirements())}",
    )
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to the screen without FILE")
    parser.add_argument("--markdown", nargs="?", const="-", metavar="FILE", help="write Markdown, as --json does")
    parser.add_argument(
        "--xla",
        action="append",
        default=[],
        type=_compiler_option,
        metavar="OPTION=VALUE",
        help="an option for XLA's compiler, overrides XLA_FLAGS, such as xla_gpu_enable_triton_gemm=false; may be "
        "repeated",
    )
    parser.add_argument(
        "--both-settings",
        action="store_true",
        help="compile once more with the other setting of xla_gpu_enable_triton_gemm, and say what changes",
    )
    parser.add_argument(
        "--all", action="store_true", help="list every product with formats and implementation, not a row per layer"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the table as a picture")
    demo = parser.add_argument_group("a model with published shapes instead of your own step")
    demo.add_argument("--demo", metavar="NAME", help=f"one of {', '.join(demos)}")
    demo.add_argument("--layers", type=_positive, metavar="N", help="blocks (default: as published)")
    demo.add_argument("--tokens", type=_positive, metavar="N", help="tokens in a step (default 8192)")
    demo.add_argument("--length", type=_positive, metavar="N", help="tokens in a sequence (default: at most 2048)")
    demo.add_argument("--blocks", choices=list(stackings), help="default: checkpointed")
    demo.add_argument("--recipe", metavar="NAME", help=f"default delayed; {', '.join(named)}, none")
    demo.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="layers to leave in bf16")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.require, options.xla = dict(options.require), dict(options.xla)
    files = {name: getattr(options, name) for name in ("json", "markdown", "svg")}
    if (options.step is None) == (options.demo is None):
        taken = [f"; {v!r} is the value of --{name}" for name, v in files.items() if v is not None and v != "-"]
        parser.error(f"give FILE.py:FUNCTION, or --demo with one of {', '.join(demos)}{''.join(taken)}")
    if options.demo is None and options.compare == IN_BFLOAT16:
        parser.error("--compare without a value is for --demo; give the FILE.py:FUNCTION of the baseline")
    if options.demo is not None and options.mesh is not None:
        parser.error("--mesh is for your own steps; a demo divides its arrays over --devices N")
    for name in _OF_DEMOS:
        if options.demo is None and getattr(options, name):
            parser.error(f"--{name} is for --demo; {options.step} makes its own step: make the change there")
    for name in ("peak_memory_ratio", "speedup"):
        if name in options.require and options.compare is None:
            parser.error(f"--require {name}={options.require[name]:g} compares with a baseline; add --compare")
    if options.json == options.markdown == "-":
        parser.error("--json and --markdown cannot both go to the screen; give one of them a FILE")
    if options.svg == "-":
        parser.error("--svg=- is not a file; name one, such as report.svg")
    written = {name: file for name, file in files.items() if file not in (None, "-")}
    if len({*written.values()}) < len(written):
        parser.error(f"{' and '.join(f'--{name}={file}' for name, file in written.items())} write to the same file")
    for name, file in written.items():
        # Before the step is compiled, which may take minutes.
        if why := _why_not_written(pathlib.Path(file)):
            parser.error(f"--{name}={file!r} cannot be written: {why}")
    options.tokens = options.tokens or 8192
    options.length = options.length or min(options.tokens, 2048)
    options.blocks, options.recipe = options.blocks or "checkpointed", options.recipe or "delayed"


# Flags that change a demo, and no step of one's own.
_OF_DEMOS = ("layers", "tokens", "length", "blocks", "recipe", "exclude")


def _why_not_written(path: pathlib.Path) -> str:
    if path.is_dir():
        return "it is a folder; name a file in it"
    return "" if path.parent.is_dir() else f"the folder {str(path.parent)!r} does not exist; create it first"


def requirements() -> dict[str, inspect.Parameter]:
    """The requirements that `PreflightReport.require` can check."""
    parameters = inspect.signature(PreflightReport.require).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def _argument(words: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Says what was expected: argparse's own message would be "invalid NAME value", with the function's name."""

    def named(parse: Callable[[str], Any]) -> Callable[[str], Any]:
        @functools.wraps(parse)
        def parsed(text: str) -> Any:
            try:
                return parse(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"{text!r} is not {words}") from error

        return parsed

    return named


@_argument("a positive integer")
def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


@_argument("AXIS=N,..., such as data=8")
def _mesh(text: str) -> dict[str, int]:
    axes = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() for name, _, _ in axes):
        raise ValueError
    return {name: _positive(size) for name, _, size in axes}


@_argument("NAME=VALUE with a number, such as fp8_flops=0.9")
def _requirement(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in requirements():
        raise argparse.ArgumentTypeError(f"{name!r} cannot be required; choose from {', '.join(requirements())}")
    bound = float(value)
    if not math.isfinite(bound):  # NaN would be met by every step
        raise ValueError
    return name, bound


@_argument("OPTION=VALUE, such as xla_gpu_enable_triton_gemm=false")
def _compiler_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError
    return name, {"true": True, "false": False}.get(value.lower(), value)
