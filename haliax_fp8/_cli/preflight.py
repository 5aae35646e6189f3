"""The command `preflight`: compiles a user's step or a demo, shows the report, holds it to requirements."""

import argparse
import importlib.util
import logging
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..devices.catalog import canonical
from ..devices.device import Device
from ..layers.config import Fp8Config
from ..layers.describe import describe
from ..preflight import PreflightError, PreflightReport, inspect_step
from ..preflight.devices import as_compilable
from .demo import demo_by_name, demo_step
from .load import Step, UsageError, load_step, split_reference
from .options import IN_BFLOAT16
from .screen import as_svg, fitted, on_error, screen


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


def compile_only() -> None:
    """Leaves accelerators alone: this process computes on the CPU, and compiles for other devices.

    A step for another device does not need the local ones; its conversion would check them for FP8 units.
    """
    jax.config.update("jax_platforms", "cpu")
    # XLA's GPU compiler warns that what runs its programs is not installed: it need not be.
    logging.getLogger("jax_plugins.xla_cuda13").setLevel(logging.ERROR)


def use_local_devices() -> None:
    """Computes on the local devices; these include no NVIDIA GPU if only XLA's compiler for them is installed."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None and importlib.util.find_spec("jax_plugins") is not None:
        if importlib.util.find_spec("jax_plugins.xla_cuda13") is not None:
            compile_only()


def check_device(name: str) -> None:
    """Says early, and in one line, that a device is unknown.

    Raises:
        UsageError: Naming the nearest.
    """
    try:
        as_compilable(name)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def require_compiler(name: str) -> None:
    """Says in one line that a device's compiler is missing.

    Raises:
        UsageError: Naming the remedy.
    """
    if (missing := as_compilable(name).missing()) is not None:
        raise UsageError(missing)


def demo_steps(options: argparse.Namespace) -> Steps:
    """The demo and, if requested, the same in bf16."""
    demo = demo_by_name(options.demo)
    config = None if options.recipe == "none" else demo_config(options)
    baseline = None if options.compare in (None, IN_BFLOAT16) else load_step(options.compare)
    sizes = {name: getattr(options, name) for name in ("layers", "tokens", "length")}
    sizes["devices"] = options.devices or 1
    sizes["fused_attention"] = has_fused_attention(as_compilable(options.device).hardware)

    def make(config: Fp8Config | None) -> Step:
        try:
            function, args = demo_step(demo, **sizes, stacking=options.blocks, config=config)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Step(function, args, known=reasons(args[0], config))

    def steps() -> tuple[Step, Step | None]:
        how = "cuDNN's, without scores in memory" if sizes["fused_attention"] else "XLA's, with scores in memory"
        on_error().print(f"attention: {how}")
        if baseline is not None:
            return make(config), baseline()
        return make(config), None if options.compare is None else make(None)

    return steps


def has_fused_attention(device: Device) -> bool:
    """Whether a device has cuDNN's attention, whose scores are not in memory."""
    return device.is_cuda_from(8.0)


def demo_config(options: argparse.Namespace) -> Fp8Config:
    """How the demo is converted."""
    try:
        return Fp8Config(recipe=options.recipe, exclude=options.exclude)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def user_steps(options: argparse.Namespace) -> Steps:
    """The user's step and baseline."""
    make = load_step(options.step)
    make_baseline = None if options.compare is None else load_step(options.compare)

    def steps() -> tuple[Step, Step | None]:
        step = make()
        step.known.update({path: reason for arg in step.args for path, reason in reasons(arg, None).items()})
        return step, None if make_baseline is None else make_baseline()

    return steps


def reasons(model: Any, config: Fp8Config | None) -> dict[str, str]:
    """Why layers of a model stay in high precision, by path; nothing of an argument that is a single array."""
    if model is None or jax.tree_util.all_leaves([model]):
        return {}
    return {layer.path: layer.reason for layer in describe(model, config) if layer.reason}


def compile_with_progress(step: Step, baseline: Step | None, options: argparse.Namespace) -> PreflightReport:
    """The report; the standard error shows what is being compiled meanwhile."""
    console = on_error()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def say(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(what)

        def compile_all() -> PreflightReport:
            return inspect_step(
                step.function,
                *step.args,
                device=options.device,
                devices=options.devices,
                mesh=options.mesh,
                shardings=step.shardings,
                compare=None if baseline is None else (baseline.function, baseline.args),
                known=step.known,
                compiler_options=options.xla,
                other_setting=options.both_settings,
                progress=say,
            )

        return interruptible(compile_all)


def interruptible[T](function: Callable[[], T]) -> T:
    """Calls a function in a separate thread.

    Python handles Ctrl-C between its own instructions: in the main thread it would wait for the compiler's end.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def write(report: PreflightReport, options: argparse.Namespace) -> None:
    """The table on the screen, unless JSON or Markdown goes there; and the files that were asked for.

    Raises:
        UsageError: If a file cannot be written; the others are, and what goes to the screen is there.
    """
    shown = report.in_full if options.all else report.__rich__()
    title = f"preflight {options.step or options.demo} --device {options.device}"
    forms = {
        options.json: report.to_json,
        options.markdown: report.to_markdown,
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
