"""Peak rates of devices, from their data sheets."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The peak rates of one device: dense products, and bytes between it and its memory, per second.

    Args:
        fp8: FLOP/s of products of FP8 operands; that of `bf16` where the device has none.
        bf16: FLOP/s of products of bfloat16 or float16 operands.
        f32: FLOP/s of products of float32 operands: in TF32 on a GPU, in six bfloat16 products on a TPU.
        bandwidth: Bytes per second.
        source: The source of the figures.
    """

    fp8: float
    bf16: float
    f32: float
    bandwidth: float
    source: str

    def flops(self, dtype: str) -> float:
        """The peak for operands of an element type.

        Args:
            dtype: XLA's name, such as `bf16`.
        """
        if dtype.startswith(("f8", "f4")):
            return self.fp8
        return self.bf16 if dtype in ("bf16", "f16") else self.f32


def _hopper(bandwidth: float, source: str) -> Peaks:
    return Peaks(fp8=1978.9e12, bf16=989.4e12, f32=494.7e12, bandwidth=bandwidth, source=source)


peaks: Mapping[str, Peaks] = {
    "h100": _hopper(3.35e12, "NVIDIA H100 data sheet, SXM, without sparsity"),
    "h200": _hopper(4.8e12, "NVIDIA H200 data sheet, SXM, without sparsity"),
    "b200": Peaks(4.5e15, 2.25e15, 1.1e15, 7.7e12, "NVIDIA HGX B200 data sheet, per GPU, without sparsity"),
    "a100": Peaks(312e12, 312e12, 156e12, 2.039e12, "NVIDIA A100 data sheet, 80GB SXM, without sparsity"),
    "l40s": Peaks(733e12, 362.05e12, 183e12, 864e9, "NVIDIA L40S data sheet, without sparsity"),
    "rtx4090": Peaks(
        330.3e12, 165.2e12, 82.6e12, 1.008e12, "NVIDIA Ada architecture white paper, float32 accumulation"
    ),
    # JAX sees the two cores of a chip as devices.
    "tpu7x": Peaks(2307e12, 1153.5e12, 1153.5e12 / 6, 3.69e12, "Google Cloud TPU7x page, half a chip"),
    "tpu6e": Peaks(918e12, 918e12, 918e12 / 6, 1.638e12, "Google Cloud TPU v6e page, per chip"),
    "tpu5e": Peaks(197e12, 197e12, 197e12 / 6, 0.819e12, "Google Cloud TPU v5e page, per chip"),
}
"""By the names of `Device.by_name`."""
