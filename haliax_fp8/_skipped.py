"""What an op keeps for `describe`: what its conversion left in high precision, and whether a loss called it."""

import dataclasses
from collections.abc import Mapping
from typing import final


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Skipped:
    """The layers that a conversion left alone, and whether the last loss called the layer of this op.

    Equal to any other: models that differ in nothing else are the same program to JAX, and fit together in a tree map.
    So a `jit` of a user's own returns, for every model, the reasons of the one that it was traced with. `TrainStep` and
    `calibrate` return those of the model that they take.

    Args:
        reasons: Why each stays in high precision, by its path.
        uncalled: Why the loss did not call the op; empty if it did, and None if that is not known.
    """

    reasons: Mapping[str, str]
    uncalled: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skipped)

    def __hash__(self) -> int:
        return hash(Skipped)

    def __repr__(self) -> str:
        """Short: it stands in printed tree structures."""
        return f"Skipped({len(self.reasons)})"
