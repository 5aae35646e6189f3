"""The products as they were written, before the compiler changed them.

XLA may drop a cast to FP8 as excess precision, and with it the only trace in the compiled program that FP8 was
requested. The program before optimization still has it.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from ..hlo.dimensions import Dimensions, dimensions
from ..hlo.origin import Origin, origin
from ..hlo.sites import Site, entry_sites, kernels
from ..hlo.text import parse_hlo


@dataclasses.dataclass(frozen=True)
class Written:
    """A product before optimization.

    Args:
        size: Its sizes and element types; on a mesh, those of all devices together.
        lhs: Where the first operand comes from.
        rhs: Where the second operand comes from.
    """

    size: Dimensions
    lhs: Origin
    rhs: Origin


@dataclasses.dataclass(frozen=True)
class WrittenProducts:
    """All products of a program before optimization.

    Args:
        by_scope: The products of each stack of named scopes.
    """

    by_scope: Mapping[str, tuple[Written, ...]]

    @staticmethod
    def of(text: str) -> "WrittenProducts":
        """Reads them.

        Args:
            text: What `lowered.as_text("hlo", debug_info=True)` returns.
        """
        found: dict[str, list[Written]] = {}
        for site in kernels(entry_sites(parse_hlo(text))):
            if (size := dimensions(site)) is not None:
                lhs, rhs = (origin(operand) for operand in site.operands[:2])
                found.setdefault(full_scope(site), []).append(Written(size, lhs, rhs))
        return WrittenProducts({scope: tuple(products) for scope, products in found.items()})

    def find(self, scope: str, size: Dimensions) -> Written | None:
        """The product that a compiled one was made from; None if it cannot be determined.

        Args:
            scope: Its stack of named scopes.
            size: Its sizes.
        """
        candidates = self.by_scope.get(scope, ())
        same = [written for written in candidates if written.size.same_as(size)]
        padded = [written for written in candidates if written.size.padded_to(16).same_as(size)]
        return next(iter(_agreeing(same) or _agreeing(padded) or _agreeing(candidates)), None)


def full_scope(site: Site) -> str:
    """An instruction's scopes after those of the calls that lead to it.

    Args:
        site: The instruction.
    """
    names, current = [site.instruction.op_name], site.caller
    while current is not None:
        if current.instruction.opcode == "call":
            names.append(current.instruction.op_name)
        current = current.caller
    return "/".join(name for name in reversed(names) if name)


def _agreeing(products: Iterable[Written]) -> list[Written]:
    """The products, if FP8 was requested for all of them alike."""
    products = list(products)
    kinds = {(p.lhs.quantized, p.rhs.quantized, p.lhs.rescaled, p.rhs.rescaled) for p in products}
    return products if len(kinds) == 1 else []
