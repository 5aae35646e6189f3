"""What launches other than products read and write, in kinds that reach different shares of a device's bandwidth."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traffic:
    """How many launches there are, and the bytes that they read and write.

    Args:
        launches: The number of launches.
        plain: The bytes of launches that neither read nor write FP8.
        casts: The bytes of those that read or write FP8: casts, with their amaxes, and transpositions.
        two_layouts: The bytes of those that write FP8 data in two layouts at once.
        blocks: The bytes of those that quantize in blocks.

    Example:
        >>> (Traffic(1, casts=3) + Traffic(2, plain=4)).bytes
        7
    """

    launches: int = 0
    plain: int = 0
    casts: int = 0
    two_layouts: int = 0
    blocks: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(a + b for a, b in both))

    def __mul__(self, count: int) -> "Traffic":
        return Traffic(*(count * number for number in dataclasses.astuple(self)))

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        return self.plain + self.casts + self.two_layouts + self.blocks
