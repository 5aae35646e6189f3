"""How a product runs, and why it does not run in FP8: judged by the program as compiled, and as written.

XLA may drop a cast to FP8 as excess precision, and with it the only trace in the compiled program that FP8 was
requested. The program before optimization still has it.
"""

import dataclasses
from collections.abc import Mapping

from ..devices import is_narrow
from ..devices.xla_flags import TRITON_PRODUCTS
from ..formats import E5M2
from ..scopes import FP4
from .devices import CompilableDevice
from .hlo import parse_hlo
from .instruction import FORMATS
from .product import Verdict
from .program import Site, entry_sites, launches
from .sizes import Dimensions, dimensions
from .trace import Entering, Origin, asks_for_fp8, origin, rotates


@dataclasses.dataclass(frozen=True)
class Written:
    """A product before optimization (on a mesh, the product of all devices together), and its operands' origins."""

    size: Dimensions
    lhs: Origin
    rhs: Origin


def written_products(text: str) -> dict[str, list[Written]]:
    """The products in the text of `lowered.as_text("hlo", debug_info=True)`, by their stack of named scopes."""
    by_scope: dict[str, list[Written]] = {}
    for site in launches(entry_sites(parse_hlo(text))):
        if (size := dimensions(site)) is not None:
            lhs, rhs = (origin(operand) for operand in site.operands[:2])
            by_scope.setdefault(_full_scope(site), []).append(Written(size, lhs, rhs))
    return by_scope


def candidates(written: Mapping[str, list[Written]], scope: str) -> list[Written]:
    """The written products that a compiled product of a scope may be made from.

    When XLA takes a block-scaled product apart, the parts get scopes inside that of the product.
    """
    if scope in written or not asks_for_fp8(scope) or rotates(scope):
        return written.get(scope, [])
    outer = scope
    while outer not in written and asks_for_fp8(outer):
        outer = outer.rpartition("/")[0]
    return [product for product in written.get(outer, []) if product.size.block_scaled]


def made_from(written: Mapping[str, list[Written]], scope: str, size: Dimensions) -> Written | None:
    """The product of the same scope that a compiled one was made from; None if it cannot be determined."""
    of_scope = candidates(written, scope)
    # XLA gives a product the scope of a transpose that it folds into it, which is beside that of the product.
    outer = scope.rpartition("/")[0]
    near = of_scope or [x for other in written if other.rpartition("/")[0] == outer for x in written[other]]
    same = [product for product in near if product.size.same_as(size)]
    padded = [product for product in near if product.size.padded_to(16).same_as(size)]
    return next(iter(_agreeing(same) or _agreeing(padded) or _agreeing(of_scope)), None)


def _full_scope(site: Site) -> str:
    """An instruction's scopes after those of the calls that lead to it."""
    names, current = [site.instruction.op_name], site.caller
    while current is not None:
        if current.instruction.opcode == "call":
            names.append(current.instruction.op_name)
        current = current.caller
    return "/".join(name for name in reversed(names) if name)


def _agreeing(products: list[Written]) -> list[Written]:
    """The products, if FP8 was requested for all of them alike."""
    kinds = {(p.lhs.quantized, p.rhs.quantized, p.lhs.rescaled, p.rhs.rescaled) for p in products}
    return products if len(kinds) == 1 else []


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything known about a product when it is judged: as compiled, and as written.

    For a product in a Triton kernel, `entering` describes the arrays from which it reads the operands, None where it
    computes an operand.
    """

    size: Dimensions
    scope: str
    layer: str
    lhs: Origin
    rhs: Origin
    written: Written | None = None
    entering: tuple[Entering | None, Entering | None] | None = None

    @property
    def multiplied(self) -> tuple[str, str]:
        """The element types that are multiplied."""
        return self.size.lhs.dtype, self.size.rhs.dtype

    @property
    def read(self) -> tuple[str, str]:
        """The element types that a Triton kernel reads if it widens two FP8 operands; else those multiplied."""
        if any(map(is_narrow, self.multiplied)) or self.entering is None or None in self.entering:
            return self.multiplied
        first, second = (entry for entry in self.entering if entry is not None)
        dtypes = first.dtype, second.dtype
        return dtypes if all(map(is_narrow, dtypes)) else self.multiplied

    @property
    def widened(self) -> str:
        """The element type to which the Triton kernel widens FP8 operands; empty if it multiplies them directly."""
        return self.size.lhs.dtype if self.read != self.multiplied else ""

    @property
    def is_fp4(self) -> bool:
        """Whether an operand is read in FP4, or was rounded to it."""
        return FP4 in self.scope.split("/") or any(dtype.startswith("f4") for dtype in self.read)

    @property
    def scaled_inside(self) -> bool:
        """Whether a Triton kernel that widens its operands multiplies them by block scales."""
        return bool(self.widened) and any(entry is not None and entry.in_blocks for entry in self.entering or ())

    @property
    def block_scaled(self) -> bool:
        """Whether operands come with a scale for each block, as compiled or as written."""
        return self.size.block_scaled or (self.written is not None and self.written.size.block_scaled)

    @property
    def origins(self) -> tuple[Origin, Origin]:
        """The origins of both operands; those before optimization, if known."""
        return (self.lhs, self.rhs) if self.written is None else (self.written.lhs, self.written.rhs)


def judge(evidence: Evidence, device: CompilableDevice, known: Mapping[str, str]) -> tuple[Verdict, str]:
    """How a product runs, and the reason if it is not in FP8, else an empty string. `known` has reasons by layer."""
    if all(map(is_narrow, evidence.read)) and not evidence.scaled_inside:
        reasons = [device.lacks(dtype) for dtype in evidence.read]
        if evidence.block_scaled:
            reasons.append(device.lacks_block_scaling())
        if evidence.widened and {FORMATS.get(dtype) for dtype in evidence.read} == {E5M2}:
            reasons.append(f"the product multiplies {evidence.widened}: cuBLASLt has no product of two E5M2 operands")
        lacking = [reason for reason in reasons if reason is not None]
        return (Verdict.EMULATED, lacking[0]) if lacking else (Verdict.FP8, "")
    quantized = [origin.quantized for origin in evidence.origins if origin.quantized]
    if len(quantized) == 2:
        return Verdict.EMULATED, _why_emulated(evidence, quantized, device)
    return Verdict.HIGH_PRECISION, _why_high_precision(evidence, quantized, known)


def _why_emulated(evidence: Evidence, quantized: list[str], device: CompilableDevice) -> str:
    wide = evidence.size.lhs.dtype
    # First the reasons that hold on every device.
    if evidence.written is not None and evidence.written.size.block_scaled:
        is_lost = device.hardware.platform == "cuda" and device.lacks_block_scaling() is None
        remedy = (
            f"; XLA takes lax.scaled_dot apart with {TRITON_PRODUCTS}=false, but not jax.nn.scaled_matmul"
            if is_lost
            else ""
        )
        return f"block scaling is emulated: the operands are dequantized and multiplied in {wide}{remedy}"
    if any(origin.rescaled for origin in evidence.origins) and not asks_for_fp8(evidence.scope):
        return f"quantize-dequantize: the operands are rounded to FP8, then multiplied in {wide}"
    if any(origin.in_blocks for origin in evidence.origins):
        return f"block scaling is emulated: the operands are dequantized and multiplied in {wide}"
    for dtype in quantized:
        if (reason := device.lacks(dtype)) is not None:
            return reason
    if sizes := indivisible(evidence.size):
        return f"{sizes}: FP8 products need multiples of 16"
    if evidence.entering is not None and None in evidence.entering:
        return f"the kernel computes an operand in {wide} from FP8 values: no FP8 product takes it"
    return f"the product reads {wide}: XLA widened the FP8 operands in other launches"


def indivisible(size: Dimensions) -> str:
    """The dimensions that FP8 tensor cores cannot take, such as `m=5, k=4095`; empty if there are none."""
    return indivisible_sizes(size.m, size.n, size.k)


def indivisible_sizes(m: int, n: int, k: int) -> str:
    """The same for three sizes."""
    return ", ".join(f"{name}={value}" for name, value in (("m", m), ("n", n), ("k", k)) if value % 16)


def _why_high_precision(evidence: Evidence, quantized: list[str], known: Mapping[str, str]) -> str:
    for layer, reason in known.items():
        if any(path == layer or path.endswith(f".{layer}") for path in evidence.layer.split(" + ")):
            return reason
    if quantized:
        return f"only one operand is {quantized[0]}"
    if rotates(evidence.scope):
        return "rotates an operand"
    if asks_for_fp8(evidence.scope):
        return "the recipe keeps this product in high precision"
    # The types as written, because on a CPU XLA widens bfloat16 too.
    size = evidence.size if evidence.written is None else evidence.written.size
    in_float32 = ", in float32" if "f32" in (size.lhs.dtype, size.rhs.dtype) else ""
    if evidence.size.batch > 1 and not evidence.layer and not any(origin.arguments for origin in evidence.origins):
        return f"a batched product of activations, as in attention{in_float32}"
    return f"not converted{in_float32}"
