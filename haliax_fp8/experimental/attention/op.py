"""Fp8Attention: attention with FP8 products, and its state."""

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from haliax.state_dict import StateDict
from jaxtyping import Array, Float

from ..._arguments import require, require_bool
from ..._state.op_state import AbstractOp, OpState, leading_axes
from ...devices.device import Device
from ...formats import E4M3
from ...recipes.scaling import DelayedScaling, ObservedScaling
from ...recipes.scaling.amax_of_history import Percentile
from .emulated import TENSORS, AttentionSpec
from .primitive import FP8_ATTENTION, fp8_attention


HEAD_DIMS = (64, 128)
"""The supported sizes of heads."""


class Fp8Attention(AbstractOp):
    """A drop-in for `jax.nn.dot_product_attention` that multiplies in FP8. Experimental.

    `out = softmax(scale * q k^T) v`, with query, key, value, softmax and output in E4M3; in the backward pass the
    gradients of output, scores, query, key and value too. Each of the ten tensors has one scale, from the amaxes of
    earlier steps (delayed scaling). The forward pass rounds the softmax before it divides by the row's sum, with a
    scale of 1/448; the backward pass rounds it afterwards, with the scale of `weights`. On NVIDIA GPUs, Hopper or
    newer, this is cuDNN's fused attention, which keeps no scores in memory. On a CPU it is emulated with the same
    formats and scales, and keeps them. The gradient with respect to `state` is the state of the next step, as with
    `Fp8DotGeneral`.

    A program that compiles for a GPU may still fail to load there: only the GPU's own cuDNN knows whether it
    supports the call. Softmax weights in E4M3 have a relative error of up to 6 %, and those below 2e-6 of the largest
    are zero: compare the loss with that of bfloat16 before you train with it.

    Args:
        state: Scales and histories of the ten tensors.
        scaling: The scaling of all ten; an `ObservedScaling` computes in float32 and records amaxes for `calibrate`.
        emulate: Whether to emulate on accelerators too, with every score in memory: slower than bfloat16.
        stack: Axes of the layer stacks that the op's layer is in.

    Raises:
        ValueError: If an argument has the wrong type, or the default device has no such attention and `emulate` is
            False. For errors of calls, see `__call__`.

    References:
        cuDNN's documentation of SDPA in FP8 and its backward pass; FlashAttention-3 (arXiv:2407.08608), section 3.3.

    Example:
        >>> from haliax_fp8 import DelayedScaling
        >>> from haliax_fp8.experimental.attention import Fp8Attention
        >>> attend = Fp8Attention.init(scaling=DelayedScaling(amax_history_length=4))
        >>> q, kv = jnp.ones((2, 16, 4, 64)), jnp.ones((2, 16, 1, 64))
        >>> attend(q, kv, kv, is_causal=True).shape
        (2, 16, 4, 64)
        >>> new = jax.grad(lambda op: op(q, kv, kv).sum())(attend)
        >>> float(new.amax_history("query")[0]), float(new.amax_history("weights")[0])
        (1.0, 0.0625)
    """

    operand_names: ClassVar[tuple[str, ...]] = TENSORS

    state: OpState | None
    scaling: DelayedScaling | ObservedScaling = eqx.field(static=True)
    emulate: bool = eqx.field(static=True, default=False)
    stack: tuple[hax.Axis, ...] = eqx.field(static=True, default=())

    @staticmethod
    def init(
        *, scaling: DelayedScaling | None = None, emulate: bool = False, stack: tuple[hax.Axis, ...] = ()
    ) -> "Fp8Attention":
        """An op before its first step.

        Args:
            scaling: See the class; the default remembers 1024 steps.
            emulate: See the class.
            stack: See the class; the op's state gets these axes too.
        """
        scaling = DelayedScaling() if scaling is None else scaling
        require("scaling", scaling, DelayedScaling, "DelayedScaling(amax_history_length=16)", of="Fp8Attention")
        require_bool("emulate", emulate, of="Fp8Attention")
        if isinstance(scaling.amax_compute, Percentile):
            raise ValueError(
                f"scaling={scaling} of Fp8Attention takes percentiles, but cuDNN returns amaxes only; use "
                "MaxOfHistory(), MostRecent(), RecoveringMax() or MovingAverage()"
            )
        if not emulate and (missing := _missing(Device.default())) is not None:
            raise ValueError(
                f"Fp8Attention needs cuDNN's FP8 attention, and the default device has none: {missing}. Use "
                "jax.nn.dot_product_attention, or request emulation with Fp8Attention.init(emulate=True)"
            )
        state = OpState.of((scaling,) * len(TENSORS), (E4M3.max,) * len(TENSORS), stack)
        return Fp8Attention(state, scaling, emulate, stack)

    @jax.named_scope(FP8_ATTENTION)
    def __call__(
        self,
        query: Float[Array, "*batch tokens heads head_dim"],
        key: Float[Array, "*batch keys kv_heads head_dim"],
        value: Float[Array, "*batch keys kv_heads head_dim"],
        bias: None = None,
        mask: None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
    ) -> Float[Array, "*batch tokens heads head_dim"]:
        """Attends as `jax.nn.dot_product_attention` does.

        Args:
            query: The queries; `batch` is one axis or none.
            key: The keys; each of its heads serves `heads / kv_heads` heads of the query.
            value: The values.
            bias: Must be None: cuDNN's FP8 attention does not support it.
            mask: Must be None, for the same reason.
            scale: Multiplies the scores; None for `1 / sqrt(head_dim)`.
            is_causal: Whether a query sees only keys up to its own position.

        Returns:
            The output in the dtype of the query.

        Raises:
            ValueError: If an argument is not supported, or the operands do not fit.
        """
        for name, argument in (("bias", bias), ("mask", mask)):
            if argument is not None:
                raise ValueError(
                    f"{name} was passed to an Fp8Attention, but cuDNN's FP8 attention does not support it; use "
                    "is_causal=True, or jax.nn.dot_product_attention for this layer"
                )
        require_bool("is_causal", is_causal, of="Fp8Attention")
        operands = {"query": query, "key": key, "value": value}
        _check(operands, is_causal=is_causal)
        if self.state is None:
            raise ValueError(
                "an Fp8Attention was called without its state; if the model was split (eqx.partition, eqx.filter), "
                "join its parts with eqx.combine first"
            )
        if leading := leading_axes(self.state):
            raise ValueError(
                f"an Fp8Attention was called with the state of {leading} layers of an ensemble or a stack; call it "
                "under eqx.filter_vmap or jax.vmap, or in a scan over the stack, so that each layer gets its own state"
            )
        spec = AttentionSpec(
            scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            is_causal=is_causal,
            out_dtype=np.dtype(query.dtype),
            rounds=self.scaling.quantizes,
            emulate=self.emulate,
        )
        batched = [x if x.ndim == 4 else x[None] for x in operands.values()]
        out = fp8_attention(batched[0], batched[1], batched[2], self.state.record, spec)
        return out if query.ndim == 4 else out[0]

    @property
    def observed(self) -> "Fp8Attention":
        """This op in float32, recording the amaxes that its state needs."""
        scaling = self.scaling if isinstance(self.scaling, ObservedScaling) else ObservedScaling(self.scaling)
        state = self.state and dataclasses.replace(self.state, scalings=(scaling,) * len(TENSORS))
        return dataclasses.replace(self, scaling=scaling, state=state)

    def scale(self, tensor: str) -> Array:
        """The scale for the next use of a tensor, `[*stack]`; NaN if anything but its own update changed it.

        Args:
            tensor: `query`, `key`, `value`, `weights`, `output`, `output_grad`, `scores_grad`, `query_grad`,
                `key_grad` or `value_grad`.
        """
        return self._readable_state.scale[..., _row(tensor)]

    def amax_history(self, tensor: str) -> Array:
        """The amaxes of a tensor's past steps, `[*stack, history]`.

        Args:
            tensor: As in `scale`.
        """
        scaling = self.scaling.scaling if isinstance(self.scaling, ObservedScaling) else self.scaling
        assert isinstance(scaling, DelayedScaling)
        return self._readable_state.array[..., _row(tensor), 1 : 1 + scaling.amax_history_length]

    @property
    def _readable_state(self) -> OpState:
        if self.state is None or self.state.is_record:
            raise ValueError(
                "the state of an Fp8Attention was read where it is absent: inside a function that filter_grad "
                "differentiates, or from a part of a model; read it from the whole model, outside the function"
            )
        return self.state

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        """One line in printed models."""
        return wl.TextDoc(f"Fp8Attention({type(self.scaling).__name__} E4M3{', emulated' if self.emulate else ''})")

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """Empty: a state dict holds weights only."""
        return {}

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "Fp8Attention":
        """This op, unchanged; see `to_state_dict`."""
        return self


def _missing(device: Device) -> str | None:
    """Why a device has no such attention; None if it has one, or is a CPU, which emulates it."""
    if device.emulates:
        return None
    if device.platform != "cuda":
        return f"{device.kind} is not an NVIDIA GPU"
    if not device.is_cuda_from(9.0):
        return f"it needs compute capability 9.0 (Hopper), but {device.kind} has {device.compute_capability}"
    return None


def _row(tensor: str) -> int:
    if tensor not in TENSORS:
        raise ValueError(f"tensor={tensor!r} is not one of {TENSORS}")
    return TENSORS.index(tensor)


def _check(operands: dict[str, Any], *, is_causal: bool) -> None:
    """Raises unless query, key and value are arrays that fit together, with sizes that the cuDNN kernels support."""
    for name, x in operands.items():
        if not isinstance(x, jax.Array | np.ndarray) or not jnp.issubdtype(x.dtype, jnp.floating):
            kind = getattr(x, "dtype", type(x).__name__)
            raise ValueError(f"{name} of an Fp8Attention is {kind}; pass a floating-point array")
        if x.ndim not in (3, 4) or x.ndim != operands["query"].ndim:
            raise ValueError(
                f"{name} of an Fp8Attention has shape {x.shape}; all three must be [batch, tokens, heads, head_dim], "
                "with or without the batch (use jax.vmap for more axes)"
            )
        if x.shape[-1] not in HEAD_DIMS:
            raise ValueError(
                f"{name} of an Fp8Attention has head_dim={x.shape[-1]}, not one of {HEAD_DIMS}; use "
                "jax.nn.dot_product_attention in bfloat16 for such heads"
            )
        if any(jax.typeof(x).sharding.spec):
            raise ValueError(
                f"{name} of an Fp8Attention is {jax.typeof(x)}: it is sharded over explicit mesh axes, which are not "
                "supported yet; use a mesh with axis_types=AxisType.Auto"
            )
    query, key, value = operands.values()
    fit = key.shape == value.shape and query.shape[-1] == key.shape[-1] and query.shape[:-3] == key.shape[:-3]
    if not fit or key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} of an Fp8Attention do not fit: key and "
            "value must have the same shape, and a number of heads that divides the query's"
        )
    if is_causal and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} tokens and key {key.shape[-3]}, with is_causal=True; a causal Fp8Attention "
            "needs as many keys as queries"
        )
