"""The table of what devices send to each other."""

from ..verdict.collective import Collective
from ..verdict.program import Program
from .units import size


HEADS = ("collective", "of", "runs", "sent", "meanwhile")

# As wide as fits into 80 columns beside the others.
_MEANWHILE = 24


def lines(program: Program) -> list[tuple[str, ...]]:
    """Collectives that are alike in one line: what they do, what they send for what, how often, the bytes that a device
    sends in a step, and what runs meanwhile.

    Args:
        program: The step.
    """
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for found in program.collectives:
        groups.setdefault((_kind(found), _content(found), _meanwhile(found)), []).append(found)
    return [
        (kind, content, str(_runs(alike)), size(sum(c.wire * c.executions for c in alike)), meanwhile)
        for (kind, content, meanwhile), alike in groups.items()
    ]


def _kind(found: Collective) -> str:
    return found.kind if found.reduction in ("", "add") else f"{found.kind}, {found.reduction}"


def _content(found: Collective) -> str:
    dtypes = "+".join(dict.fromkeys(part.dtype for part in sorted(found.parts, key=lambda part: -part.wire)))
    if found.reduces_gradients:
        return f"{dtypes} gradients"
    return f"{dtypes} operands" if any(part.feeds_product for part in found.parts) else dtypes


def _meanwhile(found: Collective) -> str:
    if not found.is_asynchronous:
        return "nothing: it blocks"
    if not found.meanwhile:
        return "no product"
    first, more = found.meanwhile[0], len(found.meanwhile) - 1
    text = first if len(first) <= _MEANWHILE else f"…{first[1 - _MEANWHILE :]}"
    return f"{text} +{more}" if more else text


def _runs(alike: list[Collective]) -> int:
    return sum(found.executions for found in alike)
