"""What the backward pass keeps of a kernel: its FP8 copy, or nothing, since the kernel itself is in memory anyway."""

import enum


class KernelResidual(enum.Enum):
    """Where dgrad gets its FP8 kernel from. The choice does not change values."""

    KEEP = "keep"
    """Keeps what the forward pass quantized: a byte per element, from the forward to the backward pass.

    For kernels that are not parameters: in a product by hand the kernel may be computed, and would otherwise be kept in
    high precision.
    """

    REQUANTIZE = "requantize"
    """Keeps nothing: the backward pass quantizes the kernel again, in the layout that dgrad reads.

    A parameter stays in memory for the whole step, so this saves a byte per weight. It costs reading the kernel once
    more, or twice with scales from the tensor itself.
    """

    REQUANTIZE_WHERE_CHEAP = "requantize_where_cheap"
    """Quantizes again if that needs no other amax and no copy of the kernel; otherwise keeps the quantized kernel.

    No other amax: with delayed and static scaling, rows and one-dimensional blocks. No copy: a scan over a
    `haliax.nn.Stacked` slices the kernel out of the stack, and would keep every slice in high precision.
    """

    def decided(self, *, measures_again: bool, stacked: bool) -> "KernelResidual":
        """`KEEP` or `REQUANTIZE`, for one layer.

        Args:
            measures_again: Whether quantizing again takes another pass over the kernel, for its amax.
            stacked: Whether the layer is one of a `haliax.nn.Stacked`, whose kernels are slices of one array.
        """
        if self is not KernelResidual.REQUANTIZE_WHERE_CHEAP:
            return self
        return KernelResidual.KEEP if measures_again or stacked else KernelResidual.REQUANTIZE
