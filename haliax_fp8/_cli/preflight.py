"""The command `preflight`: its options; a step or a demo is compiled, its report shown and held to requirements."""

import argparse
import functools
import inspect
import math
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ..devices.catalog import canonical
from ..layers import Fp8Config
from ..preflight import PreflightError, PreflightReport, compilable_devices, inspect_step
from ..preflight.devices import as_compilable
from ..recipes import named
from .choose import CACHE, run_choose
from .demo import demo_by_name, demo_config, demo_step, demos, stackings
from .devices import check_device, compile_only, has_fused_attention, require_compiler, use_local_devices
from .help_text import Paragraphs
from .load import Step, UsageError, load_step, split_reference
from .progress import with_progress
from .screen import as_svg, fitted, on_error, screen


# `--compare` without a value: the demo in bf16.
IN_BFLOAT16 = ""

_EPILOG = """\
examples:
  %(prog)s train.py:make_step --device h100 --require fp8_flops=0.9
  %(prog)s train.py:make_step --compare train.py:bf16_step --json -
  %(prog)s --demo llama-8b --layers 4 --device b200 --compare
  %(prog)s --demo llama-8b --choose --device h100 --devices 8 --tokens 262144

FILE.py:FUNCTION takes no arguments and returns (step_fn, args), where args is the tuple of the step's arguments:
arrays, or ShapeDtypeStructs from eqx.filter_eval_shape. It may return (step_fn, args, shardings), with a PartitionSpec
or None for each argument. The step is compiled, not run.

With --choose, FUNCTION takes keywords: tokens, and those of recipe, recompute (True or False) and mesh (axes and sizes)
that it can change.

exit status: 0 success, 1 a requirement is not met, 2 the command or a package is wrong, 130 interrupted.
"""


def add_parsers(commands: Any) -> None:
    """Adds the command to the parser.

    Args:
        commands: What `add_subparsers` gave.
    """
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
        "--all",
        action="store_true",
        help="list every product with formats and implementation, not a line per layer; say what times assume",
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the table as a picture")
    choice = parser.add_argument_group("a search for the fastest way to run the step")
    choice.add_argument(
        "--choose",
        action="store_true",
        help="list recipes, what is recomputed, meshes and batches that fit, the fastest first; takes minutes",
    )
    choice.add_argument("--memory", type=_gigabytes, metavar="GB", help="of each device (default: three quarters)")
    choice.add_argument("--exact", action="store_true", help="without recipes that change the loss")
    choice.add_argument("--cache", metavar="DIR", help=f"what was compiled, to continue (default {CACHE})")
    demo = parser.add_argument_group("a model with published shapes instead of your own step")
    demo.add_argument("--demo", metavar="NAME", help=f"one of {', '.join(demos)}")
    demo.add_argument("--layers", type=_positive, metavar="N", help="blocks (default: as published)")
    demo.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help="tokens in a step (default 8192); with --choose at most (default 32768 for each device)",
    )
    demo.add_argument("--length", type=_positive, metavar="N", help="tokens in a sequence (default: at most 2048)")
    demo.add_argument("--blocks", choices=list(stackings), help="default: checkpointed")
    demo.add_argument(
        "--recipe", metavar="NAME", help=f"default delayed; {', '.join(named)}, none; with --choose NAME,..."
    )
    demo.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="layers to leave in bf16 besides the head"
    )
    parser.set_defaults(run=functools.partial(_run, parser), explain=explain)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _check(parser, options)
    return run_choose(options) if options.choose else run_preflight(options)


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
    for name in _OF_REPORTS if options.choose else _OF_CHOICES:
        if getattr(options, name) not in (None, False, {}):
            flag = f"--{name.replace('_', '-')}"
            parser.error(
                f"{flag} is for a single report; leave it out, or --choose"
                if options.choose
                else f"{flag} is for --choose"
            )
    for name in _OF_DEMOS:
        if options.demo is None and getattr(options, name) and not (options.choose and name in _OF_BOTH):
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
    if options.choose:
        return
    options.tokens = options.tokens or 8192
    options.length = options.length or min(options.tokens, 2048)
    options.blocks, options.recipe = options.blocks or "checkpointed", options.recipe or "delayed"


# Flags that change a demo, and no step of one's own, unless that takes them as keywords.
_OF_DEMOS = ("layers", "tokens", "length", "blocks", "recipe", "exclude")
_OF_BOTH = ("tokens", "recipe")
# Flags that make no sense together.
_OF_REPORTS = ("compare", "require", "json", "markdown", "svg", "both_settings", "all", "blocks")
_OF_CHOICES = ("memory", "exact", "cache")


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


@_argument("a positive number of gigabytes, such as 76")
def _gigabytes(text: str) -> float:
    value = 1e9 * float(text)
    if not 0.0 < value < math.inf:
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


# --- The command -----------------------------------------------------------------------------------------------------

type Steps = Callable[[], tuple[Step, Step | None]]
"""Makes a step and its baseline."""


def run_preflight(options: argparse.Namespace) -> int:
    """Compiles and reports.

    Returns:
        The exit status: 0, or 1 if a requirement is not met.

    Raises:
        UsageError: If the command does not fit, or a package is missing.
        KeyboardInterrupt: On Ctrl-C, at once; a compilation may go on in its thread until the process ends.
    """
    check_device(options.device)
    use_local_devices() if canonical(options.device) == "local" else compile_only()
    path = list(sys.path)
    try:
        # Names are checked before anybody is asked to install a compiler, which is needed before a step is made.
        steps = demo_steps(options) if options.demo else user_steps(options)
        require_compiler(options.device)
        step, baseline = steps()
        report = compile_with_progress(step, baseline, options)
    finally:
        sys.path[:] = path  # Without the folders of the user's files.
    write(report, options)
    try:
        report.require(**options.require)
    except PreflightError as error:
        on_error().print(fitted(str(error)), style="red")
        return 1
    return 0


def demo_steps(options: argparse.Namespace) -> Steps:
    """The demo and, if requested, the same in bf16."""
    demo = demo_by_name(options.demo)
    config = None if options.recipe == "none" else demo_config(demo, options.recipe, options.exclude)
    baseline = None if options.compare in (None, IN_BFLOAT16) else load_step(options.compare)
    sizes = {name: getattr(options, name) for name in ("layers", "tokens", "length")}
    sizes["devices"] = options.devices or 1
    sizes["fused_attention"] = has_fused_attention(as_compilable(options.device).hardware)

    def make(config: Fp8Config | None) -> Step:
        try:
            function, args = demo_step(demo, **sizes, stacking=options.blocks, config=config)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Step(function, args)

    def steps() -> tuple[Step, Step | None]:
        how = "cuDNN's, without scores in memory" if sizes["fused_attention"] else "XLA's, with scores in memory"
        on_error().print(f"attention: {how}")
        if baseline is not None:
            return make(config), baseline()
        return make(config), None if options.compare is None else make(None)

    return steps


def user_steps(options: argparse.Namespace) -> Steps:
    """The user's step and baseline."""
    make = load_step(options.step)
    make_baseline = None if options.compare is None else load_step(options.compare)

    return lambda: (make(), None if make_baseline is None else make_baseline())


def compile_with_progress(step: Step, baseline: Step | None, options: argparse.Namespace) -> PreflightReport:
    """The report; the standard error shows what is being compiled meanwhile."""
    return with_progress(
        lambda say: inspect_step(
            step.function,
            *step.args,
            device=options.device,
            devices=options.devices,
            mesh=options.mesh,
            shardings=step.shardings,
            compare=None if baseline is None else (baseline.function, baseline.args),
            compiler_options=options.xla,
            other_setting=options.both_settings,
            progress=say,
        )
    )


def write(report: PreflightReport, options: argparse.Namespace) -> None:
    """The table on the screen, unless JSON or Markdown goes there; and the files that were asked for.

    Raises:
        UsageError: If a file cannot be written; the others are, and what goes to the screen is there.
    """
    shown = report.in_full if options.all else report.__rich__()
    title = f"preflight {options.step or options.demo} --device {options.device}"
    forms = {
        options.json: report.to_json,
        options.markdown: lambda: report.to_markdown(in_full=options.all),
        options.svg: lambda: as_svg(shown, title),
    }
    failed = []
    for file, form in forms.items():
        try:
            if file not in (None, "-"):
                pathlib.Path(file).write_text(form())
        except OSError as error:
            failed.append(f"{file} cannot be written: {error.strerror}")
    if "-" in forms:
        print(forms["-"]())
    else:
        screen().print(shown)
    if failed:
        raise UsageError("; ".join(failed))


def _of_user(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """The user's functions; other commands than the preflight call none."""
    return getattr(options, "step", None), getattr(options, "compare", None)


def explain(error: Exception, options: argparse.Namespace) -> str:
    """One line for errors of the package; the whole traceback for errors in the user's file."""
    files = {os.path.realpath(split_reference(r)[0]) for r in _of_user(options) if r}
    frames = {os.path.realpath(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    if files & frames or not isinstance(error, ValueError | RuntimeError):
        return "".join(traceback.format_exception(error))
    return fitted(f"error: {error}")
