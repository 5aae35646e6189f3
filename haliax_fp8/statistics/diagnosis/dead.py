"""Checks for what does not learn: experts without rows, and layers without input or gradient."""

from collections.abc import Iterable

from .finding import Finding, Problem
from .new_finding import new_finding
from .operand import Operand
from .thresholds import Thresholds


_NEARLY_ALL = 0.99


def experts_without_rows(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Experts that the router sends nothing, by number; of experts that share a state, how many."""
    del thresholds
    idle = _idle(all)
    for operand in all:
        if operand.name != "input":
            continue
        layer = operand.layer_of_experts
        if (operand.layer, operand.index) in idle:
            yield new_finding(
                operand,
                Problem.NO_ROWS,
                seen=f"expert {operand.index[-1]} of {layer} received no rows",
                threshold="any row",
                source="an expert without rows does not learn",
                advice="balance the router: an auxiliary loss, a bias for each expert, or noise",
            )
        elif operand.is_reached and operand["active"] < 1.0:
            yield new_finding(
                operand,
                Problem.NO_ROWS,
                seen=f"{1.0 - operand['active']:.1%} of the experts of {layer} received no rows",
                threshold="a row for each expert",
                source="an expert without rows does not learn",
                advice="balance the router: an auxiliary loss, a bias for each expert, or noise. Experts that share "
                "their scales are not told apart; after Fp8Config(scale_per_expert=True) this names them",
            )


def dead(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Layers that nothing goes into, or that get no gradient.

    Two kinds are left out: layers in one module with a kernel of zeros, as in LoRA, and layers whose gradient was
    flushed to zero on its way.
    """
    del thresholds
    flushed = any(o.name == "output_grad" and o["underflow"] > _NEARLY_ALL for o in all)
    parents = {_parent(o.layer) for o in all if o.name == "kernel" and o["amax"] == 0.0}
    idle, reported = _idle(all), set()
    for operand in all:
        key = operand.layer, operand.index
        # Of a layer of experts that the loss does not reach, one finding says it.
        layer = operand.layer, operand.index[:-1] if operand.numbers_experts and not operand.is_reached else key[1]
        if operand.name == "kernel" or _parent(operand.layer) in parents or key in idle or layer in reported:
            continue
        if operand.is_reached and (operand["amax"] > 0.0 or (flushed and operand.name == "output_grad")):
            continue
        what = "is zero everywhere" if operand.is_reached else "is not reached by the loss"
        reported |= {key, layer}
        yield new_finding(
            operand,
            Problem.DEAD,
            seen=f"the {operand.name.replace('_', ' ')} {what}",
            threshold="any element that is not zero",
            source="a layer without input or gradient does not learn",
            advice="if the layer is an expert, it got no rows: balance the router. Otherwise look for activations that "
            "are zero for every input, a mask, a stopped gradient, or a layer that the model does not call",
        )


def _idle(all: list[Operand]) -> set[tuple[str, tuple[int, ...]]]:
    """Experts with a state each that the loss does not reach, in layers that it does reach."""
    inputs = [o for o in all if o.name == "input" and o.numbers_experts]
    reached = {(o.layer, o.index[:-1]) for o in inputs if o.is_reached}
    return {(o.layer, o.index) for o in inputs if not o.is_reached and (o.layer, o.index[:-1]) in reached}


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
