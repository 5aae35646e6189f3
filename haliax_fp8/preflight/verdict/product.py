"""One matrix product of a compiled program."""

import dataclasses
import enum

from rich.text import Text

from ..._printing import Printable


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

    def __rich__(self) -> Text:
        """Where it is, what it multiplies, and how it runs."""
        where = self.layer or self.scope or "no layer"
        operands = self.lhs if self.lhs == self.rhs else f"{self.lhs}·{self.rhs}"
        why = f": {self.reason}" if self.reason else ""
        how = f"{self.shape}, {operands} to {self.out}, {self.implementation}, {self.executions} runs"
        return Text(f"{where}, {self.name}, {how}, {self.verdict.value}{why}", overflow="fold")

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
        """Whether it runs in FP8."""
        return self.verdict is Verdict.FP8
