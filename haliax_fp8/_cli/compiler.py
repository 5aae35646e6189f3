"""The command `install-compiler`: gets XLA's compiler for devices that are not here."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ..preflight.compilable.compilers import compilers
from .load import UsageError
from .screen import on_error


def install_compiler(name: str) -> None:
    """Unpacks the wheels with the compiler where the preflight finds it and JAX does not.

    Args:
        name: One of `compilers`.

    Raises:
        UsageError: If there is neither pip nor uv, or if it fails; its output is on the screen.
    """
    say, compiler = on_error().print, compilers[name]
    if compiler.unpacked is not None:
        say(f"XLA's compiler for {compiler.devices} is installed already, in {compiler.directory}", soft_wrap=True)
        return
    command = [*_installer(), "--no-deps", "--target", str(compiler.directory), *compiler.requirements]
    say(f"Getting XLA's compiler for {compiler.devices}, {compiler.megabytes} MB:", " ".join(command), soft_wrap=True)
    status = subprocess.run(command, check=False).returncode
    if status != 0 or compiler.unpacked is None:
        shutil.rmtree(compiler.directory, ignore_errors=True)
        raise UsageError(
            f"{' '.join(compiler.requirements)} could not be installed, see above. It exists only for Linux and for "
            "released versions of JAX"
        )
    for other in compiler.directory.parent.glob(f"{next(iter(compiler.files))}-for-*"):
        if other != compiler.directory:
            shutil.rmtree(other, ignore_errors=True)  # of the JAX that was here before
    say("Installed. `python -m haliax_fp8 devices` lists what this machine can compile for.")


def _installer() -> Sequence[str]:
    """The start of a command that installs packages: pip's, or in an environment that uv made, uv's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    # `uv run` says which uv it is.
    if (uv := os.environ.get("UV") or shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise UsageError("install-compiler needs pip or uv: run `python -m ensurepip`, and repeat the command")
