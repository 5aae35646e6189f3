"""The option `--choose` of the preflight: a search for the fastest way to run a step."""

import argparse
import dataclasses
import inspect
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any

from ..devices import Device
from ..preflight import Choice, choose
from ..preflight.devices import as_compilable
from ..recipes import by_name, named, supported
from .demo import demo_by_name, demo_config, demo_step
from .devices import check_device, compile_only, has_fused_attention, require_compiler
from .load import UsageError, load_function
from .progress import with_progress


CACHE = "~/.cache/haliax_fp8/preflight"
"""Where it keeps what it has compiled."""


def run_choose(options: argparse.Namespace) -> int:
    """Lists the choices that fit.

    Returns:
        The exit status: 0, or 1 if nothing fits.

    Raises:
        UsageError: If the command does not fit, or a package is missing.
        KeyboardInterrupt: As in `run_preflight`; what was compiled is not compiled again.
    """
    check_device(options.device)
    compile_only()
    path = list(sys.path)
    try:
        device, count = as_compilable(options.device), options.devices or math.prod((options.mesh or {}).values())
        recipes = _recipes(options.recipe, device.hardware)
        most = options.tokens or 32768 * count
        tokens = [most // part for part in (1, 2, 4) if most % part == 0]
        lists: dict[str, Any] = {"recipe": recipes, "recompute": (True, False), "mesh": _meshes(options.mesh, count)}
        if options.demo:
            make, command = demo_choices(options, min(tokens))
            del lists["mesh"]
        else:
            make, command = load_function(options.step), None
            lists = _taken(make, lists, options)
        require_compiler(options.device)
        choices = with_progress(
            lambda say: choose(
                make,
                tokens=tokens,
                recipes=lists.get("recipe"),
                recompute=lists.get("recompute"),
                meshes=lists.get("mesh"),
                device=options.device,
                devices=count,
                memory=options.memory,
                exact=options.exact,
                compiler_options=options.xla,
                cache=os.path.expanduser(options.cache or CACHE),
                progress=say,
            )
        )
        # The module of a file that was loaded from its path has a name of our own.
        module, lines = (options.step or "").rpartition(":")[0], choices.code
        name = pathlib.Path(module).stem if module.endswith(".py") else module
        of_user = lambda choice: lines(choice).replace(f"from {make.__module__} ", f"from {name} ", 1)
        print(dataclasses.replace(choices, code=command or of_user))
    finally:
        sys.path[:] = path
    return 0 if choices.fitting else 1


def _taken(make: Callable[..., Any], lists: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The lists whose keywords the user's function takes."""
    takes = inspect.signature(make).parameters
    asked = {"tokens"} | {name for name in ("recipe", "mesh") if getattr(options, name) is not None}
    asked |= {"recipe"} if options.exact else set()
    if missing := sorted(asked - {*takes}):
        raise UsageError(
            f"{options.step} does not take {', '.join(missing)} as --choose passes it; add it as a keyword"
        )
    return {name: values for name, values in lists.items() if name in takes}


def _recipes(names: str | None, device: Device) -> list[str | None]:
    """The recipes of these names; by default all that a device multiplies, but those with fixed scales, which would
    first have to be calibrated."""
    if names is None:
        return [None, *(name for name in named if name != "static" and supported(name, device).is_native)]
    try:
        return [None if name == "none" else by_name(name) and name for name in names.split(",")]
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _meshes(mesh: dict[str, int] | None, count: int) -> list[dict[str, int]]:
    """The mesh that was asked for, or all that divide the devices into data and tensor parallelism."""
    if mesh is not None:
        return [mesh]
    return [{"data": count // model, "model": model} for model in range(1, count + 1) if count % model == 0]


def demo_choices(
    options: argparse.Namespace, smallest: int
) -> tuple[Callable[..., tuple[Any, ...]], Callable[[Choice], str]]:
    """What makes a demo's step, of `smallest` tokens at least, and the command that makes a choice's report."""
    demo, devices = demo_by_name(options.demo), options.devices or 1
    length = options.length or min(2048, smallest)
    blocks = lambda recompute: "checkpointed" if recompute else "scan"

    def make(*, recipe: str | None, recompute: bool, tokens: int) -> tuple[Any, ...]:
        return demo_step(
            demo,
            layers=options.layers,
            tokens=tokens,
            length=length,
            stacking=blocks(recompute),
            config=None if recipe is None else demo_config(demo, recipe, options.exclude),
            devices=devices,
            fused_attention=has_fused_attention(as_compilable(options.device).hardware),
        )

    def command(choice: Choice) -> str:
        chosen = choice.keywords
        words = {"demo": options.demo, "layers": options.layers, "tokens": choice.tokens, "length": length}
        words |= {"blocks": blocks(chosen["recompute"]), "recipe": chosen["recipe"] or "none"}
        words |= {"device": options.device, "devices": devices}
        flags = [(f"--{name}", str(value)) for name, value in words.items() if value is not None]
        flags += [("--exclude", pattern) for pattern in options.exclude]
        flags += [("--xla", f"{name}={str(value).lower()}") for name, value in options.xla.items()]
        return shlex.join(["python", "-m", "haliax_fp8", "preflight", *(word for pair in flags for word in pair)])

    return make, command
