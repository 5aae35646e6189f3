"""How long kernels take: the one roofline of the preflight, of `FasterOn` and of `describe`."""

import dataclasses
import math

from .peaks import Peaks, is_narrow


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The shares of their peaks that devices reach, and what a kernel costs besides its work.

    Args:
        flops: The share of the peak FLOP/s that products in bf16 and wider reach. Measured: 0.72 (TransformerEngine,
            H200 NVL) to 0.81 (8192³ on an H100); torchao takes 0.78.
        fp8_flops: The same of products in FP8. Measured: 0.68 (TransformerEngine), 0.74 to 0.78 (DeepGEMM), 0.78
            (torchao). With 0.72, FP8 multiplies 1.85 times as fast as bf16, not twice.
        bandwidth: The share of the peak bandwidth that kernels reach. Measured: 0.47 (TransformerEngine's kernels that
            cast and transpose), 0.90 (copies on an H100), 0.92 (torchao's casts).
        launch: Seconds to launch a kernel; torchao measured 2 µs. Launches are free while the previous kernel is
            running.
        block_flops: As `fp8_flops`, for products with block scales: a third faster than in bf16.
        block_bandwidth: As `bandwidth`, for kernels that quantize in blocks: 1 TB/s of the 8 that a GB200 has.
        attention: As `flops`, of a fused causal attention, forward and backward: 480 TFLOP/s of an H100. Assumed.
        fp8_attention: As `fp8_flops`, of the same: 1.3 times as fast as in bf16. Assumed.

    Raises:
        ValueError: If a share is not above 0 and at most 1, or `launch` is negative.

    References:
        torchao, `torchao/testing/training/roofline_utils.py`; TransformerEngine, `docs/examples/gemm_profiling`;
        DeepGEMM's README; marin-community/marin#7282 for blocks: XLA's kernels, measured on a GB200.

    Example:
        >>> Efficiency(launch=0.0).fp8_flops
        0.72
    """

    flops: float = 0.78
    fp8_flops: float = 0.72
    bandwidth: float = 0.75
    launch: float = 2e-6
    block_flops: float = 0.52
    block_bandwidth: float = 0.125
    attention: float = 0.485
    fp8_attention: float = 0.315

    def __post_init__(self) -> None:
        for name in (field.name for field in dataclasses.fields(self) if field.name != "launch"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value!r} of Efficiency must be a share of the peak: above 0, at most 1")
        if not 0.0 <= self.launch < math.inf:
            raise ValueError(f"launch={self.launch!r} of Efficiency must be seconds, such as 2e-6; 0 ignores launches")


LIKELY = Efficiency()
"""The middle of what was measured."""

SLOWEST, FASTEST = Efficiency(fp8_flops=0.68, bandwidth=0.47), Efficiency(fp8_flops=0.78, bandwidth=0.92, launch=0.0)
"""The ends of what was measured: where FP8, which adds memory traffic and launches, gains least, and most."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The estimated seconds of kernels that run one after the other.

    A kernel takes `max(FLOPs / (FLOP/s × share), bytes / (bandwidth × share)) + launch`.

    Args:
        peaks: The device's peaks.
        efficiency: The shares of the peaks that it reaches.

    Example:
        >>> from haliax_fp8.devices.catalog import peaks
        >>> roofline = Roofline(peaks["h100"])
        >>> flops, moved = 2 * 8192**3, 3 * 2 * 8192**2
        >>> f"{1e3 * roofline.products('bf16', flops, moved):.2f} ms"
        '1.43 ms'
    """

    peaks: Peaks
    efficiency: Efficiency = LIKELY

    def products(self, dtype: str, flops: int, bytes: int, count: int = 1, *, in_blocks: bool = False) -> float:
        """Seconds of `count` identical products.

        Args:
            dtype: XLA's name of the element type that is multiplied, such as `f8e4m3fn`.
            flops: Of all of them.
            bytes: What all of them read and write.
            count: How many.
            in_blocks: Whether operands have block scales.
        """
        shares = self.efficiency
        share = shares.flops
        if is_narrow(dtype):
            share = shares.block_flops if in_blocks else shares.fp8_flops
        computing = flops / (share * self.peaks.flops(dtype))
        return max(computing, self.moving(bytes)) + self.launches(count)

    def attention(self, dtype: str, flops: int, bytes: int, count: int = 1) -> float:
        """Seconds of `count` products of fused attentions.

        Args:
            dtype: As in `products`.
            flops: Of all of them.
            bytes: What all of them read and write.
            count: How many.
        """
        share = self.efficiency.fp8_attention if is_narrow(dtype) else self.efficiency.attention
        return max(flops / (share * self.peaks.flops(dtype)), self.moving(bytes)) + self.launches(count)

    def others(self, bytes: int, count: int, block_bytes: int = 0) -> float:
        """Seconds of kernels that are not products.

        Args:
            bytes: What they read and write.
            count: How many.
            block_bytes: What those among them read and write that quantize in blocks; not in `bytes`.
        """
        in_blocks = block_bytes / (self.peaks.bandwidth * self.efficiency.block_bandwidth)
        return self.moving(bytes) + in_blocks + self.launches(count)

    def moving(self, bytes: int) -> float:
        """Seconds that memory traffic takes.

        Args:
            bytes: How much.
        """
        return bytes / (self.peaks.bandwidth * self.efficiency.bandwidth)

    def launches(self, count: int) -> float:
        """Seconds that starting kernels takes.

        Args:
            count: How many.
        """
        return count * self.efficiency.launch
