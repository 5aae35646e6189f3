"""TPUs: runs XLA's TPU compiler, from the package `libtpu`."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from ...devices.device import Device
from ...devices.xla_flags import XlaFlags
from .compilers import TPU
from .device import CompilableDevice
from .process import changed_process


@dataclasses.dataclass(frozen=True)
class CompilableTpu(CompilableDevice):
    """A TPU, for the compiler of the package `libtpu`.

    Args:
        topology: The generation in libtpu's topology names, such as `v6e`.
    """

    topology: str

    @property
    def hardware(self) -> Device:
        return Device("tpu", self.kind)

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        return {}  # XLA itself reads the flags in the environment.

    @property
    def variables(self) -> Mapping[str, str]:
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        return ("times are estimates, nothing ran",)

    def missing(self) -> str | None:
        if TPU.unpacked is not None or importlib.util.find_spec("libtpu"):
            return None
        return f"device {self.name!r} needs {TPU.missing}"

    def devices(self, count: int) -> Sequence[Any]:
        """The first `count` devices of the smallest slice with enough of them; TPU7x has two devices per chip."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        shapes = _FLAT if self.topology in _IN_TWO_DIMENSIONS else _DEEP
        for shape in shapes:
            if len(found := self._slice(shape)) >= count:
                return found[:count]
        most = len(self._slice(shapes[-1]))
        raise ValueError(f"devices={count} is more than the largest slice has: {most} {self.kind}s")

    def _slice(self, shape: str) -> Sequence[Any]:
        jax.devices("cpu")  # Creates the process's own backends first, so that they do not change.
        # If libtpu is loaded already, as on a TPU, JAX does not look for a path.
        library = {} if TPU.unpacked is None else {"TPU_LIBRARY_PATH": str(TPU.unpacked)}
        with changed_process(variables={**_NO_TPU_HERE, **library}):
            try:
                return topologies.get_topology_desc(f"{self.topology}:{shape}", "tpu").devices
            except jax.errors.JaxRuntimeError:
                return ()  # Not every generation has every shape.


_IN_TWO_DIMENSIONS = ("v5e", "v6e")
"""The generations whose pods are a torus of 16 × 16 chips. libtpu describes deeper slices of them too, but compiling
for one may end the process.

References:
    Google Cloud's pages "TPU v5e", "TPU v6e" and "TPU7x", and "TPU v5p" for the shapes of slices in three dimensions.
"""

# One shape for each power of two.
_FLAT = ("1x1x1", "2x2x1", "2x4x1", "4x4x1", "4x8x1", "8x8x1", "8x16x1", "16x16x1")
_DEEP = (
    *("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)

# Otherwise libtpu would ask a server what machine this is, and warn that none answers.
_NO_TPU_HERE = {
    # Several processes may compile at once, because none of them uses a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
