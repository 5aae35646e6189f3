"""Peak rates of devices, from their data sheets."""

import dataclasses


def is_narrow(dtype: str) -> bool:
    """Whether an element type is FP8 or narrower, by XLA's name for it, such as `f8e4m3fn`."""
    return dtype.startswith(("f8", "f4"))


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The peak rates of one device: dense products, and bytes between it and its memory, per second.

    Args:
        fp8: FLOP/s of products of FP8 operands; equal to `bf16` if the device has no such products.
        bf16: FLOP/s of products of bfloat16 or float16 operands.
        f32: FLOP/s of products of float32 operands: in TF32 on a GPU; on a TPU in bfloat16, XLA's default precision.
        bandwidth: Bytes per second.
        source: The source of the figures.
        fp4: FLOP/s of products of FP4 operands; None if the device has no such products.
        link: Bytes per second that it sends to the other devices of its host; None if that is unknown.
    """

    fp8: float
    bf16: float
    f32: float
    bandwidth: float
    source: str
    fp4: float | None = None
    link: float | None = None

    def flops(self, dtype: str) -> float:
        """The peak for operands of an element type.

        Args:
            dtype: XLA's name, such as `bf16`.
        """
        if dtype.startswith("f4") and self.fp4 is not None:
            return self.fp4
        if is_narrow(dtype):
            return self.fp8
        return self.bf16 if dtype in ("bf16", "f16") else self.f32
