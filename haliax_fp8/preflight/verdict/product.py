"""One matrix product of a compiled program."""

import dataclasses
import enum


TRITON = "Triton"
"""How the names of kernels begin that Triton makes."""


class Verdict(enum.Enum):
    """How a product runs."""

    FP8 = "FP8"
    """The kernel reads both operands in FP8 (or narrower), and the device has units that multiply them."""

    EMULATED = "emulated"
    """Operands were rounded to FP8, then widened: the product runs in a wider format."""

    HIGH_PRECISION = "high precision"
    """Nothing asked for FP8."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product: `batch` products of an `m × k` and a `k × n` matrix.

    Args:
        layer: The path of the weight's layer in the arguments, such as `model.layers.0.up`; empty if it has none.
        role: `fprop`, `dgrad` or `wgrad`; `forward` or `backward` if the program does not say more.
        scope: The stack of named scopes that it was traced in.
        batch: See above.
        m: See above.
        n: See above.
        k: See above.
        lhs: XLA's name of the first operand's element type, such as `f8e4m3fn`: as the kernel reads it.
        rhs: Of the second operand's.
        widened: The element type that the kernel itself widens FP8 operands to before it multiplies them; empty if it
            multiplies what it reads.
        out: The element type of the result, as written to memory.
        compute: The element type of the weight where the model multiplies it, before quantization and after a cast to
            the compute dtype; empty if unknown.
        written: XLA's name of the operands' element type in the program before it was optimized; as compiled if that is
            unknown.
        block_scaled: Whether the operands come with a scale for each block.
        indivisible: The dimensions that are not a multiple of 16, such as `k=4095`; empty if there are none.
        kernel: What runs it, such as `cublasLt f8`.
        groups: How many times the requested work it computes: XLA multiplies every row by the kernels of all groups,
            and keeps one result; 1 for other products.
        surplus: How many times the requested work a grouped kernel computes, because its last tiles are not full: an
            average over the sizes of groups, which are known on the device only.
        executions: How often it runs in one step, with loops unrolled.
        bytes: What one run reads and writes.
        verdict: How it runs.
        reason: Why it is not in FP8; empty if it is.
        in_attention: Whether it is one of the products of a fused attention.
        halved: Whether the kernel leaves out one half of it, which a causal mask hides.
    """

    layer: str
    role: str
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
    kernel: str
    groups: int
    surplus: float
    executions: int
    bytes: int
    verdict: Verdict
    reason: str
    in_attention: bool = False
    halved: bool = False

    @property
    def flops(self) -> int:
        """Of all runs in a step: two for each multiplication and addition."""
        return round(self.surplus * self._flops)

    @property
    def _flops(self) -> int:
        return (1 if self.halved else 2) * self.batch * self.m * self.n * self.k * self.executions

    @property
    def useful_flops(self) -> int:
        """Those among them that the model asked for."""
        return self._flops // self.groups

    @property
    def shape(self) -> str:
        """Such as `8192×4096·4096×14336`, with the number of products in front where it is not one."""
        matrices = f"{self.m}×{self.k}·{self.k}×{self.n}"
        return matrices if self.batch == 1 else f"{self.batch}× {matrices}"

    @property
    def is_fp8(self) -> bool:
        """Whether it runs in FP8."""
        return self.verdict is Verdict.FP8
