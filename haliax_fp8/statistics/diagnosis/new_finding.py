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
    subject = operand.layer, operand.index, operand.name
    return Finding(*subject, problem, seen, threshold, source, advice, remedy)
