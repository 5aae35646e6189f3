"""How long the products of a linear layer take in bf16 and in FP8, including overhead, by the roofline."""

import dataclasses

from ..devices.peaks import Peaks
from ..devices.roofline import FASTEST, LIKELY, SLOWEST, Efficiency, Roofline
from .layer_work import PRODUCTS, LayerWork


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The estimated seconds of a training step that a layer's fprop, dgrad and wgrad take.

    Args:
        bf16: The products in bf16, with their padding.
        products: The products with the recipe.
        overhead: What the recipe adds: amaxes, casts, transpositions, padding, scales.
        overhead_bytes: The bytes that the overhead reads and writes.
        overhead_kernels: The number of kernels in the overhead.
        launches: The part of `products` and `overhead` that is launch time.
        gain_range: The smallest and the largest `gain` over the measured shares of peaks; `gain` twice for custom
            shares.
    """

    bf16: float
    products: float
    overhead: float
    overhead_bytes: int
    overhead_kernels: int
    launches: float
    gain_range: tuple[float, float]

    @property
    def fp8(self) -> float:
        """Products and all that FP8 adds."""
        return self.products + self.overhead

    @property
    def gain(self) -> float:
        """How many times as fast as bf16; below 1, FP8 is slower."""
        return self.bf16 / self.fp8

    @property
    def is_launch_bound(self) -> bool:
        """Whether starting kernels takes more time in FP8 than all the work in them."""
        return self.launches > self.fp8 / 2


def predict(work: LayerWork, peaks: Peaks, efficiency: Efficiency, *, repeats: int = 1) -> Prediction:
    """The time of a layer's products, in bf16 and with its recipe.

    For each of fprop, dgrad and wgrad, `m × k` times `k × n`, as `Roofline` has it; FP8's operands have one byte per
    element, bf16's have two. The rest takes the time of its bytes and its launches.

    Args:
        work: What there is to do for the layer.
        peaks: What the device does at best.
        efficiency: What it reaches of that. With the default, the range is that of the sources.
        repeats: How many such layers there are, one after the other.
    """
    bf16, products, overhead = _seconds(work, Roofline(peaks, efficiency))
    # Not the ends alone: where launches dominate, slower memory hides what they add.
    measured = (SLOWEST, LIKELY, FASTEST) if efficiency == LIKELY else (efficiency,)
    gains = [_gain(work, Roofline(peaks, one)) for one in measured]
    added = work.added
    return Prediction(
        bf16=repeats * bf16,
        products=repeats * products,
        overhead=repeats * overhead,
        overhead_bytes=repeats * (added.bytes + added.block_bytes),
        overhead_kernels=repeats * added.kernels,
        launches=repeats * Roofline(peaks, efficiency).launches(len(PRODUCTS) + added.kernels),
        gain_range=(min(gains), max(gains)),
    )


def _seconds(work: LayerWork, roofline: Roofline) -> tuple[float, float, float]:
    """In bf16; and with the recipe, the products and everything else."""

    def product(name: str, is_fp8: bool) -> float:
        dtype, flops = "f8e4m3fn" if is_fp8 else "bf16", work.flops(is_fp8=is_fp8)
        moved = work.product_bytes(name, is_fp8=is_fp8)
        return roofline.products(dtype, flops, moved, in_blocks=is_fp8 and work.in_blocks(name))

    padding, added = work.padding_of_bf16(PRODUCTS), work.added
    bf16 = sum(product(name, False) for name in PRODUCTS) + roofline.others(padding.bytes, padding.kernels)
    products = sum(product(name, work.is_fp8(name)) for name in PRODUCTS)
    return bf16, products, roofline.others(added.bytes, added.kernels, added.block_bytes)


def _gain(work: LayerWork, roofline: Roofline) -> float:
    bf16, products, overhead = _seconds(work, roofline)
    return bf16 / (products + overhead)
