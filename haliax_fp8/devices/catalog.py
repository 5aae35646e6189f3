"""The catalog of devices: one row per device, with its names, units, peaks, and what XLA needs to compile for it.

To add a device, add its row. For a new compute capability, also see `units.py` (what it multiplies), `grouped.py` (what
multiplies groups), `preflight/devices.py` (what XLA's compiler is told of it), and the uses of
`Device.is_cuda_from` and `Device.is_hopper`.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

from .peaks import Peaks


__all__ = [
    "NotCompiled",
    "Row",
    "XlaGpu",
    "XlaTpu",
    "canonical",
    "catalog",
    "peaks",
]


@dataclasses.dataclass(frozen=True)
class XlaGpu:
    """What XLA's compiler needs to know about an NVIDIA GPU: fields of its `GpuDeviceInfoProto`, sizes in bytes."""

    core_count: int
    fpus_per_core: int
    threads_per_core_limit: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_size: int
    clock_rate_ghz: float
    memory_bandwidth: int
    device_memory_size: int


@dataclasses.dataclass(frozen=True)
class XlaTpu:
    """What XLA's compiler needs to know about a TPU.

    Args:
        generation: Its name in libtpu's topologies, such as `v6e`.
    """

    generation: str


@dataclasses.dataclass(frozen=True)
class NotCompiled:
    """Marks a device that the preflight cannot compile for.

    Args:
        reason: The reason, and the remedy.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One device of the catalog.

    Args:
        name: Its name in this package, in lower case and without spaces.
        platform: See `Device`.
        kind: See `Device`.
        compute_capability: See `Device`.
        xla: How the preflight compiles for it, or why it does not.
        peaks: Its peak rates, needed if the preflight compiles for it; else None.
        aliases: Its other names, also in lower case and without spaces.
    """

    name: str
    platform: str
    kind: str
    compute_capability: str
    xla: XlaGpu | XlaTpu | NotCompiled
    peaks: Peaks | None = None
    aliases: tuple[str, ...] = ()


_ADA = functools.partial(
    XlaGpu,
    fpus_per_core=128,
    threads_per_core_limit=1536,
    shared_memory_per_core=102400,
    shared_memory_per_block_optin=101376,
    clock_rate_ghz=2.52,
)
_SINCE_HOPPER = functools.partial(
    XlaGpu,
    fpus_per_core=128,
    threads_per_core_limit=2048,
    shared_memory_per_core=233472,
    shared_memory_per_block_optin=232448,
)
_H100 = functools.partial(_SINCE_HOPPER, core_count=132, l2_cache_size=52428800, clock_rate_ghz=1.98)
# Links: half of what NVLink or PCIe moves in both directions together.
_H100_PEAKS = functools.partial(Peaks, fp8=1978.9e12, bf16=989.4e12, f32=494.7e12, link=450e9)

_AMD = NotCompiled("XLA's compiler for AMD's GPUs needs ROCm")
_NO_FIGURES = "the catalog lacks the figures that XLA's compiler needs; the nearest device is {}"

_ROWS = (
    Row(
        "h100",
        "cuda",
        "NVIDIA H100 80GB HBM3",
        "9.0",
        _H100(memory_bandwidth=3350000000000, device_memory_size=84978434048),
        _H100_PEAKS(bandwidth=3.35e12, source="NVIDIA H100 data sheet, SXM, without sparsity"),
    ),
    Row(
        "h200",
        "cuda",
        "NVIDIA H200",
        "9.0",
        _H100(memory_bandwidth=4800000000000, device_memory_size=151397597184),
        _H100_PEAKS(bandwidth=4.8e12, source="NVIDIA H200 data sheet, SXM, without sparsity"),
    ),
    Row(
        "b200",
        "cuda",
        "NVIDIA B200",
        "10.0",
        _SINCE_HOPPER(
            core_count=148,
            l2_cache_size=132644864,
            clock_rate_ghz=1.965,
            memory_bandwidth=7672320000000,
            device_memory_size=191514411008,
        ),
        Peaks(
            4.5e15,
            2.25e15,
            1.1e15,
            7.7e12,
            "NVIDIA HGX B200 data sheet, per GPU, without sparsity",
            fp4=9e15,
            link=900e9,
        ),
    ),
    Row("gb200", "cuda", "NVIDIA GB200", "10.0", NotCompiled(_NO_FIGURES.format("b200"))),
    Row("v100", "cuda", "Tesla V100-SXM2-16GB", "7.0", NotCompiled("CUDA 13 no longer compiles for it")),
    Row(
        "a100",
        "cuda",
        "NVIDIA A100-SXM4-80GB",
        "8.0",
        XlaGpu(
            core_count=108,
            fpus_per_core=64,
            threads_per_core_limit=2048,
            shared_memory_per_core=167936,
            shared_memory_per_block_optin=166912,
            l2_cache_size=41943040,
            clock_rate_ghz=1.41,
            memory_bandwidth=2039040000000,
            device_memory_size=85100068864,
        ),
        Peaks(312e12, 312e12, 156e12, 2.039e12, "NVIDIA A100 data sheet, 80GB SXM, without sparsity", link=300e9),
    ),
    Row("l4", "cuda", "NVIDIA L4", "8.9", NotCompiled(_NO_FIGURES.format("l40s"))),
    Row(
        "l40s",
        "cuda",
        "NVIDIA L40S",
        "8.9",
        _ADA(core_count=142, l2_cache_size=100663296, memory_bandwidth=864000000000, device_memory_size=48305799168),
        Peaks(733e12, 362.05e12, 183e12, 864e9, "NVIDIA L40S data sheet, without sparsity", link=32e9),
    ),
    Row(
        "rtx4090",
        "cuda",
        "NVIDIA GeForce RTX 4090",
        "8.9",
        _ADA(core_count=128, l2_cache_size=75497472, memory_bandwidth=1008000000000, device_memory_size=25757220864),
        Peaks(330.3e12, 165.2e12, 82.6e12, 1.008e12, "NVIDIA Ada architecture white paper, float32 accumulation"),
    ),
    Row("mi250x", "rocm", "AMD Instinct MI250X", "gfx90a", _AMD),
    Row("mi300x", "rocm", "AMD Instinct MI300X", "gfx942", _AMD),
    Row("mi325x", "rocm", "AMD Instinct MI325X", "gfx942", _AMD),
    Row("mi350x", "rocm", "AMD Instinct MI350X", "gfx950", _AMD),
    Row("mi355x", "rocm", "AMD Instinct MI355X", "gfx950", _AMD),
    Row(
        "tpu7x",
        "tpu",
        "TPU7x",
        "",
        XlaTpu("tpu7x"),
        # JAX treats each of a chip's two cores as a device.
        Peaks(2307e12, 1153.5e12, 1153.5e12, 3.69e12, "Google Cloud TPU7x page, half a chip"),
        ("v7x", "tpuv7x", "tpu7", "ironwood"),
    ),
    Row(
        "tpu6e",
        "tpu",
        "TPU v6 lite",
        "",
        XlaTpu("v6e"),
        Peaks(918e12, 918e12, 918e12, 1.638e12, "Google Cloud TPU v6e page, per chip"),
        ("v6e", "tpuv6e", "tpuv6lite", "trillium"),
    ),
    Row(
        "tpu5e",
        "tpu",
        "TPU v5 lite",
        "",
        XlaTpu("v5e"),
        Peaks(197e12, 197e12, 197e12, 0.819e12, "Google Cloud TPU v5e page, per chip"),
        ("v5e", "tpuv5e", "v5litepod", "tpuv5lite"),
    ),
    Row(
        "tpu5p",
        "tpu",
        "TPU v5",
        "",
        NotCompiled(_NO_FIGURES.format("tpu5e")),
        aliases=("v5p", "tpuv5p", "tpuv5"),
    ),
    Row("tpu4", "tpu", "TPU v4", "", NotCompiled(_NO_FIGURES.format("tpu5e")), aliases=("v4", "tpuv4")),
    Row("cpu", "cpu", "cpu", "", NotCompiled("use the device 'local' for a CPU")),
)

catalog: Mapping[str, Row] = {row.name: row for row in _ROWS}
"""The rows by name, in the order in which messages list them."""

peaks: Mapping[str, Peaks] = {row.name: row.peaks for row in _ROWS if row.peaks is not None}
"""The known peaks, by the names of their devices."""

_ALIASES = {alias: row.name for row in _ROWS for alias in row.aliases}


def canonical(name: str) -> str:
    """The catalog's name for a device, ignoring case, spaces and dashes; an unknown name is returned without these.

    Args:
        name: Such as `"H100"`, `"v6e"` or `"TPU v6 lite"`.

    Example:
        >>> canonical("TPU v6e"), canonical("RTX 4090")
        ('tpu6e', 'rtx4090')
    """
    plain = re.sub(r"[\s_-]", "", name.lower())
    return _ALIASES.get(plain, plain)
