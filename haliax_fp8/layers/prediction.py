"""How long the products of a linear layer take in bf16 and in FP8, including overhead, by the roofline."""

import dataclasses

from rich.text import Text

from .._printing import Printable
from ..devices.peaks import Peaks
from ..devices.roofline import LEAST_GAIN, LIKELY, MOST_GAIN, Efficiency, Roofline
from ..recipes.recipe import OPERANDS, Recipe
from ..recipes.scaling import HighPrecision
from .layer_work import LayerWork


@dataclasses.dataclass(frozen=True, repr=False)
class Prediction(Printable):
    """The estimated seconds of a training step that a layer's fprop, dgrad and wgrad take.

    Args:
        bf16: The products in bf16, with their padding.
        products: The products with the recipe.
        overhead: What the recipe adds: amaxes, casts, transpositions, padding, scales.
        overhead_bytes: The bytes that the overhead reads and writes.
        overhead_launches: The number of launches in the overhead.
        launching: The part of `products` and `overhead` that is spent on launching.
        gain_range: The smallest and the largest `gain` over the measured shares of peaks; `gain` twice for custom
            shares.
    """

    bf16: float
    products: float
    overhead: float
    overhead_bytes: int
    overhead_launches: int
    launching: float
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
        """Whether launching takes more time in FP8 than all the work."""
        return self.launching > self.fp8 / 2

    def __rich__(self) -> Text:
        least, most = self.gain_range
        bound = "; launching takes longer than all the work" if self.is_launch_bound else ""
        return Text(
            f"{self.gain:.2f} times as fast in FP8 ({least:.2f} to {most:.2f}; estimate: {1e3 * self.fp8:.3g} ms a "
            f"step instead of {1e3 * self.bf16:.3g} ms in bf16{bound})"
        )


_IN_BF16 = Recipe.of(HighPrecision())


def predict(work: LayerWork, peaks: Peaks, efficiency: Efficiency, *, repeats: int = 1) -> Prediction:
    """The time of a layer's products, in bf16 and with its recipe.

    Args:
        work: The layer.
        peaks: The device's peak rates.
        efficiency: The shares of them that it reaches. With the default, the range is that of the sources.
        repeats: How many such layers there are, one after the other.
    """
    plain = dataclasses.replace(work, recipe=_IN_BF16)

    def seconds(efficiency: Efficiency) -> tuple[float, float, float]:
        roofline = Roofline(peaks, efficiency)
        return sum(plain.seconds(roofline)), *work.seconds(roofline)

    bf16, products, overhead = seconds(efficiency)
    # Not the ends alone: with block scales, leaving out the time of launches can lower the gain.
    measured = map(seconds, (LEAST_GAIN, LIKELY, MOST_GAIN) if efficiency == LIKELY else (efficiency,))
    gains = [bf16 / (products + overhead) for bf16, products, overhead in measured]
    added = work.added
    return Prediction(
        bf16=repeats * bf16,
        products=repeats * products,
        overhead=repeats * overhead,
        overhead_bytes=repeats * added.bytes,
        overhead_launches=repeats * added.launches,
        launching=repeats * Roofline(peaks, efficiency).launching(len(OPERANDS) + added.launches),
        gain_range=(min(gains), max(gains)),
    )
