"""Gradients exported by `jax.export`: one program for several platforms and batch sizes, with the same bits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, unchecked
from jax import export

import haliax_fp8 as fp8


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [("delayed", "rows"), ("current", "rows"), ("deepseek", "128*rows"), ("mxfp8", "128*rows")],
)
def test_one_program_for_all_batches_and_platforms(recipe, rows):
    model = fp8.fp8_linear_layers(eqx.nn.MLP(64, 32, 128, 1, key=jax.random.key(0)), fp8.Fp8Config(recipe=recipe))
    weights, rest = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree.flatten(weights)

    @jax.jit
    def gradients(leaves, x):
        model = eqx.combine(jax.tree.unflatten(structure, leaves), rest)
        loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
        return jax.tree.leaves(fp8.filter_grad(loss)(model, x))

    (rows,) = export.symbolic_shape(rows)
    with unchecked():  # jaxtyping takes sizes for numbers
        exported = export.export(gradients, platforms=("cpu", "cuda", "tpu"))(
            leaves, jax.ShapeDtypeStruct((rows, 64), jnp.float32)
        )
    for size in (128, 256):
        x = jax.random.normal(jax.random.key(1), (size, 64))
        assert_same(exported.call(leaves, x), gradients(leaves, x))
