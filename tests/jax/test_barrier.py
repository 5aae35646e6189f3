"""Which programs have a barrier that depends on what they are lowered for."""

import jax
import jax.numpy as jnp
import pytest

from haliax_fp8._jax.barrier import Programs, barrier_in


def lowered(programs, platforms, devices=1):
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    return jax.jit(lambda x: barrier_in(programs, x)).trace(x).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize(
    ("programs", "platforms", "devices", "expected"),
    [
        (Programs.FOR_NVIDIA_GPUS, ("cuda",), 1, True),
        (Programs.FOR_NVIDIA_GPUS, ("cuda",), 4, True),
        (Programs.FOR_NVIDIA_GPUS, ("cpu",), 1, False),
        (Programs.FOR_NVIDIA_GPUS, ("tpu",), 1, False),
        (Programs.FOR_NVIDIA_GPUS, ("rocm",), 1, False),
        # It is the same program for both.
        (Programs.FOR_NVIDIA_GPUS, ("cpu", "cuda"), 1, False),
        (Programs.FOR_ONE_DEVICE, ("tpu",), 1, True),
        (Programs.FOR_ONE_DEVICE, ("cuda",), 4, False),
        (Programs.FOR_SEVERAL_DEVICES, ("cuda",), 4, True),
        (Programs.FOR_SEVERAL_DEVICES, ("cpu",), 1, False),
    ],
)
def test_a_barrier_is_in_these_programs_alone(programs, platforms, devices, expected):
    assert ("optimization_barrier" in lowered(programs, platforms, devices)) == expected


def test_it_is_the_identity():
    x = jnp.arange(4.0)
    for programs in Programs:
        function = lambda x, programs=programs: barrier_in(programs, x)
        assert (function(x) == x).all() and (jax.vmap(function)(x) == x).all()
        out, tangent = jax.jvp(function, (x,), (2 * x,))
        assert (out == x).all() and (tangent == 2 * x).all()
