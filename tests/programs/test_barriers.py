"""Barriers that depend on what a program is lowered for: which programs have them."""

import jax
import jax.numpy as jnp
import pytest

from haliax_fp8._jax.xla import gathered_once, read_by_activation, transposed_from_fp8, transposed_separately_on_one


def lowered(function, platforms, devices=1):
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    return jax.jit(function).trace(x).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize(
    ("function", "platforms", "devices", "expected"),
    [
        (transposed_from_fp8, ("cuda",), 1, True),
        (transposed_from_fp8, ("cuda",), 4, True),
        (transposed_from_fp8, ("cpu",), 1, False),
        (transposed_from_fp8, ("tpu",), 1, False),
        (transposed_from_fp8, ("rocm",), 1, False),
        # It is the same program for both.
        (transposed_from_fp8, ("cpu", "cuda"), 1, False),
        (transposed_separately_on_one, ("tpu",), 1, True),
        (transposed_separately_on_one, ("cuda",), 4, False),
        (gathered_once, ("cuda",), 4, True),
        (gathered_once, ("cpu",), 1, False),
        (lambda x: read_by_activation(x, jnp.sum(x)), ("cuda",), 1, True),
        (lambda x: read_by_activation(x, jnp.sum(x)), ("cpu",), 1, False),
        # What does not widen is mostly added to a residual.
        (lambda x: read_by_activation(x * 2, x), ("cuda",), 1, False),
    ],
)
def test_a_barrier_is_in_these_programs_alone(function, platforms, devices, expected):
    assert ("optimization_barrier" in lowered(function, platforms, devices)) == expected


@pytest.mark.parametrize("function", [transposed_from_fp8, transposed_separately_on_one, gathered_once])
def test_it_is_the_identity(function):
    x = jnp.arange(4.0)
    assert (function(x) == x).all() and (jax.vmap(function)(x) == x).all()
    out, tangent = jax.jvp(function, (x,), (2 * x,))
    assert (out == x).all() and (tangent == 2 * x).all()
