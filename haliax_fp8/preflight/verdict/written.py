"""The products as written, before the compiler changed them.

XLA may drop a cast to FP8 as excess precision, and with it the only trace in the compiled program that FP8 was
requested. The program before optimization still has it.
"""

import dataclasses
from collections.abc import Mapping

from ..hlo.dimensions import Dimensions, dimensions
from ..hlo.origin import Origin, origin
from ..hlo.scopes import asks_for_fp8, rotates
from ..hlo.sites import Site, entry_sites, launches
from ..hlo.text import parse_hlo


@dataclasses.dataclass(frozen=True)
class Written:
    """A product before optimization (on a mesh, the product of all devices together), and its operands' origins."""

    size: Dimensions
    lhs: Origin
    rhs: Origin


def written_products(text: str) -> dict[str, list[Written]]:
    """The products in the text of `lowered.as_text("hlo", debug_info=True)`, by their stack of named scopes."""
    found: dict[str, list[Written]] = {}
    for site in launches(entry_sites(parse_hlo(text))):
        if (size := dimensions(site)) is not None:
            lhs, rhs = (origin(operand) for operand in site.operands[:2])
            found.setdefault(_full_scope(site), []).append(Written(size, lhs, rhs))
    return found


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


def made_from(candidates: list[Written], size: Dimensions) -> Written | None:
    """The product of the same scope that a compiled one was made from; None if it cannot be determined."""
    same = [written for written in candidates if written.size.same_as(size)]
    padded = [written for written in candidates if written.size.padded_to(16).same_as(size)]
    return next(iter(_agreeing(same) or _agreeing(padded) or _agreeing(candidates)), None)


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
