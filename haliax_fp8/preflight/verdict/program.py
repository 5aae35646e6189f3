"""A compiled step: its products, its other launches, its memory, its collectives."""

import dataclasses
from collections.abc import Callable

from rich.text import Text

from ..._printing import Printable
from ...devices.roofline import Roofline
from ...devices.traffic import Traffic
from ..compile import Memory
from ..hlo.text import Shape
from .collective import Collective, fp8_share_of_gathers
from .product import Product, Verdict


@dataclasses.dataclass(frozen=True)
class OtherLaunches:
    """Launches that are not matrix products.

    Args:
        traffic: How many run in a step, and the bytes that they read and write; slices and in-place updates count only
            what they touch.
        small: How many of them move less than 1 MB, which takes less time than launching them.
    """

    traffic: Traffic
    small: int

    @property
    def count(self) -> int:
        """How many run in a step."""
        return self.traffic.launches

    @property
    def bytes(self) -> int:
        """The bytes that they read and write."""
        return self.traffic.bytes


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A launch that the program does not describe, such as a Pallas kernel: its FLOPs are not counted.

    Args:
        name: The custom call's name.
        operands: XLA's names for the operands' element types.
        executions: How often it runs in one step.
        scope: The stack of named scopes that it was traced in.
    """

    name: str
    operands: tuple[str, ...]
    executions: int
    scope: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds on one device, by the roofline: each launch takes the time of its FLOPs or its bytes, plus its overhead.

    Args:
        products: The time of matrix products.
        others: The time of all other launches.
        launching: The part of both that is spent on launching.
    """

    products: float
    others: float
    launching: float

    @property
    def total(self) -> float:
        """The time of all launches, one after the other."""
        return self.products + self.others

    @property
    def is_launch_bound(self) -> bool:
        """Whether launching takes more time than all the work."""
        return self.launching > self.total / 2


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Printable):
    """A compiled step. Print it for one line; a report of it shows every product.

    Args:
        products: Every matrix product, in the order in which they run.
        others: Launches that are not matrix products.
        collectives: Communication between devices.
        opaque: Launches that the program does not describe.
        elementwise: The layers whose products are not matrix products here: with one row or one column, XLA multiplies
            and adds elements. No figure counts them.
        memory: The memory that it needs.
        unknown_loops: How many loops have a length that XLA does not know; each counts as one iteration.
        branches: How many `cond`s there are; all their branches are counted.
        seconds: How long tracing and compiling took.
        text: The program, as XLA prints it.
    """

    products: tuple[Product, ...]
    others: OtherLaunches
    collectives: tuple[Collective, ...]
    opaque: tuple[Opaque, ...]
    elementwise: tuple[str, ...]
    memory: Memory
    unknown_loops: int
    branches: int
    seconds: float
    text: str

    def __rich__(self) -> Text:
        return Text(
            f"{len(self.products)} products, {self.fp8_share:.1%} of their FLOPs in FP8; {self.others.count} other "
            f"launches, {len(self.collectives)} collectives; {self.memory.peak:,} bytes at the peak"
        )

    @property
    def flops(self) -> int:
        """The FLOPs of all products in a step, on one device."""
        return sum(product.flops for product in self.products)

    def share(self, *verdicts: Verdict) -> float:
        """The share of the FLOPs with one of the verdicts; 0 if there are none.

        Args:
            *verdicts: Such as `Verdict.FP8`.
        """
        return self._share(lambda product: product.verdict in verdicts)

    def words(self, *verdicts: Verdict) -> str:
        """The share of the FLOPs with one of the verdicts, and how much of them is in FP4, if any is.

        Args:
            *verdicts: Such as `Verdict.FP8`.
        """
        share, four = self.share(*verdicts), self._share(lambda p: p.is_fp4 and p.verdict in verdicts)
        eight = [f"{share - four:.1%} of the FLOPs in FP8"] if share > four or not four else []
        return " and ".join([*eight, *([f"{four:.1%} {'' if eight else 'of the FLOPs '}in FP4"] if four else [])])

    def _share(self, counts: Callable[[Product], bool]) -> float:
        return sum(p.flops for p in self.products if counts(p)) / (self.flops or 1)

    @property
    def fp8_share(self) -> float:
        """The share of the FLOPs that run in FP8, or narrower."""
        return self.share(Verdict.FP8)

    @property
    def fp8_gathers(self) -> float | None:
        """The share of bytes gathered for operands of products that are in FP8; None if none are gathered."""
        return fp8_share_of_gathers(self.collectives)

    @property
    def useful_flops(self) -> int:
        """The FLOPs that the model requested; XLA computes grouped products for all groups of every row."""
        return sum(product.useful_flops for product in self.products)

    @property
    def without_fp8(self) -> tuple[Product, ...]:
        """The products that do not run in FP8, the largest first."""
        return tuple(sorted((p for p in self.products if not p.is_fp8), key=lambda p: -p.flops))

    def estimate(self, roofline: Roofline) -> Estimate:
        """The roofline estimate.

        Args:
            roofline: How fast the device is.
        """
        runs = sum(product.executions for product in self.products)
        return Estimate(
            products=sum(_seconds(product, roofline) for product in self.products),
            others=roofline.others(self.others.traffic),
            launching=roofline.launching(runs + self.others.count),
        )


def _seconds(product: Product, roofline: Roofline) -> float:
    """Seconds at the rate of the wider operand; without FP8 units, FP8 operands are multiplied as bfloat16."""
    wider = product.widened or max((product.lhs, product.rhs), key=lambda dtype: Shape(dtype).bits)
    dtype = "bf16" if Shape(wider).bits <= 8 and not product.is_fp8 else wider
    moved = product.executions * product.bytes
    if product.in_attention:
        return roofline.attention(dtype, product.flops, moved, product.executions)
    return roofline.products(dtype, product.flops, moved, product.executions, in_blocks=product.block_scaled)
