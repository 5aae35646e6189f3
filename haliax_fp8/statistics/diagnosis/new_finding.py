"""How checks make findings of operands."""

from .finding import Finding, Problem, Remedy
from .operand import Operand


def new_finding(
    operand: Operand,
    problem: Problem,
    seen: str,
    threshold: str,
    source: str,
    advice: str,
    remedy: Remedy = Remedy.NONE,
) -> Finding:
    """A finding about an operand; the arguments are the fields of `Finding`."""
    place = operand.layer, operand.index, operand.name
    return Finding(*place, problem, seen, threshold, source, advice, remedy)
