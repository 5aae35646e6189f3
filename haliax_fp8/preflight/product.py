"""A compiled step: its products and how each runs, its other launches, its memory, its collectives."""

import dataclasses
import enum
from collections.abc import Container

from rich.text import Text

from .._printing import Printable
from ..devices import Traffic, is_narrow
from ..devices.roofline import Roofline
from .collectives import Collective, fp8_share_of_gathers
from .compile import Memory
from .instruction import Shape


TRITON = "Triton"
"""The prefix of the names of Triton kernels."""


class Verdict(enum.Enum):
    """How a product runs."""

    FP8 = "FP8"
    """Its launch reads both operands in FP8 (or narrower), and the device has units that multiply them."""

    EMULATED = "emulated"
    """Operands were rounded to FP8, then widened: the product runs in a wider format."""

    HIGH_PRECISION = "high precision"
    """FP8 was not requested."""


@dataclasses.dataclass(frozen=True, repr=False)
class Product(Printable):
    """A matrix product: `batch` products of an `m × k` and a `k × n` matrix.

    Args:
        layer: The path of the weight's layer in the arguments, such as `model.layers.0.up`; empty if there is none.
        name: `fprop`, `dgrad` or `wgrad`; `forward` or `backward` if the program does not say more.
        scope: The stack of named scopes that it was traced in.
        batch: See above.
        m: See above.
        n: See above.
        k: See above.
        lhs: XLA's name for the first operand's element type as the launch reads it, such as `f8e4m3fn`.
        rhs: The same for the second operand.
        widened: The element type to which a Triton kernel itself widens FP8 operands before it multiplies them; empty
            if they are multiplied directly.
        out: The element type of the result, as written to memory.
        compute: The element type of the weight where the model multiplies it, before quantization and after a cast to
            the compute dtype; empty if unknown.
        written: XLA's name for the operands' element type in the program before optimization; as compiled if that is
            unknown.
        block_scaled: Whether the operands come with a scale for each block.
        indivisible: The dimensions that are not a multiple of 16, such as `k=4095`; empty if there are none.
        implementation: What runs it, such as `cublasLt f8`.
        groups: The factor by which XLA exceeds the requested work if it multiplies every row by the kernels of all
            groups and keeps one result; 1 for other products.
        surplus: The factor by which a grouped GPU or TPU kernel exceeds the requested work because its last tiles are
            not full: an average over the sizes of groups, which are known only on the device.
        executions: How often it runs in one step, with loops unrolled.
        bytes: The bytes that one run reads and writes.
        verdict: How it runs.
        reason: Why it is not in FP8; empty if it is.
        in_attention: Whether it is one of the products of a fused attention.
        halved: Whether the launch skips the half of it that a causal mask hides.
        is_fp4: Whether an operand is in FP4, or was rounded to it.
        is_rotation: Whether it only rotates an operand of another product. Shares and counts leave it out.
        makes_weight: Whether it computes the gradient of a weight, as wgrad does.
    """

    layer: str
    name: str
    scope: str
    batch: int
    m: int
    n: int
    k: int
    lhs: str
    rhs: str
    widened: str
    out: str
    compute: str
    written: str
    block_scaled: bool
    indivisible: str
    implementation: str
    groups: int
    surplus: float
    executions: int
    bytes: int
    verdict: Verdict
    reason: str
    in_attention: bool = False
    halved: bool = False
    is_fp4: bool = False
    is_rotation: bool = False
    makes_weight: bool = False

    def __rich__(self) -> Text:
        """Where it is, what it multiplies, and how it runs."""
        where = self.layer or self.scope or "no layer"
        return Text(f"{where}, {self.name}, {self.how(self.executions)}, {self.outcome}", overflow="fold")

    def how(self, runs: int) -> str:
        """Its shape, its formats, what runs it, and how often.

        Args:
            runs: How often it and those like it run.
        """
        operands = self.lhs if self.lhs == self.rhs else f"{self.lhs}·{self.rhs}"
        times = "1 run" if runs == 1 else f"{runs} runs"
        return f"{self.shape}, {operands} to {self.out}, {self.implementation}, {times}"

    @property
    def outcome(self) -> str:
        """`FP8` or `FP4`; or the other verdict, with the reason."""
        return self.format if self.is_fp8 else f"{self.verdict.value}: {self.reason}"

    @property
    def flops(self) -> int:
        """The FLOPs of all runs in a step: two for each multiplication with its addition."""
        return round(self.surplus * self._flops)

    @property
    def _flops(self) -> int:
        return (1 if self.halved else 2) * self.batch * self.m * self.n * self.k * self.executions

    @property
    def useful_flops(self) -> int:
        """The FLOPs that the model requested."""
        return self._flops // self.groups

    @property
    def shape(self) -> str:
        """Such as `8192×4096·4096×14336`, preceded by the number of products if there are several."""
        matrices = f"{self.m}×{self.k}·{self.k}×{self.n}"
        return matrices if self.batch == 1 else f"{self.batch}× {matrices}"

    @property
    def is_fp8(self) -> bool:
        """Whether it runs in FP8, or in FP4."""
        return self.verdict is Verdict.FP8

    @property
    def multiplied(self) -> str:
        """XLA's name for the element type that is multiplied, the wider operand's. Without units for FP8, FP8 operands
        are multiplied as bfloat16."""
        wider = self.widened or max((self.lhs, self.rhs), key=lambda dtype: Shape(dtype).bits)
        return "bf16" if Shape(wider).bits <= 8 and not self.is_fp8 else wider

    @property
    def format(self) -> str:
        """The format of the units that it runs on: `FP4`, `FP8`, or XLA's name for a wider one, such as `bf16`."""
        if self.is_fp8:
            return "FP4" if Shape(self.multiplied).bits <= 4 else "FP8"
        # As written where it can be, because on a CPU XLA widens bfloat16 too.
        return self.multiplied if is_narrow(self.written) else self.written

    def format_among(self, verdicts: Container[Verdict]) -> str:
        """Its format; with a verdict among these, for an emulated product the one that its operands were rounded to.

        Args:
            verdicts: Such as those that count as FP8 on a CPU.
        """
        if self.verdict is Verdict.EMULATED and Verdict.EMULATED in verdicts:
            return "FP4" if self.is_fp4 else "FP8"
        return self.format


@dataclasses.dataclass(frozen=True)
class InFormat:
    """The products that run in one format.

    Args:
        products: How many run in a step.
        share: Their share of the FLOPs.
    """

    products: int
    share: float


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
    """Seconds on one device, by the roofline: each launch takes the time of its FLOPs or its bytes, plus its overhead;
    and the device idles for a while.

    Args:
        products: The time of matrix products.
        others: The time of all other launches.
        launching: The part of both that is spent on launching.
        idle: The time in which nothing runs.
    """

    products: float
    others: float
    launching: float
    idle: float

    @property
    def total(self) -> float:
        """The time of all launches, one after the other, and the idle time."""
        return self.products + self.others + self.idle

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
            f"{len(self.products)} products, {self.words(Verdict.FP8)}; {self.others.count} other "
            f"launches, {len(self.collectives)} collectives; {self.memory.peak:,} bytes at the peak"
        )

    @property
    def flops(self) -> int:
        """The FLOPs of all products in a step, on one device."""
        return sum(product.flops for product in self.products)

    def share(self, *verdicts: Verdict) -> float:
        """The share of the FLOPs with one of the verdicts, without rotations; 0 if there are none.

        Args:
            *verdicts: Such as `Verdict.FP8`.
        """
        chosen = self._multiplying
        return sum(p.flops for p in chosen if p.verdict in verdicts) / (sum(p.flops for p in chosen) or 1)

    def by_format(self, *verdicts: Verdict) -> "dict[str, InFormat]":
        """How many products run in each format, and their share of the FLOPs; the narrowest first. `FP4` and `FP8` are
        always there. Rotations are left out.

        Args:
            *verdicts: As in `Product.format_among`.
        """
        by_name: dict[str, list[Product]] = {"FP4": [], "FP8": []}
        for product in self._multiplying:
            by_name.setdefault(product.format_among(verdicts), []).append(product)
        flops = sum(product.flops for product in self._multiplying) or 1
        return {
            name: InFormat(sum(p.executions for p in products), sum(p.flops for p in products) / flops)
            for name, products in by_name.items()
        }

    @property
    def rotations(self) -> tuple[Product, ...]:
        """The small products that only rotate an operand of another one, as `nvfp4` does."""
        return tuple(product for product in self.products if product.is_rotation)

    @property
    def _multiplying(self) -> tuple[Product, ...]:
        return tuple(product for product in self.products if not product.is_rotation)

    def words(self, *verdicts: Verdict) -> str:
        """The shares of the FLOPs by format, such as `97.3% of the FLOPs in FP8 and 2.7% in bf16`.

        Args:
            *verdicts: As in `Product.format_among`.
        """
        shares = {name: one.share for name, one in self.by_format(*verdicts).items() if one.products}
        if not shares.keys() & {"FP4", "FP8"}:
            shares = {"FP8": 0.0} | shares
        first, *rest = (f"{share:.1%} of the FLOPs in {name}" for name, share in shares.items())
        rest = [words.replace(" of the FLOPs", "") for words in rest]
        return " and ".join(filter(None, (", ".join([first, *rest[:-1]]), *rest[-1:])))

    @property
    def fp8_share(self) -> float:
        """The share of the FLOPs that run in FP8 or FP4, without rotations."""
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
        """The products that run neither in FP8 nor in FP4, the largest first; without rotations."""
        return tuple(sorted((p for p in self._multiplying if not p.is_fp8), key=lambda p: -p.flops))

    def estimate(self, roofline: Roofline) -> Estimate:
        """The roofline estimate.

        Args:
            roofline: How fast the device is.
        """
        runs = sum(product.executions for product in self.products)
        products = sum(_seconds(product, roofline) for product in self.products)
        others = roofline.others(self.others.traffic)
        launching = roofline.launching(runs + self.others.count)
        return Estimate(products, others, launching, roofline.idle(products + others))


def _seconds(product: Product, roofline: Roofline) -> float:
    """Seconds at the rate of what is multiplied."""
    dtype = product.multiplied
    moved = product.executions * product.bytes
    if product.in_attention:
        return roofline.attention(dtype, product.flops, moved, product.executions)
    return roofline.products(dtype, product.flops, moved, product.executions, in_blocks=product.block_scaled)
