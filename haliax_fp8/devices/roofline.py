"""How long launches take: the roofline that the preflight, `FasterOn` and `describe` share."""

import dataclasses
import math

from .peaks import Peaks, is_narrow
from .traffic import Traffic


__all__ = [
    "FASTEST",
    "LEAST_GAIN",
    "LIKELY",
    "MOST_GAIN",
    "SLOWEST",
    "WHOLE_STEP",
    "Efficiency",
    "Roofline",
]


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The shares of their peaks that devices reach, and the overhead of each launch.

    Args:
        flops: The share of the peak FLOP/s that products in bf16 and wider reach. Measured: 0.70 (blocks of Llama-8B on
            an H200, here), 0.72 (TransformerEngine, H200 NVL) to 0.81 (8192³ on an H100); torchao takes 0.78.
        fp8_flops: The same for FP8 products. Measured: 0.75 (the same blocks, here), 0.68 (TransformerEngine), 0.74 to
            0.78 (DeepGEMM), 0.78 (torchao). With 0.72, FP8 multiplies 1.92 times as fast as bf16, not twice.
        bandwidth: The share of the peak bandwidth that launches reach if they neither read nor write FP8; also that of
            products. Measured: 0.70 to 0.78 (four programs with those blocks), 0.90 (copies on an H100).
        cast_bandwidth: The same for launches that read or write FP8: casts, with amaxes or not, and transpositions.
            Measured: 0.53 and 0.55 (two of these programs), 0.47 (TransformerEngine's CUDA kernels that cast and
            transpose), 0.92 (torchao's casts).
        two_layouts_bandwidth: The same for launches in which XLA writes FP8 data in two layouts. Measured: 0.23 and
            0.32 (two of them).
        launch: Seconds of overhead of each launch; torchao measured 2 µs. It is hidden while the previous launch is
            running.
        block_flops: Like `fp8_flops`, for products with block scales: a third faster than bf16. With 0.65, the fewest
            launches that MXFP8 can do with gain what TransformerEngine and torchao report, 1.3 to 1.5 times bf16.
        fp4_flops: The same of the peak for FP4. Nobody has measured it: at half of it, FP4 is as fast as MXFP8.
        block_bandwidth: Like `bandwidth`, for launches that quantize in blocks: 1 TB/s of the 8 that a GB200 has.
        attention: Like `flops`, for fused causal attention, forward and backward: 480 TFLOP/s on an H100. Assumed;
            measured on an H200: 495 with 8192 tokens, 539 with 32,768.
        fp8_attention: Like `fp8_flops`, for the same attention: 1.3 times as fast as in bf16. Assumed; on that H200 it
            was 1.17 and 1.25 times as fast, casts and amaxes included.
        idle: Seconds of a step in which the device does nothing, beside the overhead of launches. Measured: 1.7, 2.5
            and 2.7 ms of 67.0, 41.3 and 45.5 (the same blocks in bf16, here and with Haliax's own FP8). Why is unknown:
            it grows neither with the launches nor with the time.
        most_idle: The largest share of the other time that `idle` may be, for steps shorter than those.

    Raises:
        ValueError: If a share is not above 0 and at most 1, or `launch` or `idle` is negative.

    References:
        torchao, `torchao/testing/training/roofline_utils.py`; TransformerEngine, `docs/examples/gemm_profiling`;
        DeepGEMM's README; marin-community/marin#7282 for blocks: what XLA compiles, measured on a GB200.

    Example:
        >>> Efficiency(launch=0.0).fp8_flops
        0.72
    """

    flops: float = 0.75
    fp8_flops: float = 0.72
    bandwidth: float = 0.75
    cast_bandwidth: float = 0.54
    two_layouts_bandwidth: float = 0.29
    launch: float = 2e-6
    block_flops: float = 0.52
    fp4_flops: float = 0.52
    block_bandwidth: float = 0.125
    attention: float = 0.485
    fp8_attention: float = 0.315
    idle: float = 0.0
    most_idle: float = 0.06

    def __post_init__(self) -> None:
        for name in (field.name for field in dataclasses.fields(self) if field.name not in ("launch", "idle")):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value!r} of Efficiency must be a share of the peak: above 0, at most 1")
        for name, example in (("launch", "2e-6; 0 ignores launches"), ("idle", "2e-3; 0 ignores it")):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} of Efficiency must be seconds, such as {example}")


LIKELY = Efficiency()
"""What estimates of a layer use. Its products reach other shares alone than among others."""

WHOLE_STEP = Efficiency(flops=0.71, fp8_flops=0.76, idle=2.3e-3)
"""What estimates of a whole step use: four blocks of Llama-8B on an H200, whose products took 61.0 ms in bf16 and 28.6
in FP8; and the mean of the three idle times."""

SLOWEST = Efficiency(
    flops=0.70,
    fp8_flops=0.68,
    fp4_flops=0.26,
    bandwidth=0.70,
    cast_bandwidth=0.47,
    two_layouts_bandwidth=0.23,
    idle=2.3e-3,
)
FASTEST = Efficiency(
    flops=0.81,
    fp8_flops=0.78,
    block_flops=0.65,
    bandwidth=0.90,
    cast_bandwidth=0.92,
    two_layouts_bandwidth=0.32,
    launch=0.0,
)
"""The ends of the measured ranges, and of FP4's assumed one: how long a program takes at most, and at least."""

LEAST_GAIN = Efficiency(flops=0.78, fp8_flops=0.68, fp4_flops=0.26, cast_bandwidth=0.47, two_layouts_bandwidth=0.23)
MOST_GAIN = Efficiency(fp8_flops=0.78, block_flops=0.65, cast_bandwidth=0.92, two_layouts_bandwidth=0.32, launch=0.0)
"""The ends at which FP8 gains least and most: its overhead is casts and launches."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Estimates the seconds that launches take if they run one after the other.

    A launch takes `max(FLOPs / (FLOP/s × share), bytes / (bandwidth × share)) + launch`.

    Args:
        peaks: The device's peaks.
        efficiency: The shares of the peaks that it reaches.

    Example:
        >>> from haliax_fp8.devices.catalog import peaks
        >>> roofline = Roofline(peaks["h100"])
        >>> flops, moved = 2 * 8192**3, 3 * 2 * 8192**2
        >>> f"{1e3 * roofline.products('bf16', flops, moved):.2f} ms"
        '1.48 ms'
    """

    peaks: Peaks
    efficiency: Efficiency = LIKELY

    def products(self, dtype: str, flops: int, bytes: int, count: int = 1, *, in_blocks: bool = False) -> float:
        """Seconds of `count` identical products.

        Args:
            dtype: XLA's name for the element type that is multiplied, such as `f8e4m3fn`.
            flops: The FLOPs of all of them together.
            bytes: The bytes that all of them together read and write.
            count: The number of products.
            in_blocks: Whether operands have block scales.
        """
        shares = self.efficiency
        share = shares.flops
        if is_narrow(dtype):
            of_blocks = shares.fp4_flops if dtype.startswith("f4") else shares.block_flops
            share = of_blocks if in_blocks else shares.fp8_flops
        computing = flops / (share * self.peaks.flops(dtype))
        return max(computing, self.moving(bytes)) + self.launching(count)

    def attention(self, dtype: str, flops: int, bytes: int, count: int = 1) -> float:
        """Seconds of `count` launches of fused attention.

        Args:
            dtype: As in `products`.
            flops: As in `products`.
            bytes: As in `products`.
            count: The number of launches.
        """
        share = self.efficiency.fp8_attention if is_narrow(dtype) else self.efficiency.attention
        return max(flops / (share * self.peaks.flops(dtype)), self.moving(bytes)) + self.launching(count)

    def others(self, traffic: Traffic) -> float:
        """Seconds of launches that are not products.

        Args:
            traffic: What they read and write.
        """
        shares = self.efficiency
        by_share = (
            (traffic.plain, shares.bandwidth),
            (traffic.casts, shares.cast_bandwidth),
            (traffic.two_layouts, shares.two_layouts_bandwidth),
            (traffic.blocks, shares.block_bandwidth),
        )
        moving = sum(bytes / (self.peaks.bandwidth * share) for bytes, share in by_share)
        return moving + self.launching(traffic.launches)

    def idle(self, busy: float) -> float:
        """Seconds of a step in which the device does nothing.

        Args:
            busy: The seconds of the step's launches.
        """
        return min(self.efficiency.idle, self.efficiency.most_idle * busy)

    def moving(self, bytes: int) -> float:
        """Seconds that the memory traffic of a product takes.

        Args:
            bytes: The bytes read and written.
        """
        return bytes / (self.peaks.bandwidth * self.efficiency.bandwidth)

    def launching(self, count: int) -> float:
        """Seconds of overhead: what launching takes.

        Args:
            count: The number of launches.
        """
        return count * self.efficiency.launch
