"""The devices to compile for, by name, and what XLA needs to know about each: NVIDIA GPUs, TPUs, the local ones."""

import abc
import dataclasses
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.experimental import topologies

from .._jax.late_plugin import complete_plugin
from ..devices import Device, Peaks, is_narrow
from ..devices.catalog import NotCompiled, Row, XlaGpu, XlaTpu, canonical, catalog
from ..devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from ..recipes import MX_UNITS
from .compilers import NVIDIA, TPU, changed_process
from .instruction import FORMATS


@dataclasses.dataclass(frozen=True)
class CompilableDevice(abc.ABC):
    """A device to compile for.

    Args:
        name: Its name in `inspect_step(device=...)`.
        kind: The device's own name.
        peaks: Its peak rates; None if unknown.
    """

    name: str
    kind: str
    peaks: Peaks | None

    @property
    @abc.abstractmethod
    def hardware(self) -> Device:
        """The hardware, which decides which formats are multiplied."""

    @abc.abstractmethod
    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        """The compiler's options.

        Args:
            flags: The user's flags, which take precedence.
        """

    @property
    @abc.abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Environment variables that the compiler reads, set while it compiles."""

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Why this machine cannot compile for it, with the command that fixes this; None if it can."""

    @abc.abstractmethod
    def devices(self, count: int) -> Sequence[Any]:
        """As many devices as `count`, which this machine need not have.

        Args:
            count: The number of devices.

        Raises:
            RuntimeError: If a package is missing; the message has the command that installs it.
            ValueError: If the device cannot have that number of devices.
        """

    def lacks(self, dtype: str) -> str | None:
        """Why the device does not multiply an element type; None if it does.

        Args:
            dtype: XLA's name for it, such as `f8e4m3fn`.
        """
        if self.hardware.emulates and dtype.startswith("f8"):
            return "a CPU has no FP8 products: they are emulated, with the same rounding"
        if (format := FORMATS.get(dtype)) is not None:
            return self.hardware.lacks(format)
        # Scales are not multiplied so; and cuDNN has block-scaled products of FP4.
        is_known = dtype == "f8e8m0fnu" or (dtype.startswith("f4") and self.hardware.platform == "cuda")
        return f"{self.kind} has no products of {dtype}" if is_narrow(dtype) and not is_known else None

    def lacks_block_scaling(self) -> str | None:
        """Why the device does not multiply operands with a scale for each block; None if it does."""
        reason = self.hardware.lacks(dataclasses.replace(MX_UNITS, products="block-scaled products"))
        return None if reason is None else f"{reason}: the operands are widened where they are multiplied"


@dataclasses.dataclass(frozen=True)
class LocalDevice(CompilableDevice):
    """The local devices, as JAX lists them by default."""

    @property
    def hardware(self) -> Device:
        return Device.local()

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        return {}  # XLA itself reads the flags in the environment.

    @property
    def variables(self) -> Mapping[str, str]:
        return {}

    def missing(self) -> None:
        return None

    def devices(self, count: int) -> Sequence[Any]:
        """The first of `jax.devices()`."""
        local = jax.devices()
        if len(local) < count:
            raise ValueError(f"devices={count}, but this machine has {len(local)}; name a device to compile for more")
        return local[:count]


CUDNN = "9.28.1"
"""The cuDNN that installers chose for `jax[cuda13]` 0.12 on 2026-11-28; its plugin takes 9.12 and newer."""

SCALES_INSIDE = (9, 13)
"""From this cuDNN on, its products of blocks take the scale of a tensor; before, XLA multiplies the result by it."""


@dataclasses.dataclass(frozen=True)
class CompilableGpu(CompilableDevice):
    """An NVIDIA GPU, for XLA's GPU compiler.

    Args:
        compute_capability: Such as `9.0`.
        description: The fields of a `stream_executor.GpuDeviceInfoProto` in text form that differ between devices.
        cudnn: The version of cuDNN on the machine with the device, such as `9.28.1`: some programs depend on it.

    Raises:
        ValueError: If `cudnn` is not a version.
    """

    compute_capability: str
    description: str = dataclasses.field(repr=False)
    cudnn: str = CUDNN

    def __post_init__(self) -> None:
        if re.fullmatch(r"\d+\.\d+\.\d+", self.cudnn) is None:
            raise ValueError(f"cudnn={self.cudnn!r} of {self.name} is not a version such as {CUDNN!r}")

    @property
    def scales_inside(self) -> bool:
        """Whether its cuDNN multiplies the result of a product of blocks by a tensor's scale."""
        return tuple(map(int, self.cudnn.split("."))) >= SCALES_INSIDE

    @property
    def hardware(self) -> Device:
        return Device("cuda", self.kind, self.compute_capability)

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        """The user's setting of Triton products; and less work where that does not change the program.

        Machine code need not be good, because nothing runs. The autotuner for other fusions has no device to measure
        on, and would compile each of them again only to keep it unchanged. XLA's decisions stay the same, in less than
        half the time.
        """
        quick = {"xla_backend_optimization_level": 0, "xla_gpu_experimental_enable_fusion_autotuner": False}
        options = {name: value for name, value in quick.items() if name not in flags.values}
        return {TRITON_PRODUCTS: flags.triton_products, **options}

    @property
    def variables(self) -> Mapping[str, str]:
        """Where the compiler of Pallas kernels is.

        JAX looks for it where it imports Mosaic, which may have been before its package was found.
        """
        if NVIDIA.unpacked is None:
            return {}
        package = (NVIDIA.directory / NVIDIA.files["jax-cuda13-plugin"]).parent
        return {"MOSAIC_GPU_RUNTIME_LIB_PATH": str(package / "libmosaic_gpu_runtime.so")}

    def missing(self) -> str | None:
        if _plugin_among_packages() is not None or NVIDIA.unpacked is not None:
            return None
        return f"device {self.name!r} needs {NVIDIA.missing}"

    def devices(self, count: int) -> Sequence[Any]:
        """The GPUs of one host, up to eight; beyond that, hosts of eight."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        hosts, per_host = (1, count) if count <= 8 else (count // 8, 8)
        if hosts * per_host != count:
            raise ValueError(f"devices={count} is more than one host of 8 GPUs, but not a multiple of 8")
        return _topology(target_config=self._config, topology=f"{hosts}x{per_host}x1").devices

    @property
    def _config(self) -> str:
        """A `stream_executor.GpuTargetConfigProto` in text form."""
        major, minor = self.compute_capability.split(".")
        of_cudnn = "major: {} minor: {} patch: {}".format(*self.cudnn.split("."))
        features = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536 dnn_version: "{self.cudnn}"
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              {self.description}
            }}
            platform_name: "CUDA" dnn_version_info {{ {of_cudnn} }} runtime_version {{ major: 12 minor: 9 }}
            device_description_str: "{self.kind}"
        """


_LIBRARY = "jax_cuda13_plugin"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_LIBRARIES = (_LIBRARY, "jax_cuda12_plugin")


def _plugin_among_packages() -> str | None:
    """The module of JAX's plugin for NVIDIA GPUs, if that is installed as a package."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in _PLUGINS if importlib.util.find_spec(name) is not None), None)


def _plugin() -> ModuleType:
    if (name := _plugin_among_packages()) is not None:
        return importlib.import_module(name)
    path = NVIDIA.unpacked
    assert path is not None
    spec = importlib.util.spec_from_file_location(_PLUGINS[0], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_libraries() -> None:
    """Lets JAX find the compiler of Pallas kernels, if it was unpacked next to XLA's compiler.

    A package that is imported stays known. On Python's path, programs that do not compile for absent GPUs would find it
    as well.
    """
    if NVIDIA.unpacked is None or any(importlib.util.find_spec(name) is not None for name in _LIBRARIES):
        return
    spec = importlib.util.spec_from_file_location(_LIBRARY, NVIDIA.directory / NVIDIA.files["jax-cuda13-plugin"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_LIBRARY] = module
    spec.loader.exec_module(module)


def _topology(**options: str) -> topologies.TopologyDescription:
    """A description of GPUs, without a GPU or a driver, and without changing the process's own devices.

    It is made in this process, not in a child, because sending the program to a child takes `jax.export`, another
    package (flatbuffers) and seconds. If the plugin is installed as a package, JAX starts it with its other backends;
    if it is elsewhere, or failed then, it is started here. By then JAX has chosen its default device, and does not
    choose again. By default, the plugin refuses to start if it cannot query the versions of CUDA's libraries. Its
    warning about a missing driver is suppressed, because no driver is needed here.
    """
    _find_libraries()
    has_libraries = any(importlib.util.find_spec(name) is not None for name in _LIBRARIES)
    has_driver = os.path.exists("/proc/driver/nvidia/version")
    skip = {} if has_libraries and has_driver else {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    with changed_process(variables=skip, quiet=[_plugin_among_packages() or _PLUGINS[0]]):
        jax.devices("cpu")
        try:
            return topologies.get_topology_desc("", "cuda", **options)
        except NotImplementedError:
            _plugin().initialize()
            complete_plugin("cuda")
            return topologies.get_topology_desc("", "cuda", **options)


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
            if len(slice_devices := self._slice(shape)) >= count:
                return slice_devices[:count]
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


def _compilable(row: Row) -> CompilableDevice | None:
    match row.xla:
        case XlaGpu() as gpu:
            description = " ".join(f"{name}: {value}" for name, value in dataclasses.asdict(gpu).items())
            return CompilableGpu(row.name, row.kind, row.peaks, row.compute_capability, description)
        case XlaTpu() as tpu:
            return CompilableTpu(row.name, row.kind, row.peaks, tpu.generation)
        case NotCompiled():
            return None


compilable_devices: Mapping[str, CompilableDevice] = {
    **{name: device for name, row in catalog.items() if (device := _compilable(row)) is not None},
    "local": LocalDevice("local", "the local devices", None),
}
"""The devices to compile for, by name."""


def as_compilable(device: str | CompilableDevice) -> CompilableDevice:
    """The device with a name; a `CompilableDevice` is returned unchanged.

    Args:
        device: One of `compilable_devices`, in any case, or another name of it; or your own `CompilableDevice`.

    Raises:
        ValueError: If the name is unknown, or the preflight cannot compile for the device.

    Example:
        >>> as_compilable("H100").kind, as_compilable("v6e").name
        ('NVIDIA H100 80GB HBM3', 'tpu6e')
    """
    if isinstance(device, CompilableDevice):
        return device
    if (name := canonical(device)) not in compilable_devices:
        why = "is unknown"
        if name in catalog and isinstance(xla := catalog[name].xla, NotCompiled):
            why = f"cannot be compiled for: {xla.reason}"
        raise ValueError(f"device={device!r} {why}; choose one of {', '.join(compilable_devices)}")
    return compilable_devices[name]
