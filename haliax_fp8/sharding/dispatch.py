"""send_rows: sends rows to the devices of their experts in FP8."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.meshes import as_varying, axes_of_parts
from .._jax.xla import keep_cast
from .._numerics.quantized_array import divide_by
from .._op import Fp8DotGeneral
from .._product.grouped.contraction import RaggedContraction
from .._product.operands import Scales, quantize_operand, round_to, scales_of
from .._product.spec import ProductSpec
from .._state.record import in_product
from ..formats import Format
from ..recipes.scaling.members import Members
from ..recipes.scaling.multiplier import LARGEST_MULTIPLIER


type Exchange = Callable[[Array], Array]


def send_rows(
    rows: Float[Array, "*rows inputs"], op: Fp8DotGeneral, exchange: Exchange, *, gradient_format: Format | None = None
) -> Float[Array, "*received inputs"]:
    """Sends rows to other devices in FP8, as the op would quantize them: half the bytes of bfloat16, the same result.

    For expert parallelism: call it inside `shard_map`, before `op.ragged_dot`. The received rows have the dtype of
    `rows`, are rounded with the op's scale for its input, and have the same amax over all devices. So the op quantizes
    them to the same FP8 data as the original rows and records the same amax. Its products and state are bit for bit the
    same as when `rows` are sent in high precision. This holds for float32 and bfloat16.

    Elements that round to the largest value sent arrive as the amax itself, which is sent as one number. The op rounds
    them to the same FP8 value again, and sees the amax that its next scale has to cover.

    Args:
        rows: The rows to send.
        op: The op that multiplies the rows. The scale of its input must be known before the step, as in delayed or
            static scaling. Other ops that read the same rows record the amax too, but round a second time unless their
            scale is the same.
        exchange: Moves rows of any dtype and length among devices, without computing anything, such as
            `lambda x: lax.all_to_all(x, "experts", 0, 0, tiled=True)`, or a function that calls
            `lax.ragged_all_to_all`.
        gradient_format: The format in which gradients travel back, each row with its own scale, from its amax; None
            sends them in high precision.

    Returns:
        The received rows.

    Raises:
        ValueError: If the op's recipe does not know the scale of its input before the rows arrive.

    References:
        DeepSeek-V3's technical report (arXiv:2412.19437, section 3.3.3) sends activations before up-projections in
        FP8, and keeps combining in bfloat16.

    Example:
        >>> op = Fp8DotGeneral.init("delayed")
        >>> send_rows(jnp.array([[1.03, -2.0]]), op, lambda x: x[::-1])
        Array([[ 1., -2.]], dtype=float32)
    """
    scaling = op.recipe.input.scaling
    if not scaling.stores_scale or op.state is None:
        raise ValueError(
            f"op has the recipe {op.recipe}, which does not know an input's scale before the rows arrive: send them in "
            "high precision, or use recipe='delayed'"
        )
    out_dtype = op.compute_dtype or np.dtype(rows.dtype)
    precision, stacked = lax.Precision.DEFAULT, bool(op.stack)
    spec = ProductSpec(op.recipe, RaggedContraction(), op.compute_dtype, out_dtype, precision, stacked)
    scales = scales_of(lax.stop_gradient(in_product(op.state.record)), spec)
    assert scales is not None
    scale = scales.operands["input"]
    if scale.ndim:
        raise ValueError(
            f"op has a scale for each of {scale.size} experts, but rows are sent with one scale: send them in high "
            "precision, or convert with scale_per_expert=False"
        )
    # If differentiated, the amax would become a sum over devices.
    amax = jnp.max(jnp.abs(round_to(lax.stop_gradient(rows), op.compute_dtype)), initial=0.0)
    axes = axes_of_parts(rows, scale)
    amax = lax.pmax(amax, axes) if axes else amax
    return _send(rows, scale, amax, spec, exchange, gradient_format)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _send(
    rows: Float[Array, "*rows inputs"],
    scale: Float32[Array, ""],
    amax: Float[Array, ""],
    spec: ProductSpec,
    exchange: Exchange,
    gradient_format: Format | None,
) -> Float[Array, "*received inputs"]:
    """Rounding counts as the identity, so the derivative is that of the exchange."""
    del gradient_format

    def data_of(x: Array) -> Array:
        scales, members = Scales({"input": scale}, None), Members(spec.ensemble)
        quantized = quantize_operand(x, "input", "fprop", scales, None, members, spec)
        return keep_cast(quantized.data)

    largest = jnp.abs(data_of(amax).astype(jnp.float32))
    values = exchange(data_of(round_to(rows, spec.compute_dtype))).astype(jnp.float32)
    exact = jnp.where(jnp.abs(values) == largest, jnp.sign(values) * amax.astype(jnp.float32), values * scale)
    return exact.astype(rows.dtype)


def _send_forward(
    rows: Array, scale: Array, amax: Array, spec: ProductSpec, exchange: Exchange, gradient_format: Format | None
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _send(rows, scale, amax, spec, exchange, gradient_format), (scale, amax, rows[..., :0])


def _send_backward(
    spec: ProductSpec,
    exchange: Exchange,
    gradient_format: Format | None,
    residuals: tuple[Array, Array, Array],
    grad: Array,
) -> tuple[Array, Array, Array]:
    del spec
    scale, amax, nothing = residuals

    def back(x: Array) -> Array:
        # JAX checks that the gradient varies over the same mesh axes as the rows.
        sent = as_varying(jnp.zeros((*nothing.shape[:-1], x.shape[-1]), x.dtype), (nothing,))
        (received,) = jax.linear_transpose(exchange, sent)(x)
        return received

    if gradient_format is None:
        received = back(grad)
    else:
        largest = jnp.max(jnp.abs(grad.astype(jnp.float32)), axis=-1, keepdims=True)
        # A smaller scale would be flushed to zero, and divided by.
        of_rows = jnp.maximum(largest / gradient_format.max, 1 / LARGEST_MULTIPLIER)
        of_rows = jnp.where(largest > 0, of_rows, 1.0)
        data = keep_cast(divide_by(grad, of_rows, gradient_format).data)
        received = (back(data).astype(jnp.float32) * back(of_rows)).astype(grad.dtype)
    return received, jnp.zeros_like(scale), jnp.zeros_like(amax)


_send.defvjp(_send_forward, _send_backward)
