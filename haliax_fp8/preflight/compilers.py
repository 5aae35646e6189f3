"""XLA's compilers for other devices: where they are installed, and what compiling with them changes in this process.

Each comes in the wheel that JAX loads to run on such a device. If it were among the environment's packages, JAX would
start it in every program, look for a device or a driver, and log a traceback or errors because it found none. So
`python -m haliax_fp8 install-compiler` unpacks the wheel elsewhere, and it is loaded only to compile something.
"""

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence


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


# Variables, log filters and warning filters belong to the whole process: if two threads restored them in the wrong
# order, a change would remain. A thread may enter again.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def changed_process(
    *, variables: Mapping[str, str] | None = None, quiet: Sequence[str] = (), ignored: Sequence[str] = ()
) -> Iterator[None]:
    """Changes the process, and undoes the changes at the end; other threads wait until then.

    Args:
        variables: Environment variables by name; those that are set already do not change.
        quiet: Names of loggers whose warnings are dropped.
        ignored: Beginnings of the messages of Python warnings that are dropped.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as undo:
        for name, value in (variables or {}).items():
            if name not in os.environ:
                os.environ[name] = value
                undo.callback(os.environ.pop, name, None)
        for name in quiet:
            logging.getLogger(name).addFilter(_is_error)
            undo.callback(logging.getLogger(name).removeFilter, _is_error)
        undo.enter_context(warnings.catch_warnings())
        for message in ignored:
            warnings.filterwarnings("ignore", message=message)
        yield


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
