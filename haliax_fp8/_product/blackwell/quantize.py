"""An operand in blocks, read once for both of its products, where a kernel fits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import Device
from ...recipes.scaling import Members, OperandUse
from ..blocks import MX
from .check import check_once
from .primitive import BlockUse, as_quantized, quantize_blocks_p


def in_one_pass(
    x: Array, use: OperandUse, this: BlockUse, other: BlockUse | None, keys: Sequence[Array]
) -> QuantizedArray | None:
    """What `this.scaling.quantize(x, use)` returns, by a kernel that may serve another use too; None if none fits.

    Two calls for two uses are the same launch: XLA merges them.

    Args:
        x: The operand.
        use: What is done with it.
        this: The same, as far as it is static.
        other: The operand's other use, if it is quantized for that now.
        keys: The keys of both that round at random, this one's first.
    """
    alike = other is not None and (other.blocks, other.is_delayed) == (this.blocks, this.is_delayed)
    uses = [this, other] if other is not None and alike else [this]
    device = Device.default()
    is_plain = type(use.members) is Members and not use.ensemble and use.contiguous_sum and x.dtype == jnp.bfloat16
    # All devices' parts of a tensor have one scale, which no kernel knows, unless it is stored.
    is_whole = not use.devices or this.blocks == MX or use.stored_scale is not None
    fitting = [one for one in uses if one.fits(x.shape)]
    if not (device.is_cuda_from(10.0, below=11.0) and is_plain and is_whole and this in fitting):
        return None
    check_once(device)
    drawn = dict(zip([one for one in (this, other) if one and one.rounding.needs_key], keys, strict=True))
    fitting = sorted(dict.fromkeys(fitting), key=lambda one: -one.contracted[-1])
    words = [jax.random.key_data(drawn[one]) for one in fitting if one in drawn]
    stored = [] if use.stored_scale is None else [use.stored_scale]
    results = quantize_blocks_p.bind(x, *words, *stored, uses=tuple(fitting), device=device)
    return as_quantized(results, fitting)[fitting.index(this)]
