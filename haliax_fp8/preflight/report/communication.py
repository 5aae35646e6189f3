"""The table of what devices send to each other."""

from ..hlo.vocabulary import MAXIMUM
from ..verdict.collective import Collective, Part
from ..verdict.program import Program
from .units import size


HEADS = ("collective", "of", "runs", "sent", "meanwhile")


def lines(program: Program) -> list[tuple[str, ...]]:
    """Collectives, similar ones in one line of at most 80 columns. A line says what they do, what they send and how
    often, the bytes of it that a device sends in a step, and how many products run meanwhile. One that sends arrays of
    several kinds has a line for each.

    Args:
        program: The step.
    """
    groups: dict[tuple[str, str], list[Collective]] = {}
    sent: dict[tuple[str, str], float] = {}
    for found in program.collectives:
        keys = [(_kind(found), _content(found, part)) for part in found.parts]
        for key in dict.fromkeys(keys):
            groups.setdefault(key, []).append(found)
        for key, part in zip(keys, found.parts, strict=True):
            sent[key] = sent.get(key, 0.0) + part.wire * found.executions
    return [
        (*key, str(sum(found.executions for found in alike)), size(sent[key]), _meanwhile(alike))
        for key, alike in groups.items()
    ]


def _kind(found: Collective) -> str:
    return f"{found.kind} (max)" if found.reduction == MAXIMUM else found.kind


def _content(found: Collective, part: Part) -> str:
    if found.reduces_gradients:
        return f"{part.dtype} gradients"
    return f"{part.dtype} operands" if part.feeds_product else part.dtype


def _meanwhile(alike: list[Collective]) -> str:
    if not any(found.is_asynchronous for found in alike):
        return "nothing"
    least, most = (choose(len(found.meanwhile) for found in alike) for choose in (min, max))
    if least < most:
        return f"{least} to {most} products"
    return "1 product" if most == 1 else f"{most or 'no'} products"
