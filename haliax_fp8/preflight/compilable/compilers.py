"""Where XLA's compilers for other devices are installed: next to the environment's packages, where JAX does not look.

Each comes in the wheel that JAX loads to run on such a device. If it were among the environment's packages, JAX would
start it in every program, look for a device or a driver, and log a traceback or errors because it found none. So
`python -m haliax_fp8 install-compiler` unpacks the wheel elsewhere, and it is loaded only to compile something.
"""

import dataclasses
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler that comes in wheels.

    Args:
        name: Its name for `install-compiler`.
        devices: The devices that it compiles for.
        files: For each wheel, a file in it; the first is the compiler, others are what it needs for some programs.
        megabytes: Their size.
    """

    name: str
    devices: str
    files: Mapping[str, str]
    megabytes: int

    @property
    def requirements(self) -> Sequence[str]:
        """The wheels that fit the installed JAX: those that JAX requires, or those of jaxlib's version."""
        return [_requirement(package) for package in self.files]

    @property
    def directory(self) -> pathlib.Path:
        """Where it is unpacked: in the environment, but not on Python's path; one directory per version of JAX."""
        folder = f"{next(iter(self.files))}-for-jaxlib-{importlib.metadata.version('jaxlib')}"
        return pathlib.Path(sys.prefix) / "share" / "haliax_fp8" / folder

    @property
    def unpacked(self) -> pathlib.Path | None:
        """The compiler's file, if all wheels were unpacked."""
        paths = [self.directory / file for file in self.files.values()]
        return paths[0] if all(path.exists() for path in paths) else None

    @property
    def missing(self) -> str:
        """The message for when it is needed but missing."""
        return f"XLA's compiler for {self.devices}: run `python -m haliax_fp8 install-compiler {self.name}`"


def _requirement(package: str) -> str:
    for required in importlib.metadata.requires("jax") or ():
        if (version := re.match(rf"{package}\s*([=<>~!][^;]*)", required)) is not None:
            return package + version[1].strip()
    return f"{package}=={importlib.metadata.version('jaxlib')}"


NVIDIA = Compiler(
    "nvidia",
    "NVIDIA's GPUs",
    {
        "jax-cuda13-pjrt": "jax_plugins/xla_cuda13/__init__.py",
        # Compiles Pallas kernels for Hopper and Blackwell.
        "jax-cuda13-plugin": "jax_cuda13_plugin/__init__.py",
    },
    143,
)
TPU = Compiler("tpu", "TPUs", {"libtpu": "libtpu/libtpu.so"}, 480)
compilers = {compiler.name: compiler for compiler in (NVIDIA, TPU)}
