"""The command `install-compiler`: gets XLA's compiler for devices that are not here."""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ..preflight.compilers import compilers
from .load import UsageError
from .screen import on_error


def add_parsers(commands: Any) -> None:
    """Adds the command to the parser.

    Args:
        commands: What `add_subparsers` gave.
    """
    text = "install XLA's compiler for devices that this machine lacks, for preflight; JAX keeps its own devices"
    parser = commands.add_parser("install-compiler", help=text, description=text[0].upper() + text[1:] + ".")
    known = ", ".join(f"{name} ({compiler.megabytes} MB)" for name, compiler in compilers.items())
    parser.add_argument("compiler", choices=compilers, metavar="NAME", help=f"one of {known}")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    install_compiler(options.compiler)
    return 0


def install_compiler(name: str) -> None:
    """Unpacks the wheels with the compiler where the preflight finds it and JAX does not.

    Args:
        name: One of `compilers`.

    Raises:
        UsageError: With the command of pip, if there is neither pip nor uv, or if it fails; its output is on the
            screen.
    """
    say, compiler = on_error().print, compilers[name]
    if compiler.unpacked is not None:
        say(f"XLA's compiler for {compiler.devices} is installed already, in {compiler.directory}", soft_wrap=True)
        return
    options = ["--no-deps", "--target", str(compiler.directory), *compiler.requirements]
    by_hand = f"`{shlex.join(['pip', 'install', *options])}`, with a pip of the same version of Python"
    if (installer := _installer()) is None:
        ensurepip = shlex.join([sys.executable, "-m", "ensurepip"])
        raise UsageError(
            f"install-compiler needs pip or uv, and found neither: run `{ensurepip}` and repeat the command, or run "
            f"{by_hand}"
        )
    command = [*installer, *options]
    say(f"Getting XLA's compiler for {compiler.devices}, {compiler.megabytes} MB:", " ".join(command), soft_wrap=True)
    status = subprocess.run(command, check=False).returncode
    if status != 0 or compiler.unpacked is None:
        shutil.rmtree(compiler.directory, ignore_errors=True)
        raise UsageError(
            f"{' '.join(compiler.requirements)} could not be installed, see above. It exists only for Linux and for "
            f"released versions of JAX; there, try {by_hand}"
        )
    for other in compiler.directory.parent.glob(f"{next(iter(compiler.files))}-for-*"):
        if other != compiler.directory:
            shutil.rmtree(other, ignore_errors=True)  # of the JAX that was here before
    say("Installed. `python -m haliax_fp8 devices` lists what this machine can compile for.")


def _installer() -> Sequence[str] | None:
    """The start of a command that installs packages: pip's, or where there is only uv, uv's; None without either."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    # `uv run` says which uv it is.
    uv = os.environ.get("UV") or shutil.which("uv")
    # pyenv puts a `uv` on the path that fails in every Python but the one that has it.
    if uv is None or subprocess.run([uv, "--version"], check=False, capture_output=True).returncode != 0:
        return None
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]
