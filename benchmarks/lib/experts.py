"""A layer of experts: output and gradients of its weights and inputs, in bf16 and with `haliax_fp8`."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from haliax_fp8 import Recipe, fp8_linear_layers
from haliax_fp8.recipes.scaling import HighPrecision


GROUPED_BF16 = Recipe.of(HighPrecision())
"""The same kernels as for FP8, of operands in bf16."""

WAYS: Mapping[str, tuple[str | Recipe | None, bool]] = {
    "bf16": (None, False),
    "bf16, grouped": (GROUPED_BF16, False),
    "bf16, use_gmm": (None, True),
    "haliax_fp8": ("delayed", False),
    "haliax_fp8, rowwise": ("rowwise", False),
}
"""The recipe, and whether the layer has `use_gmm`, of each."""


def layer_and_batch(
    recipe: str | Recipe | None, experts: int, rows: int, inputs: int, outputs: int, *, use_gmm: bool
) -> tuple[Any, hax.NamedArray, hax.NamedArray, jax.Array]:
    """The layer, rows, the sizes of groups (nearly alike), and the output's gradient."""
    Experts, Rows, In, Out = hax.make_axes(experts=experts, rows=rows, inputs=inputs, outputs=outputs)
    layer_key, x_key, grad_key = jax.random.split(jax.random.key(0), 3)
    layer = hnn.MoELinear.init(Experts, In, Out, key=layer_key, use_bias=False, use_gmm=use_gmm)
    layer = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer)
    layer = layer if recipe is None else fp8_linear_layers(layer, recipe=recipe)
    x = hax.random.normal(x_key, (Rows, In)).astype(jnp.bfloat16)
    grad = jax.random.normal(grad_key, (rows, outputs)).astype(jnp.bfloat16)
    # Groups whose sizes no tile divides.
    even = rows // experts
    sizes = [even + (1 - 2 * (expert % 2)) * (even // 5) for expert in range(experts)]
    return layer, x, hax.named(jnp.array(sizes, jnp.int32), Experts), grad


def gradients(layer: Any, x: hax.NamedArray, sizes: hax.NamedArray, grad: jax.Array) -> tuple[jax.Array, Any]:
    """The output; and the gradients of the layer, state included, and of the rows."""

    def loss(args: tuple[Any, hax.NamedArray]) -> tuple[jax.Array, jax.Array]:
        layer, x = args
        out = layer(x, sizes).array
        return (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(), out

    (_, out), grads = eqx.filter_value_and_grad(loss, has_aux=True)((layer, x))
    return out, grads


@contextlib.contextmanager
def mesh_of(layer: Any) -> Iterator[None]:
    """A mesh of one device for a layer with `use_gmm`, whose Pallas kernel Haliax calls in one."""
    if not layer.use_gmm:
        yield
        return
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))), hax.axis_mapping({}):
        yield
