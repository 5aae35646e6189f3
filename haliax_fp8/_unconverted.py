"""What a conversion left in high precision, and why: kept by the ops that it made, for `describe`."""

import dataclasses
from collections.abc import Mapping
from typing import final


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
