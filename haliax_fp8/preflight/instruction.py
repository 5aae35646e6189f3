"""One instruction of a program, with XLA's words: every opcode, attribute, custom call and configuration key that means
something to the preflight.

The exceptions are HLO's own grammar: `parameter`, `while`, element types, and the axes of products (`sizes.py`).
If XLA renames something, change it here. If it adds something, that shows up by name: an unlisted custom call is
reported as opaque, and fails the tests that compile programs.
"""

import dataclasses
import enum
import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from ..scopes import QUANTIZING, tile_in_name


# --- Element types ----------------------------------------------------------------------------------------------------

FORMATS = {"f8e4m3fn": E4M3, "f8e5m2": E5M2, "f8e4m3fnuz": E4M3FNUZ, "f8e5m2fnuz": E5M2FNUZ}
"""The formats that products may run in."""

QUANTIZED = ("f8e4", "f8e5", "f4e2")
"""Prefixes of the types that values are quantized to; other narrow types hold scales."""

WIDE = ("bf16", "f16", "f32", "f64")
"""The types that values are quantized from."""


# --- Opcodes, alone and by kind ---------------------------------------------------------------------------------------

CALL_START, CALL_UPDATE, CUSTOM_CALL, FUSION = "call-start", "call-update", "custom-call", "fusion"
ASYNC_START, COPY_START, FUSION_START, SLICE_START = "async-start", "copy-start", "fusion-start", "slice-start"
DOT, SCALED_DOT, RAGGED_DOT, CONVOLUTION = "dot", "scaled-dot", "ragged-dot", "convolution"
ALL_GATHER, ALL_GATHER_START, ALL_REDUCE = "all-gather", "all-gather-start", "all-reduce"
ADD, SUBTRACT, MAXIMUM, REDUCE = "add", "subtract", "maximum", "reduce"
BITCAST, BROADCAST, CONCATENATE, IOTA, TRANSPOSE = "bitcast", "broadcast", "concatenate", "iota", "transpose"
COMPARE, SELECT, UPDATE, SCATTER = "compare", "select", "dynamic-update-slice", "scatter"
START, DONE = "-start", "-done"  # Suffixes of the instructions that begin and end an asynchronous operation.

NO_LAUNCH = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("domain", "add-dependency", "opt-barrier"),
}
"""Opcodes that neither run nor move anything."""

SLICES = {"dynamic-slice", "slice", "gather"}
"""Opcodes that read only the part of their first operand that they return."""

SENT_WHOLE = {"collective-permute", "collective-broadcast"}
"""Collectives in which a device passes on a whole array, not its share of the ring."""

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", *SENT_WHOLE}
"""Communication between devices."""

COPIES = {"copy", "bitcast", "convert", "reshape"}
"""Opcodes that return the same numbers in another memory, type or shape."""

_MOVES = {
    *COPIES,
    *("transpose", "slice", "pad", "dynamic-slice", "reduce-precision", "opt-barrier", "copy-start", "copy-done"),
    *("async-done", "all-to-all", "all-gather", "all-gather-start", "all-gather-done", "slice-start", "slice-done"),
    *("collective-permute", "collective-permute-start", "collective-permute-done"),
}

HANDED_ON = {
    **dict.fromkeys((*_MOVES, "bitcast-convert", "reverse", "xor"), 0),
    **dict.fromkeys(("clamp", "dynamic-update-slice"), 1),
}
"""For each opcode that passes on one operand's values, the index of that operand."""

SCALES = {"multiply", "divide"}
"""Opcodes that apply a scale."""

BOUNDS = {"minimum", "maximum", "clamp"}
SCALES_AND_BOUNDS = {*SCALES, "minimum", "maximum"}
"""Opcodes of two operands, one of which may be a scale or a bound for the other."""

ELEMENTWISE = {
    *_MOVES,
    *SCALES_AND_BOUNDS,
    *("add", "subtract", "negate", "abs", "sqrt", "rsqrt", "power", "select", "clamp", "sign", "concatenate"),
    *("all-reduce", "all-reduce-start", "all-reduce-done", "fusion-done", "call-done"),
    *("reduce-scatter", "reduce-scatter-start", "reduce-scatter-done"),
}
"""Opcodes whose results come element by element from an operand, or that only move elements."""


# --- Configurations of instructions -----------------------------------------------------------------------------------


COMPARISONS = {"LT": 0, "LE": 1, "GT": 0, "GE": -1}
"""For each direction of `compare`: how many iterations beyond the limit still run."""


# --- Custom calls -----------------------------------------------------------------------------------------------------


class Call(enum.Enum):
    """The kinds of custom calls, by what they do."""

    PRODUCT = "a matrix product"
    CONVOLUTION = "a convolution"
    ATTENTION = "the products of a fused attention"
    OTHER = "no product"
    OPAQUE = "it does not describe what it computes"
    UNKNOWN = "not in this list"


ONEDNN = "__onednn$matmul"
"""A call without dimension numbers, which multiplies the last two axes."""

CUDNN_IN_BLOCKS = "__cudnn$blockScaledDot"
"""A call without dimension numbers: operands have a batch axis, rows and the summed axis; their scales follow."""

LIBRARIES: Mapping[str, str] = {
    "__cublas$lt$matmul$f8": "cublasLt f8",
    "__cublas$lt$matmul$mx": "cublasLt mx",
    "__cublas$lt$matmul": "cublasLt",
    "__cublas$gemm": "cublas",
    CUDNN_IN_BLOCKS: "cuDNN block scaled",
    ONEDNN: "oneDNN",
}
"""The names of library products in reports."""

MOSAIC, MOSAIC_TPU = "mosaic_gpu", "tpu_custom_call"
"""Pallas kernels: for NVIDIA GPUs, Hopper and newer; and for TPUs."""

JOINED, ALLOCATED = "ConcatBitcast", "AllocateBuffer"
"""Calls for TPUs that run nothing: slices fetched one by one, as one array; and memory without contents."""
# cuDNN's gradients of a convolution, of (input, filter) to output: their attributes are the convolution's.
CONVOLUTION_FILTER_GRAD, CONVOLUTION_INPUT_GRAD = "__cudnn$convBackwardFilter", "__cudnn$convBackwardInput"

BLOCK_SCALED = {"__cublas$lt$matmul$mx", CUDNN_IN_BLOCKS}
"""Products whose operands come with a scale for each block."""

_CALLS: Mapping[Call, tuple[str, ...]] = {
    Call.PRODUCT: (*LIBRARIES, "__cublas$lt$groupedMatmul"),
    Call.CONVOLUTION: ("__cudnn$conv",),
    Call.ATTENTION: ("__cudnn$fmha",),
    Call.OPAQUE: (
        # Pallas, Triton and CUDA kernels.
        *("__gpu$xla.gpu.triton", "__gpu$xla.gpu.ptx", "triton_kernel_call", MOSAIC, MOSAIC_TPU),
        "__onednn$convolution",
    ),
    Call.OTHER: (
        # Sorts, norms, random numbers, decompositions, transforms.
        *("__cub$", "__gpu$TopK", "TopK", "ApproxTopK", "PartialReduce", "__cudnn$norm", "__onednn$layernorm"),
        *("__onednn$softmax", "cu_threefry2x32", "__cublas$triangularSolve", "lapack_", "cusolver_", "cublas_"),
        *("ducc_", "dynamic_ducc_"),
        # Placement of arrays, and Python callbacks on the host.
        *(ALLOCATED, "CreateBuffer", "Pin", "Unpin", "MoveTo", "annotate_device_", "Sharding", "SPMD"),
        *("LayoutConstraint", "SliceToDynamic", "PadToStatic", "X64", "AssumeGatherIndicesInBound"),
        *("GatherScatterIndicesBitpacked", JOINED, "xla_ffi_python_", "xla_ffi_partitioned_python_"),
        *("xla_python_", "xla_buffer_python_"),
    ),
}


# --- Fused attention --------------------------------------------------------------------------------------------------

CUDNN_ATTENTION = "cuDNN attention"
"""The name of cuDNN attention kernels in reports."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The size of the scores of a fused attention, which are not stored.

    Args:
        batch: The number of sequences times the number of query heads.
        queries: The number of query tokens.
        keys: The number of key tokens.
        is_causal: Whether a causal mask hides half of them, which are skipped.
        is_backward: Whether the call computes gradients.
    """

    batch: int
    queries: int
    keys: int
    is_causal: bool
    is_backward: bool


# --- Instructions -----------------------------------------------------------------------------------------------------

# The widths of element types that are not named after them.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type by XLA's name, and its sizes; or a tuple of shapes, whose `dtype` is `tuple`."""

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple["Shape", ...] = ()

    @property
    def bits(self) -> int:
        """The width of an element."""
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        width = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(width[1]) if width else 0

    @property
    def size(self) -> int:
        """The number of elements of an array."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Its size without padding; for a tuple, the sum of its parts."""
        if self.dtype == "tuple":
            return sum(part.bytes for part in self.elements)
        return -(-self.size * self.bits // 8)

    @property
    def arrays(self) -> tuple["Shape", ...]:
        """The arrays in a shape, with tuples flattened."""
        if self.dtype != "tuple":
            return (self,)
        return tuple(array for part in self.elements for array in part.arrays)

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Operands are names; those of a parameter or a constant are the text in its parentheses. Attributes are the text
    after each name. The root is the result of its computation.
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    is_root: bool = False

    def attribute(self, name: str) -> str:
        """The text of an attribute without quotes; empty if there is none."""
        text = self.attributes.get(name, "")
        return _unquoted(text) if text.startswith('"') else text

    def ints(self, name: str) -> tuple[int, ...]:
        """The integers in an attribute, such as `lhs_contracting_dims={1}`."""
        return tuple(map(int, re.findall(r"-?\d+", self.attributes.get(name, ""))))

    @functools.cached_property
    def op_name(self) -> str:
        """Where the instruction comes from: the stack of named scopes."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return _unquoted(f'"{match[1]}"') if match else ""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The backend's configuration; empty if there is none or it is not JSON."""
        text = self.attribute("backend_config")
        try:
            config = json.loads(text) if text else {}
        except json.JSONDecodeError:
            return {}
        return config if isinstance(config, dict) else {}

    def called(self, *names: str) -> tuple[str, ...]:
        """The computations that attributes name."""
        computations: list[str] = []
        for name in names:
            computations += re.findall(r"%?([\w.\-]+)", self.attributes.get(name, ""))
        return tuple(computations)

    @property
    def parameter_number(self) -> int:
        return int(self.operands[0])

    @property
    def begins(self) -> bool:
        """Whether it only starts an asynchronous operation that another one ends."""
        return self.opcode.endswith(START)

    @property
    def ends(self) -> bool:
        """Whether it only ends, or continues, an asynchronous operation."""
        return self.opcode.endswith((DONE, "-update"))

    @property
    def is_fusion(self) -> bool:
        """Whether the function that it calls runs as one launch."""
        return self.opcode in (FUSION, FUSION_START)

    @property
    def is_scaled_dot(self) -> bool:
        """Whether it is `jax.lax.scaled_dot` before optimization: a call of the function that defines it."""
        name = 'composite.name="xla.scaled_dot"'
        return self.opcode == "call" and name in self.attribute("frontend_attributes")

    @property
    def subprograms(self) -> tuple[str, ...]:
        """The functions that it runs as programs of several launches: bodies of loops, branches, calls.

        They do not include the condition of a loop, or the functions that `reduce` or `sort` apply to scalars.
        """
        opcode = self.opcode
        if opcode == "while":
            return self.called("body")
        if opcode == "conditional":
            return self.called("branch_computations", "true_computation", "false_computation")
        if opcode in ("call", CALL_START) and not self.is_scaled_dot:
            return self.called("to_apply", "calls")
        if self.begins and not self.is_fusion:
            return self.called("calls", "async_computation")
        return ()

    @property
    def known_trip_count(self) -> int | None:
        """How often a `while` runs, if XLA has determined it."""
        count = self.config.get("known_trip_count", {}).get("n")
        return None if count is None else int(count)

    @property
    def is_synchronous(self) -> bool:
        """Whether XLA runs an operation with separate start and end to completion before anything else."""
        return bool(self.config.get("collective_backend_config", {}).get("is_sync"))

    @property
    def is_windowed(self) -> bool:
        """Whether it passes on what XLA sends on its own, such as parts of an operand while others are multiplied."""
        is_generated = 'is_spmd_generated="true"' in self.attribute("frontend_attributes")
        return is_generated and self.opcode.removesuffix(START).removesuffix(DONE) in SENT_WHOLE

    @property
    def is_triton(self) -> bool:
        """Whether a fusion is compiled by Triton: XLA calls it `__triton_gemm` or `__triton_nested_gemm_fusion`."""
        return self.is_fusion and "triton" in self.config.get("fusion_backend_config", {}).get("kind", "")

    @property
    def dot_numbers(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
        """The batch axes of a library call's first operand, and the contracted axes of both; None if it names none.

        References:
            The messages `GemmBackendConfig` and `OneDnnMatMulConfig` in XLA.
        """
        for key in ("gemm_backend_config", "onednn_matmul_config", "cudnn_block_scaled_dot_backend_config"):
            numbers: dict[str, Any] | None = self.config.get(key, {}).get("dot_dimension_numbers")
            if numbers is not None:
                names = "lhs_batch_dimensions", "lhs_contracting_dimensions", "rhs_contracting_dimensions"
                first, second, third = (tuple(map(int, numbers.get(name, ()))) for name in names)
                return first, second, third
        return None

    @property
    def grouped_tile(self) -> tuple[int, int, int] | None:
        """Rows, columns and depth of the tiles of this package's grouped Pallas kernels; None for anything else."""
        if not self.custom_call_name.startswith((MOSAIC, MOSAIC_TPU)):
            return None
        # The name is in a GPU kernel's code, which survives where XLA divides programs, while scopes do not.
        names = map(tile_in_name, (self.name, self.op_name, *self.attributes.values()))
        return next(filter(None, names), None)

    @property
    def is_quantizing(self) -> bool:
        """Whether it is a Pallas kernel of this package that quantizes, which reads and writes its arrays once."""
        return bool(self.custom_call_name) and f"/{QUANTIZING}" in self.op_name

    @property
    def call_kind(self) -> Call:
        """The kind of a custom call, by the longest prefix of its name that is listed."""
        name = self.custom_call_name
        if self.grouped_tile is not None:
            return Call.PRODUCT
        if self.is_quantizing:
            return Call.OTHER
        by_prefix = {known: call for call, names in _CALLS.items() for known in names if name.startswith(known)}
        return by_prefix[max(by_prefix, key=len)] if by_prefix else Call.UNKNOWN

    @property
    def custom_call_name(self) -> str:
        """The name of what a custom call calls; empty for any other instruction."""
        return self.attribute("custom_call_target")

    @property
    def scores(self) -> Scores | None:
        """The scores of a call of cuDNN's attention; None if it does not say.

        References:
            The message `CudnnfMHABackendConfig` in XLA.
        """
        config: dict[str, Any] = self.config.get("cudnn_fmha_backend_config", {})
        dimensions = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
        if len(dimensions) != 4:
            return None
        batch, heads, queries, keys = map(int, dimensions)
        is_causal = "CAUSAL" in config.get("mask_type", "")
        return Scores(batch * heads, queries, keys, is_causal, "Backward" in self.custom_call_name)

    def devices_in_group(self, devices: int) -> int:
        """How many devices communicate with each other in a collective.

        Its `replica_groups` are all groups, such as `{{0,1},{2,3}}`; their number and size, such as `[2,2]<=[4]`; or
        the axes of a mesh over which they run, such as `mesh['a'=2,'b'=4] {'b'}`.

        Args:
            devices: The number of devices of the program.
        """
        text = self.attributes.get("replica_groups", "")
        if (counts := re.match(r"\[(\d+),(\d+)\]<=", text)) is not None:
            return int(counts[2])
        if text.startswith("mesh"):
            mesh, _, axes = text.rpartition("{")
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
            # A part of an axis is followed by its own size: `'a':(1)2`.
            return math.prod(int(part or sizes[name]) for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes))
        first = re.search(r"\{([\d,]+)\}", text)
        return devices if first is None else first[1].count(",") + 1


def _unquoted(text: str) -> str:
    """A string without its quotes and escapes."""
    return re.sub(r"\\(.)", r"\1", text[1:-1])
