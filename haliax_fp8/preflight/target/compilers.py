"""Where XLA's compilers for other devices are installed: next to the environment's packages, where JAX does not look.

Each comes in the wheel that JAX loads to run on such a device. Among the environment's packages, JAX would start it in
every program, look for a device or a driver, and log that it found none, with a traceback or with errors. So
`python -m haliax_fp8 install-compiler` unpacks the wheel elsewhere, and it is loaded only to compile something.
"""

import dataclasses
import importlib.metadata
import pathlib
import re
import sys


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler in a wheel: its name for `install-compiler`, the devices it compiles for, and a file that is in it."""

    name: str
    devices: str
    package: str
    megabytes: int
    file: str

    @property
    def requirement(self) -> str:
        """The wheel that fits the installed JAX: the one that JAX names, or the one of jaxlib's version."""
        for required in importlib.metadata.requires("jax") or ():
            if (version := re.match(rf"{self.package}\s*([=<>~!][^;]*)", required)) is not None:
                return self.package + version[1].strip()
        return f"{self.package}=={importlib.metadata.version('jaxlib')}"

    @property
    def directory(self) -> pathlib.Path:
        """Where it is unpacked: in the environment, but not on Python's path; a separate directory for each version of
        JAX."""
        folder = f"{self.package}-for-jaxlib-{importlib.metadata.version('jaxlib')}"
        return pathlib.Path(sys.prefix) / "share" / "haliax_fp8" / folder

    @property
    def unpacked(self) -> pathlib.Path | None:
        """The file, if it was unpacked."""
        path = self.directory / self.file
        return path if path.exists() else None

    @property
    def missing(self) -> str:
        """The message if it is needed but missing."""
        return f"XLA's compiler for {self.devices}: run `python -m haliax_fp8 install-compiler {self.name}`"


NVIDIA = Compiler("nvidia", "NVIDIA's GPUs", "jax-cuda13-pjrt", 135, "jax_plugins/xla_cuda13/__init__.py")
TPU = Compiler("tpu", "TPUs", "libtpu", 480, "libtpu/libtpu.so")
compilers = {compiler.name: compiler for compiler in (NVIDIA, TPU)}
