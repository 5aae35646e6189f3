"""What `_jax/xla.py` needs of JAX: the identity everywhere. `test_compiled_widened.py` reads the programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8._jax.xla import keep_cast, keep_cast_in_parts


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz])
def test_every_byte_stays(dtype):
    every = np.arange(256, dtype=np.uint8).view(dtype)
    for function in (keep_cast, jax.jit(keep_cast), jax.jit(jax.vmap(keep_cast))):
        assert np.asarray(function(jnp.asarray(every))).tobytes() == every.tobytes()
    with jax.disable_jit():
        assert np.asarray(jax.jit(keep_cast)(jnp.asarray(every))).tobytes() == every.tobytes()


def test_what_is_in_high_precision_passes():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        assert not jax.make_jaxpr(keep_cast)(jnp.ones(3, dtype)).eqns


def test_it_has_the_derivative_of_the_identity():
    """As the casts around it have; a bit pattern alone would have none."""
    cast = lambda x: keep_cast(x.astype(jnp.float8_e4m3fn)).astype(jnp.float32)
    x = jnp.array([0.3, 1.7])
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: (2.0 * cast(x)).sum()))(x), [2.0, 2.0])
    _, tangent = jax.jvp(cast, (x,), (jnp.ones(2),))
    np.testing.assert_array_equal(tangent, [1.0, 1.0])
    np.testing.assert_array_equal(jax.vmap(jax.grad(cast))(x), [1.0, 1.0])


def test_on_devices_that_hold_parts():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(8.0).astype(jnp.float8_e4m3fn)
    for check in (True, False):
        part = jax.shard_map(keep_cast, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=check)
        assert (jax.jit(part)(x) == x).all()


@pytest.mark.parametrize("devices, smallest, kept", [(1, 1, True), (1, 2, False), (4, 4, True), (4, 5, False)])
def test_parts_that_may_have_a_single_element(devices, smallest, kept):
    """A program for several devices may leave one of them one element of an axis."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float8_e4m3fn, sharding=divided)
    text = jax.jit(lambda x: keep_cast_in_parts(x, smallest)).lower(x).as_text()
    assert ("stablehlo.xor" in text) == kept
    shard = jax.P("data")
    part = jax.shard_map(lambda x: keep_cast_in_parts(x, 2), mesh=mesh, in_specs=shard, out_specs=shard)
    assert "stablehlo.xor" not in jax.jit(part).lower(x).as_text()


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_it_is_exported(platform):
    exported = jax.export.export(jax.jit(keep_cast), platforms=[platform])(jax.ShapeDtypeStruct((4,), jnp.float8_e5m2))
    assert "stablehlo.xor" in exported.mlir_module() and "optimization_barrier" in exported.mlir_module()
