"""The table of a model's statistics: its verdict first, what layers have in common said once."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from .._printing import common_prefix
from .thresholds import Thresholds


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose paths begin alike, one after the other.

    Args:
        prefix: What their paths begin with; empty for a layer alone.
        names: The rest of each path, by path.
    """

    prefix: str
    names: dict[str, str]


def groups(paths: Sequence[str]) -> list[Group]:
    """The groups of a table, in the order of the layers: those whose paths have at least their first segment alike."""
    groups = []
    for _, same in itertools.groupby(paths, lambda path: path.partition(".")[0]):
        members = list(same)
        prefix = common_prefix(members) if len(members) > 1 else ""
        groups.append(Group(prefix, {path: path.removeprefix(prefix).removeprefix(".") for path in members}))
    return groups


@dataclasses.dataclass(frozen=True)
class Worst:
    """What the verdict reads of an operand: the worst of a stack, NaN where the loss does not reach it.

    Args:
        saturation: The share of clipped elements.
        underflow: The share of elements flushed to zero.
        nonfinite: How many elements are infinite or NaN.
    """

    saturation: float
    underflow: float
    nonfinite: float


def verdict(operands: Iterable[Worst]) -> str:
    """What is worst, in a few words: the first line above the table."""
    all = list(operands)
    if not all:
        return "nothing was measured"
    reached = [x for x in all if not np.isnan(x.saturation)]
    if not reached:
        return f"the loss reaches none of {len(all)} operands"
    limits = Thresholds()
    clipped = [x.saturation for x in reached if x.saturation > limits.saturation]
    flushed = [x.underflow for x in reached if x.underflow > limits.underflow]
    bad = sum(x.nonfinite > 0 for x in reached)
    count, parts = f"of {len(reached)} operands", list[str]()
    if bad:
        parts.append(f"{bad} {count} {'holds' if bad == 1 else 'hold'} NaN or infinities")
    if clipped:
        verb = "saturates" if len(clipped) == 1 else "saturate"
        parts.append(
            f"{len(clipped)} {count} {verb} by more than {limits.saturation:.1%} (the worst {max(clipped):.1%})"
        )
    else:
        at_all = any(x.saturation > 0.0 for x in reached)
        parts.append("no operand saturates" + (f" by more than {limits.saturation:.1%}" if at_all else ""))
    if flushed:
        verb = "underflows" if len(flushed) == 1 else "underflow"
        of_all = "" if clipped or bad else f" {count}"
        parts.append(
            f"{len(flushed)}{of_all} {verb} by more than {limits.underflow:.0%} (the worst {max(flushed):.1%})"
        )
    else:
        parts.append(f"none underflows by more than {limits.underflow:.0%}")
    if len(reached) < len(all):
        parts.append(f"the loss does not reach {len(all) - len(reached)}")
    return "; ".join(parts)
