"""What matrix units multiply, and which architectures have them.

An FP8 unit multiplies and sums; a scale that is constant along the sum is applied to the result. Scales that change
along the sum have to be applied inside it, by units made for such blocks.
"""

import dataclasses


_SINCE = {8.9: "Ada, Hopper, Blackwell", 10.0: "Blackwell"}


@dataclasses.dataclass(frozen=True)
class MatrixUnits:
    """A kind of matrix unit, by the architectures that have it.

    Args:
        products: What it multiplies, for messages.
        cuda: The lowest compute capability of NVIDIA devices that have it; None if none does.
        rocm: Prefixes of the AMD architectures that have it.
        tpu: The lowest generation of TPUs that has it; None if none does.
    """

    products: str
    cuda: float | None
    rocm: tuple[str, ...]
    tpu: int | None

    def missing(self, platform: str, architecture: str) -> str | None:
        """Why an architecture cannot multiply with these units; None if it can.

        Args:
            platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
            architecture: See `Device.architecture`.

        Example:
            >>> FP8_UNITS.missing("cuda", "8.0")
            'FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), but this device has 8.0'
            >>> FP8_UNITS.missing("cuda", "9.0")
        """
        match platform:
            case "cuda" if self.cuda is not None:
                if float(architecture or 0) >= self.cuda:
                    return None
                return (
                    f"{self.products} need compute capability {self.cuda} ({_SINCE[self.cuda]}), but this device "
                    f"has {architecture or 'an unknown one'}"
                )
            case "rocm" if self.rocm:
                if architecture.startswith(self.rocm):
                    return None
                return f"{self.products} need {' or '.join(self.rocm)}, but this device is {architecture or 'unknown'}"
            case "tpu" if self.tpu is not None:
                return None if int(architecture or 0) >= self.tpu else f"{self.products} need a TPU7x"
            case "cpu":
                return f"a CPU has no units for {self.products}"
        return f"no {platform} device has units for {self.products}"


FP8_UNITS = MatrixUnits("FP8 products", cuda=8.9, rocm=("gfx94", "gfx95", "gfx12"), tpu=7)
"""Scales of tensors or rows, which stay outside the sum."""

MX_UNITS = MatrixUnits("MXFP8 products (one scale per 32 elements)", cuda=10.0, rocm=("gfx95",), tpu=None)
"""An E8M0 scale for every 32 elements of the sum."""

FP4_UNITS = MatrixUnits("NVFP4 products (one scale per 16 elements)", cuda=10.0, rocm=(), tpu=None)
"""An E4M3 scale for every 16 elements of the sum, data in E2M1; the scale of the tensor stays outside the sum."""

NO_UNITS = MatrixUnits("blocks with such scales: operands are dequantized first", cuda=None, rocm=(), tpu=None)
"""Other scales along the sum: operands are dequantized, then multiplied in high precision."""
