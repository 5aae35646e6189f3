"""Why a product does not run in FP8."""

import dataclasses
from collections.abc import Mapping

from ._dimensions import Dimensions
from ._origin import Origin
from ._product import Verdict
from ._source import asks_for_fp8
from ._target import Target


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that is known of a product when it is judged.

    Args:
        size: Its sizes and element types.
        scope: The stack of named scopes.
        layer: The layer's path; empty if none is known.
        lhs: Where the first operand comes from.
        rhs: Where the second operand comes from.
    """

    size: Dimensions
    scope: str
    layer: str
    lhs: Origin
    rhs: Origin

    @property
    def dtypes(self) -> tuple[str, str]:
        """The element types of the operands."""
        return self.size.lhs.dtype, self.size.rhs.dtype

    @property
    def origins(self) -> tuple[Origin, Origin]:
        """Of both operands."""
        return self.lhs, self.rhs


def judge(evidence: Evidence, target: Target, known: Mapping[str, str]) -> tuple[Verdict, str]:
    """What became of a product, and why it is not in FP8.

    Args:
        evidence: What is known of it.
        target: What it was compiled for.
        known: Reasons by layer, from `describe`.

    Returns:
        The verdict, and the reason; empty for a product in FP8.
    """
    narrow = [dtype for dtype in evidence.dtypes if dtype.startswith(("f8", "f4"))]
    if len(narrow) == 2:
        lacking = [reason for dtype in narrow if (reason := target.lacks(dtype)) is not None]
        return (Verdict.EMULATED, lacking[0]) if lacking else (Verdict.FP8, "")
    quantized = [origin.quantized for origin in evidence.origins if origin.quantized]
    if len(quantized) == 2:
        return Verdict.EMULATED, _why_emulated(evidence, quantized, target)
    return Verdict.HIGH_PRECISION, _why_high_precision(evidence, known)


def _why_emulated(evidence: Evidence, quantized: list[str], target: Target) -> str:
    for dtype in quantized:
        if (reason := target.lacks(dtype)) is not None:
            return reason
    if sizes := _indivisible(evidence.size):
        return f"{sizes}, and FP8 products need multiples of 16"
    wide = evidence.size.lhs.dtype
    if any(origin.rescaled for origin in evidence.origins):
        if asks_for_fp8(evidence.scope):
            return f"emulated block scaling: operands are dequantized to {wide}, as XLA has no product with such scales"
        return f"quantize-dequantize: operands are rounded to FP8 and multiplied in {wide}"
    return f"XLA widened the FP8 operands to {wide}"


def _indivisible(size: Dimensions) -> str:
    """The dimensions that tensor cores cannot take."""
    wrong = [f"{name}={value}" for name, value in (("m", size.m), ("n", size.n), ("k", size.k)) if value % 16]
    return f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not divisible by 16" if wrong else ""


def _why_high_precision(evidence: Evidence, known: Mapping[str, str]) -> str:
    for layer, reason in known.items():
        if evidence.layer == layer or evidence.layer.endswith(f".{layer}"):
            return reason
    if asks_for_fp8(evidence.scope):
        return "the recipe keeps this product in high precision"
    if evidence.size.batch > 1 and not any(origin.argument for origin in evidence.origins):
        return "a batched product of activations, as in attention"
    if set(evidence.dtypes) == {"f32"}:
        return "not converted, and in float32: its layer computes in float32"
    return "not converted"
