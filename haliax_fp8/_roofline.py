"""How long the products of a linear layer take in bf16 and in FP8: a roofline, with what FP8 adds."""

import dataclasses
import math

from ._layer_work import PRODUCTS, LayerWork, Work
from ._peaks import Peaks


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What devices reach of their peaks, and what a kernel costs beside its work. Assumptions, the same for bf16.

    Args:
        flops: The share of the peak FLOP/s that products reach; 0.78 is what torchao measured for large ones on an
            H100, and takes for both dtypes.
        bandwidth: The share of the peak bandwidth that kernels reach. Plain copies reach 0.9; those that transpose
            while they cast do not.
        launch: Seconds that every kernel takes beside its work.
        block_flops: As `flops`, of products with scales of blocks: a third faster than in bf16.
        block_bandwidth: As `bandwidth`, of kernels that quantize in blocks: 1 TB/s of the 8 that a GB200 has.

    Raises:
        ValueError: If a share is not above 0 and at most 1, or `launch` is negative.

    References:
        torchao, `torchao/testing/training/roofline_utils.py`; marin-community/marin#7282 for blocks: XLA's kernels,
        measured on a GB200.

    Example:
        >>> Efficiency(launch=0.0).flops
        0.78
    """

    flops: float = 0.78
    bandwidth: float = 0.7
    launch: float = 2.5e-6
    block_flops: float = 0.52
    block_bandwidth: float = 0.125

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "block_flops", "block_bandwidth"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value!r} of Efficiency must be a share of the peak: above 0, at most 1")
        if not 0.0 <= self.launch < math.inf:
            raise ValueError(f"launch={self.launch!r} of Efficiency must be seconds, such as 2.5e-6; 0 leaves it out")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a training step spends on a layer's fprop, dgrad and wgrad, in seconds. An estimate.

    Args:
        bf16: The products in bf16, with what pads them.
        products: The products as the recipe has them.
        overhead: What the recipe adds: amaxes, casts, transpositions, padding, scales.
        overhead_bytes: What that reads and writes.
        overhead_kernels: How many kernels it is.
    """

    bf16: float
    products: float
    overhead: float
    overhead_bytes: int
    overhead_kernels: int

    @property
    def fp8(self) -> float:
        """Products and all that FP8 adds."""
        return self.products + self.overhead

    @property
    def gain(self) -> float:
        """How many times as fast as bf16; below 1, FP8 is slower."""
        return self.bf16 / self.fp8


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Predicts how long a layer takes on a device.

    For each of fprop, dgrad and wgrad, `m × k` times `k × n`,
    `seconds = max(2 m n k / (FLOP/s × share), bytes / (bandwidth × share)) + launch`; what is beside the products takes
    `bytes / (bandwidth × share) + kernels × launch`. FP8's operands have one byte per element, bf16's have two.

    Args:
        peaks: What the device does at best.
        efficiency: What it reaches of that.
    """

    peaks: Peaks
    efficiency: Efficiency

    def predict(self, work: LayerWork, *, repeats: int = 1) -> Prediction:
        """The time of a layer's products, in bf16 and with its recipe.

        Args:
            work: What there is to do for the layer.
            repeats: How many such layers there are, one after the other.
        """
        products = sum(self._product(work, name, is_fp8=work.is_fp8(name)) for name in PRODUCTS)
        bf16 = sum(self._product(work, name, is_fp8=False) for name in PRODUCTS)
        added = work.added
        return Prediction(
            bf16=repeats * (bf16 + self._beside(work.padding_of_bf16(PRODUCTS))),
            products=repeats * products,
            overhead=repeats * self._beside(added),
            overhead_bytes=repeats * (added.bytes + added.block_bytes),
            overhead_kernels=repeats * added.kernels,
        )

    def _product(self, work: LayerWork, name: str, *, is_fp8: bool) -> float:
        """Seconds of one product."""
        share = self.efficiency.block_flops if is_fp8 and work.in_blocks(name) else self.efficiency.flops
        computing = work.flops(is_fp8=is_fp8) / (share * (self.peaks.fp8 if is_fp8 else self.peaks.bf16))
        return max(computing, self._moving(work.product_bytes(name, is_fp8=is_fp8))) + self.efficiency.launch

    def _beside(self, added: Work) -> float:
        """Seconds of other kernels."""
        in_blocks = added.block_bytes / (self.peaks.bandwidth * self.efficiency.block_bandwidth)
        return self._moving(added.bytes) + in_blocks + added.kernels * self.efficiency.launch

    def _moving(self, bytes: int) -> float:
        return bytes / (self.peaks.bandwidth * self.efficiency.bandwidth)
