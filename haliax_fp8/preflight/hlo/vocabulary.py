"""XLA's words: every opcode, attribute, custom call and configuration key that means something to the preflight.

The exceptions are HLO's own grammar: `parameter`, `while`, element types, and the axes of products (`dimensions.py`).
If XLA renames something, change it here. If it adds something, that shows up by name: an unlisted custom call is
reported as opaque, and fails the tests that compile programs.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Mapping
from typing import Any

from ..._numerics.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from ..._product.names import tile_in_name
from .text import Instruction, Module


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


def begins(opcode: str) -> bool:
    """Whether an instruction only starts an asynchronous operation that another one ends."""
    return opcode.endswith(START)


def ends(opcode: str) -> bool:
    """Whether an instruction only ends, or continues, an asynchronous operation."""
    return opcode.endswith((DONE, "-update"))


def is_fusion(instruction: Instruction) -> bool:
    """Whether the function that an instruction calls runs as one launch."""
    return instruction.opcode in (FUSION, FUSION_START)


def is_scaled_dot(instruction: Instruction) -> bool:
    """Whether an instruction is `jax.lax.scaled_dot` before optimization: a call of the function that defines it."""
    name = 'composite.name="xla.scaled_dot"'
    return instruction.opcode == "call" and name in instruction.attribute("frontend_attributes")


def subprograms(instruction: Instruction) -> tuple[str, ...]:
    """The functions that an instruction runs as programs of several launches: bodies of loops, branches, calls.

    They do not include the condition of a loop, or the functions that `reduce` or `sort` apply to scalars.
    """
    opcode = instruction.opcode
    if opcode == "while":
        return instruction.called("body")
    if opcode == "conditional":
        return instruction.called("branch_computations", "true_computation", "false_computation")
    if opcode in ("call", CALL_START) and not is_scaled_dot(instruction):
        return instruction.called("to_apply", "calls")
    if begins(opcode) and not is_fusion(instruction):
        return instruction.called("calls", "async_computation")
    return ()


STABLEHLO_FP8_PRODUCT = re.compile(r"stablehlo\.dot\w* .*: \(tensor<[\dx?]*f8E\w+>, tensor<[\dx?]*f8E\w+>\) ->")
"""For example `stablehlo.dot_general %0, %1, ... : (tensor<2x3xf8E4M3FN>, tensor<3x4xf8E5M2>) -> tensor<2x4xf32>`."""

TPU_LAYOUT = re.compile(r"\{[\d,]*:T\(\d")
"""For example `f32[512,512]{1,0:T(8,128)}`: arrays are in tiles on TPUs alone, and only once a program is compiled."""


# --- Configurations of instructions -----------------------------------------------------------------------------------


def known_trip_count(loop: Instruction) -> int | None:
    """How often a `while` runs, if XLA has determined it."""
    count = loop.config.get("known_trip_count", {}).get("n")
    return None if count is None else int(count)


def devices_in_group(collective: Instruction, devices: int) -> int:
    """How many devices communicate with each other.

    Args:
        collective: An instruction with `replica_groups`: all groups, such as `{{0,1},{2,3}}`; their number and size,
            such as `[2,2]<=[4]`; or the axes of a mesh over which they run, such as `mesh['a'=2,'b'=4] {'b'}`.
        devices: The number of devices of the program.
    """
    text = collective.attributes.get("replica_groups", "")
    if (counts := re.match(r"\[(\d+),(\d+)\]<=", text)) is not None:
        return int(counts[2])
    if text.startswith("mesh"):
        mesh, _, axes = text.rpartition("{")
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        # A part of an axis is followed by its own size: `'a':(1)2`.
        return math.prod(int(part or sizes[name]) for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes))
    first = re.search(r"\{([\d,]+)\}", text)
    return devices if first is None else first[1].count(",") + 1


def is_synchronous(collective: Instruction) -> bool:
    """Whether XLA runs an operation with separate start and end to completion before anything else."""
    return bool(collective.config.get("collective_backend_config", {}).get("is_sync"))


def is_windowed(instruction: Instruction) -> bool:
    """Whether it passes on what XLA sends on its own, such as parts of an operand while others are multiplied."""
    is_generated = 'is_spmd_generated="true"' in instruction.attribute("frontend_attributes")
    return is_generated and instruction.opcode.removesuffix(START).removesuffix(DONE) in SENT_WHOLE


def reduction_of(module: Module, collective: Instruction) -> str:
    """The opcode with which a collective combines values; empty if it does not."""
    names = collective.called("to_apply")
    return module[names[0]].root.opcode if names else ""


COMPARISONS = {"LT": 0, "LE": 1, "GT": 0, "GE": -1}
"""For each direction of `compare`: how many iterations beyond the limit still run."""


def is_triton(instruction: Instruction) -> bool:
    """Whether a fusion is compiled by Triton: XLA calls it `__triton_gemm` or `__triton_nested_gemm_fusion`."""
    return is_fusion(instruction) and "triton" in instruction.config.get("fusion_backend_config", {}).get("kind", "")


def dot_numbers(call: Instruction) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """The batch axes of a library call's first operand, and the contracted axes of both; None if it names none.

    References:
        The messages `GemmBackendConfig` and `OneDnnMatMulConfig` in XLA.
    """
    for key in ("gemm_backend_config", "onednn_matmul_config", "cudnn_block_scaled_dot_backend_config"):
        numbers: dict[str, Any] | None = call.config.get(key, {}).get("dot_dimension_numbers")
        if numbers is not None:
            names = "lhs_batch_dimensions", "lhs_contracting_dimensions", "rhs_contracting_dimensions"
            first, second, third = (tuple(map(int, numbers.get(name, ()))) for name in names)
            return first, second, third
    return None


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


def grouped_tile(instruction: Instruction) -> tuple[int, int, int] | None:
    """Rows, columns and depth of the tiles of this package's grouped Pallas kernels; None for anything else."""
    if not custom_call_name(instruction).startswith((MOSAIC, MOSAIC_TPU)):
        return None
    # The name is in a GPU kernel's code, which survives where XLA divides programs, while scopes do not.
    names = map(tile_in_name, (instruction.name, instruction.op_name, *instruction.attributes.values()))
    return next(filter(None, names), None)


def call_of(instruction: Instruction) -> Call:
    """The kind of a custom call, by the longest prefix of its name that is listed."""
    name = custom_call_name(instruction)
    if grouped_tile(instruction) is not None:
        return Call.PRODUCT
    found = {known: call for call, names in _CALLS.items() for known in names if name.startswith(known)}
    return found[max(found, key=len)] if found else Call.UNKNOWN


def custom_call_name(instruction: Instruction) -> str:
    """The name of what a custom call calls; empty for any other instruction."""
    return instruction.attribute("custom_call_target")


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


def scores_of(call: Instruction) -> Scores | None:
    """The scores of a call of cuDNN's attention; None if it does not say.

    References:
        The message `CudnnfMHABackendConfig` in XLA.
    """
    config: dict[str, Any] = call.config.get("cudnn_fmha_backend_config", {})
    dimensions = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    if len(dimensions) != 4:
        return None
    batch, heads, queries, keys = map(int, dimensions)
    is_causal = "CAUSAL" in config.get("mask_type", "")
    return Scores(batch * heads, queries, keys, is_causal, "Backward" in custom_call_name(call))
