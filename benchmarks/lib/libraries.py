"""What is compared: bf16, `haliax_fp8`, marin-haliax's own FP8, and Flax's; in the same model and on the same arrays.

Flax has no layers for Haliax's models, so its op is put where Haliax keeps its own: `FlaxOp` applies Flax's module
`Fp8DirectDotGeneralOp`, unchanged, to the operands of `haliax.nn.Linear`. So only the op differs; Flax's
own layers are measured in the benchmark of a single layer, see `lib/cases.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

import haliax_fp8 as fp8


class FlaxOp(haxq.CustomGradientAccumulation):
    """`flax.linen.fp8_ops.Fp8DirectDotGeneralOp` with its variables, callable as Haliax's ops are."""

    variables: dict[str, jax.Array]

    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Any:
        """Flax's op takes no other arguments: it decides on precision and result type itself."""
        variables = {fp8_ops.OVERWRITE_WITH_GRADIENT: self.variables}
        return fp8_ops.Fp8DirectDotGeneralOp().apply(variables, lhs, rhs, dimension_numbers)


_VARIABLES = (
    "input_scale",
    "kernel_scale",
    "output_grad_scale",
    "input_amax_history",
    "kernel_amax_history",
    "output_grad_amax_history",
)


def _with_haliax(model: Any) -> Any:
    return haxq.quantize_linear_layers(model, haxq.QuantizationConfig(fp8=True))


def _with_flax(model: Any) -> Any:
    # Haliax's op is a copy of Flax's: the arrays that it keeps have the same names, shapes and first values.
    is_op = lambda node: isinstance(node, haxq.Fp8DotGeneralOp)
    replace = lambda node: FlaxOp({name: getattr(node, name) for name in _VARIABLES}) if is_op(node) else node
    return jax.tree.map(replace, _with_haliax(model), is_leaf=is_op)


@dataclasses.dataclass(frozen=True)
class Library:
    """One way to multiply.

    Args:
        convert: Makes a model in bf16 multiply so.
        gradient: `eqx.filter_grad`, or what the library has instead.
        apply: The model after a step, from updates and overwrites.
    """

    convert: Callable[[Any], Any]
    gradient: Callable[..., Callable[..., Any]]
    apply: Callable[[Any, Any, Any], Any]


LIBRARIES: dict[str, Library] = {
    "bf16": Library(lambda model: model, eqx.filter_grad, haxq.apply_updates),
    "haliax_fp8": Library(fp8.fp8_linear_layers, fp8.filter_grad, fp8.apply_updates),
    "haliax.quantization": Library(_with_haliax, eqx.filter_grad, haxq.apply_updates),
    "flax": Library(_with_flax, eqx.filter_grad, haxq.apply_updates),
}
"""By name; each with the gradient that its training step takes."""


def in_bf16(model: Any) -> Any:
    """A plain model in bf16, before conversion: the state of FP8 layers stays float32."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
