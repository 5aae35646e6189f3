"""The table of what devices send to each other."""

from ..verdict.collective import Collective, Part
from ..verdict.program import Program
from .units import size


HEADS = ("collective", "of", "runs", "sent", "meanwhile")


def lines(program: Program) -> list[tuple[str, ...]]:
    """Collectives that are alike in one line, at most 80 columns wide: what they do, what they send, how often, the
    bytes of it that a device sends in a step, and how many products run meanwhile. One that sends arrays of several
    kinds has a line for each.

    Args:
        program: The step.
    """
    runs: dict[tuple[str, str, str], int] = {}
    sent: dict[tuple[str, str, str], float] = {}
    for found in program.collectives:
        contents = [(_kind(found), _content(found, part), _meanwhile(found)) for part in found.parts]
        for key in dict.fromkeys(contents):
            runs[key] = runs.get(key, 0) + found.executions
        for key, part in zip(contents, found.parts, strict=True):
            sent[key] = sent.get(key, 0.0) + part.wire * found.executions
    return [(key[0], key[1], str(count), size(sent[key]), key[2]) for key, count in runs.items()]


def _kind(found: Collective) -> str:
    return {"": found.kind, "add": found.kind, "maximum": f"{found.kind} (max)"}.get(found.reduction, found.kind)


def _content(found: Collective, part: Part) -> str:
    if found.reduces_gradients:
        return f"{part.dtype} gradients"
    return f"{part.dtype} operands" if part.feeds_product else part.dtype


def _meanwhile(found: Collective) -> str:
    if not found.is_asynchronous:
        return "nothing"
    count = len(found.meanwhile)
    return f"{count or 'no'} product{'s' * (count != 1)}"
