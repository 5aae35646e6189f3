"""What a conversion left in high precision, and why: kept by the ops that it made, for `describe`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final

from .ops import all_ops


@final
@dataclasses.dataclass(frozen=True, eq=False)
class LeftOut:
    """The layers that a conversion left alone.

    Equal to any other: models that differ in nothing else are the same program to JAX, and fit together in a tree map.

    Args:
        reasons: Why each stays in high precision, by its path.
    """

    reasons: Mapping[str, str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeftOut)

    def __hash__(self) -> int:
        return hash(LeftOut)

    def __repr__(self) -> str:
        """Short: it stands in printed tree structures."""
        return f"LeftOut({len(self.reasons)})"


def reasons_in(model: Any) -> dict[str, str]:
    """Why layers of a model stay in high precision, by path, as far as its conversions said.

    Args:
        model: A converted model, or any other tree.
    """
    found = {id(op.left_out): op.left_out for op in all_ops(model) if isinstance(op.left_out, LeftOut)}
    return {path: reason for left_out in found.values() for path, reason in left_out.reasons.items()}
