"""The size of a matrix product, read from the attributes of its instruction."""

import dataclasses
import math
import re

from .instruction import (
    BLOCK_SCALED,
    CONVOLUTION,
    CONVOLUTION_FILTER_GRAD,
    CONVOLUTION_INPUT_GRAD,
    CUDNN_IN_BLOCKS,
    CUSTOM_CALL,
    DOT,
    MOSAIC_TPU,
    ONEDNN,
    RAGGED_DOT,
    SCALED_DOT,
    Call,
    Shape,
)
from .program import Site


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """`batch` products of an `m × k` and a `k × n` matrix, and the shapes of operands and result.

    Block-scaled operands come with a scale for each block. In a grouped product each row uses one of the groups, and
    the sizes are those of a single group. A grouped GPU or TPU kernel computes `surplus` times that work.
    """

    batch: int
    m: int
    n: int
    k: int
    lhs: Shape
    rhs: Shape
    out: Shape
    block_scaled: bool = False
    groups: int = 1
    surplus: float = 1.0

    def same_as(self, other: "Dimensions") -> bool:
        """Whether another product, or its transpose, has the same sizes."""
        return (self.batch, self.k, {self.m, self.n}) == (other.batch, other.k, {other.m, other.n})

    def padded_to(self, multiple: int) -> "Dimensions":
        """The dimensions with `m`, `n` and `k` rounded up to a multiple."""
        m, n, k = (-(-size // multiple) * multiple for size in (self.m, self.n, self.k))
        return dataclasses.replace(self, m=m, n=n, k=k)

    def as_written(self, written: "Dimensions") -> "Dimensions":
        """The product's sizes as written, if these equal them padded to multiples of 16, or are those of a sum that XLA
        split into parts and added up afterwards."""
        if self.batch > written.batch and self.batch * self.k == written.batch * written.k:
            whole = dataclasses.replace(self, batch=written.batch, k=written.k)
            return whole if whole.same_as(written) else self
        padded = written.padded_to(16)
        if not padded.same_as(self):
            return self
        m, n = (written.m, written.n) if padded.m == self.m else (written.n, written.m)
        return dataclasses.replace(self, m=m, n=n, k=written.k)


def dimensions(site: Site) -> Dimensions | None:
    """The size of an instruction's matrix product; None if it is not one.

    References:
        HLO's `dot`, `scaled-dot`, `ragged-dot` and `convolution`: https://openxla.org/xla/operation_semantics
    """
    instruction = site.instruction
    if instruction.opcode in (DOT, SCALED_DOT):
        contract = instruction.ints("lhs_contracting_dims")
        size = _of_dot(site, instruction.ints("lhs_batch_dims"), contract, instruction.ints("rhs_contracting_dims"))
        return dataclasses.replace(size, block_scaled=instruction.opcode == SCALED_DOT)
    if instruction.is_scaled_dot:
        return _of_composite(site)
    if instruction.opcode == RAGGED_DOT:
        return _of_ragged_dot(site)
    if instruction.opcode == CONVOLUTION:
        return _of_convolution(site)
    if instruction.opcode == CUSTOM_CALL:
        return _of_custom_call(site)
    return None


def _of_dot(
    site: Site, lhs_batch: tuple[int, ...], lhs_contract: tuple[int, ...], rhs_contract: tuple[int, ...]
) -> Dimensions:
    lhs, rhs = (operand.instruction.shape for operand in site.operands[:2])
    batch = math.prod(lhs.dims[axis] for axis in lhs_batch)
    k = math.prod(lhs.dims[axis] for axis in lhs_contract)
    if k != math.prod(rhs.dims[axis] for axis in rhs_contract):
        raise ValueError(f"{site.instruction.name} contracts axes of different sizes: {lhs} and {rhs}")
    # An empty product has no FLOPs; its sizes do not matter.
    m, n = lhs.size // (batch * k or 1), rhs.size // (batch * k or 1)
    return Dimensions(batch, m, n, k, lhs, rhs, _result(site))


def _result(site: Site) -> Shape:
    # Library calls return their workspace too.
    return site.instruction.shape.arrays[0]


def _of_composite(site: Site) -> Dimensions:
    """Reads a call with `dimension_numbers = [[[2], [2]], [[0], [0]]]`: contracted axes, then batch axes."""
    text = site.instruction.attribute("frontend_attributes")
    match = re.search(r"dimension_numbers = \[\[\[([\d, ]*)\], \[([\d, ]*)\]\], \[\[([\d, ]*)\]", text)
    if match is None:
        raise ValueError(f"{site.instruction.name} is a scaled dot without dimension numbers: {text}")
    lhs_contract, rhs_contract, lhs_batch = (tuple(map(int, re.findall(r"\d+", group))) for group in match.groups())
    return dataclasses.replace(_of_dot(site, lhs_batch, lhs_contract, rhs_contract), block_scaled=True)


def _of_ragged_dot(site: Site) -> Dimensions:
    """Each row is multiplied by the kernel of one group; or, if rows are contracted, summed into one group."""
    lhs, rhs = (operand.instruction.shape for operand in site.operands[:2])
    instruction = site.instruction
    batch = math.prod(lhs.dims[axis] for axis in instruction.ints("lhs_batch_dims"))
    k = math.prod(lhs.dims[axis] for axis in instruction.ints("lhs_contracting_dims"))
    kernels = math.prod(rhs.dims[axis] for axis in instruction.ints("rhs_group_dims"))
    m, n = lhs.size // (batch * k), rhs.size // (batch * k * kernels)
    # The third operand holds the sizes of the groups.
    groups = site.operands[2].instruction.shape.dims[-1]
    return Dimensions(batch, m, n, k, lhs, rhs, _result(site), groups=groups)


def _of_grouped_call(site: Site, tile: tuple[int, int, int]) -> Dimensions:
    """Rows times the kernel of their group, or sums over the rows of groups.

    The sizes of groups are known only on the device. On GPUs operands lie along the sum; the last tile of a group is
    half empty on average, and a sum over its rows starts and ends inside pieces shared with other groups. On TPUs,
    tiles of rows are aligned, and each boundary between groups falls inside a tile, which is then multiplied twice.
    """
    lhs, rhs = (operand.instruction.shape for operand in grouped_operands(site))
    out = _result(site)
    if site.instruction.custom_call_name == MOSAIC_TPU:
        if len(rhs.dims) == 3:
            m, k = lhs.dims
            return Dimensions(1, m, out.dims[1], k, lhs, rhs, out, surplus=1.0 + rhs.dims[0] * tile[0] / m)
        k, m = lhs.dims
        return Dimensions(1, m, rhs.dims[1], k, lhs, rhs, out, surplus=1.0 + out.dims[0] * tile[2] / k)
    (m, n), k = (lhs.dims[0], out.dims[1]), rhs.dims[1]
    if out.dims[0] == m:
        surplus = 1.0 + (rhs.dims[0] // n) * tile[0] / 2 / m
    else:
        surplus = 1.0 + (out.dims[0] // m) * tile[2] / k
    return Dimensions(1, m, n, k, lhs, rhs, out, surplus=surplus)


def grouped_operands(site: Site) -> tuple[Site, Site]:
    """The two operands of a call of grouped Pallas kernels, which also takes tables of its work."""
    first, second, *_ = (x for x in site.operands if len(x.instruction.shape.dims) > 1 and _is_floating(x))
    return first, second


def _is_floating(site: Site) -> bool:
    return "f" in site.instruction.shape.dtype


def _of_custom_call(site: Site) -> Dimensions | None:
    if (tile := site.instruction.grouped_tile) is not None:
        return _of_grouped_call(site, tile)
    match site.instruction.call_kind:
        case Call.CONVOLUTION:
            return _of_convolution(site)
        case Call.PRODUCT if (numbers := site.instruction.dot_numbers) is not None:
            is_block_scaled = site.instruction.custom_call_name in BLOCK_SCALED
            return dataclasses.replace(_of_dot(site, *numbers), block_scaled=is_block_scaled)
        case Call.PRODUCT if site.instruction.custom_call_name == CUDNN_IN_BLOCKS:
            # Scales are in blocks along the summed axis, which is the last one of both.
            last = len(site.operands[0].instruction.shape.dims) - 1
            return dataclasses.replace(_of_dot(site, tuple(range(last - 1)), (last,), (last,)), block_scaled=True)
        case Call.PRODUCT if site.instruction.custom_call_name == ONEDNN:
            lhs, rhs = (len(operand.instruction.shape.dims) for operand in site.operands[:2])
            return _of_dot(site, tuple(range(lhs - 2)), (lhs - 1,), (rhs - 2,))  # Over the last two axes.
    return None


def _of_convolution(site: Site) -> Dimensions:
    """A convolution's multiplications, without padding and holes: TPUs write batched products as convolutions.

    The first operand's batch is `m`, the kernel's output features are `n`. Output positions that read a whole window
    multiply `m`; a spatial axis along which each output position reads its own single element is a batch axis.
    """
    first, second = (operand.instruction.shape for operand in site.operands[:2])
    result = _result(site)
    name = site.instruction.custom_call_name
    if name == CONVOLUTION_FILTER_GRAD:
        size = _of_forward_convolution(site, first, result, second)
        m, n, k = size.k, size.n, size.m
    elif name == CONVOLUTION_INPUT_GRAD:
        size = _of_forward_convolution(site, result, second, first)
        m, n, k = size.m, size.k, size.n
    else:
        return _of_forward_convolution(site, first, second, result)
    return dataclasses.replace(size, m=m, n=n, k=k, lhs=first, rhs=second, out=result)


def _of_forward_convolution(site: Site, lhs: Shape, rhs: Shape, out: Shape) -> Dimensions:
    lhs_labels, rhs_labels, out_labels = re.split("_|->", site.instruction.attribute("dim_labels"))
    batch_groups = math.prod(site.instruction.ints("batch_group_count") or (1,))
    m = lhs.dims[lhs_labels.index("b")] // batch_groups
    n = rhs.dims[rhs_labels.index("o")]
    k = rhs.dims[rhs_labels.index("i")]  # For one group of features.
    batch = 1
    for axis, window in zip(sorted(set(lhs_labels) - set("bf?")), _windows(site), strict=True):
        positions = out.dims[out_labels.index(axis)]
        pairs = _pairs(window, lhs.dims[lhs_labels.index(axis)], positions)
        if pairs == positions == window["size"]:
            batch *= positions
        elif positions == 1 or pairs % positions:
            k *= pairs
        else:
            m, k = m * positions, k * (pairs // positions)
    return Dimensions(batch, m, n, k, lhs, rhs, out)


def _windows(site: Site) -> list[dict[str, int]]:
    """The properties of each spatial axis in a window such as `{size=3x3 stride=2x1 pad=0_0x1_1 lhs_dilate=1x2}`."""
    fields = (part.split("=") for part in site.instruction.attribute("window").strip("{}").split())
    columns = {name: [int(value.split("_")[0]) for value in values.split("x")] for name, values in fields}
    return [{name: values[axis] for name, values in columns.items()} for axis in range(len(columns.get("size", ())))]


def _pairs(window: dict[str, int], size: int, positions: int) -> int:
    """The number of pairs of an output position and an element of the window that meet an element of the input."""
    stride, dilation = window.get("stride", 1), window.get("rhs_dilate", 1)
    low, holes = window.get("pad", 0), window.get("lhs_dilate", 1)
    if stride == dilation == holes == window["size"] == 1 and low == 0:
        return min(size, positions)
    last = (size - 1) * holes
    starts = range(-low, positions * stride - low, stride)
    return sum(_multiples(start, dilation, window["size"], of=holes, last=last) for start in starts)


def _multiples(start: int, step: int, count: int, *, of: int, last: int) -> int:
    """How many of `start, start + step, ...`, `count` in all, are multiples of a number and lie from 0 to `last`."""
    common = math.gcd(step, of)
    if start % common:
        return 0
    first, end, period = max(0, -(start // step)), min(count - 1, (last - start) // step), of // common
    first += (-start // common * pow(step // common, -1, period) - first) % period
    return max(0, (end - first) // period + 1)
