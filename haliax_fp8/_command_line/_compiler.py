"""The command `install-compiler`: gets XLA's compiler for NVIDIA's GPUs."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ..preflight import _gpu_compiler as gpu_compiler
from ._errors import UsageError
from ._screen import on_error


def install_compiler() -> None:
    """Unpacks the wheel with the compiler where `preflight` finds it and JAX does not.

    Raises:
        UsageError: If there is neither pip nor uv, or it fails; what it said is on the screen by then.
    """
    say = on_error().print
    if gpu_compiler.is_installed():
        say("XLA's compiler for NVIDIA's GPUs is installed already.")
        return
    directory = gpu_compiler.directory()
    command = [*_installer(), "--no-deps", "--target", str(directory), gpu_compiler.requirement()]
    say(f"Getting XLA's compiler for NVIDIA's GPUs, 135 MB: {' '.join(command)}", soft_wrap=True)
    status = subprocess.run(command, check=False).returncode
    if status != 0 or not gpu_compiler.is_installed():
        shutil.rmtree(directory, ignore_errors=True)
        raise UsageError(
            f"{gpu_compiler.requirement()} could not be installed, see above. It exists for Linux, and for released "
            "versions of jaxlib"
        )
    for other in directory.parent.glob(f"{gpu_compiler.PACKAGE}==*"):
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)  # of the JAX that was here before
    say("Done. Now, for example: python -m haliax_fp8 preflight --demo llama-8b --layers 1 --tokens 2048 --compare")


def _installer() -> Sequence[str]:
    """The start of a command that installs packages: pip's, or in an environment that uv made, uv's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    # `uv run` says which uv it is.
    if (uv := os.environ.get("UV") or shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise UsageError("install-compiler needs pip or uv: run `python -m ensurepip`, and repeat the command")
