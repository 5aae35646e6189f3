"""`rematerialized`: the same values, nothing but inputs kept, more exact where asked to compute in float32."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def pair(dtype=jnp.bfloat16):
    return tuple(jax.random.normal(jax.random.key(i), (16, 64)).astype(dtype) for i in range(2))


def kept(function, *args):
    """Shapes and dtypes of what the backward pass reads."""
    return sorted((x.shape, x.dtype.name) for x in jax.tree.leaves(jax.vjp(function, *args)[1]) if x.ndim)


def test_keeps_inputs_alone():
    args = pair()
    inputs = sorted((x.shape, x.dtype.name) for x in args)
    assert kept(fp8.memory.rematerialized(swiglu), *args) == inputs
    assert kept(fp8.memory.rematerialized(swiglu, compute_dtype=jnp.float32), *args) == inputs
    assert len(kept(swiglu, *args)) > 2


def test_is_the_function_bit_for_bit():
    args, grad = pair(), pair()[0]
    (out, pullback), (expected, expected_pullback) = (
        jax.vjp(f, *args) for f in (fp8.memory.rematerialized(swiglu), swiglu)
    )
    np.testing.assert_array_equal(out, expected)
    jax.tree.map(np.testing.assert_array_equal, pullback(grad), expected_pullback(grad))


def in_float64(gate, up, grad):
    gate, up, grad = (np.asarray(x, np.float64) for x in (gate, up, grad))
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    return silu * up, grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


def test_float32_rounds_once():
    """Within half a unit in the last place of bfloat16, and what float32 adds."""
    gate, up = pair()
    out, pullback = jax.vjp(fp8.memory.rematerialized(swiglu, compute_dtype=jnp.float32), gate, up)
    plain, plain_pullback = jax.vjp(swiglu, gate, up)
    worst = 0.0
    for got, less, exact in zip(
        (out, *pullback(up)), (plain, *plain_pullback(up)), in_float64(gate, up, up), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        # The derivative of silu is a difference near its zero, at gate = -1.28.
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8 * (1 + 2**-6), atol=1e-5)
        worst = max(worst, float(np.max(np.abs(np.asarray(less, np.float64) - exact) / np.abs(exact))))
    assert worst > 1.5 * 2**-8, "bfloat16 rounds more than once"


@pytest.mark.more
def test_modules_keep_their_parameters_gradients():
    Embed, Batch = hax.make_axes(embed=32, batch=8)
    norm = hnn.RmsNorm.init(Embed, use_bias=False)
    norm = jax.tree.map(lambda x: (x * 1.5).astype(jnp.bfloat16), norm)
    x = hax.random.normal(jax.random.key(0), (Batch, Embed), dtype=jnp.bfloat16)

    def gradients(wrap):
        weights = hax.random.normal(jax.random.key(1), (Batch, Embed))
        loss = lambda model, x: (wrap(model)(x).astype(jnp.float32) * weights).sum().scalar()
        return jax.tree.leaves(eqx.filter_grad(lambda args: loss(*args))((norm, x)))

    plain = gradients(lambda norm: norm)
    jax.tree.map(np.testing.assert_array_equal, gradients(fp8.memory.rematerialized), plain)
    in_float32 = gradients(lambda norm: fp8.memory.rematerialized(norm, compute_dtype=jnp.float32))
    for a, b in zip(in_float32, plain, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.05, atol=0.05 * float(abs(b).max()))


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_under_transformations(dtype):
    f = fp8.memory.rematerialized(lambda x: jax.nn.gelu(x), compute_dtype=dtype)
    x = jax.random.normal(jax.random.key(0), (4, 16))
    gradient = jax.grad(lambda x: f(x).sum())
    np.testing.assert_allclose(jax.vmap(gradient)(x), jax.jit(gradient)(x), rtol=1e-6, atol=1e-7)
    tangent = jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(tangent, gradient(x), rtol=1e-5, atol=1e-6)


@pytest.mark.more
def test_a_scan_stacks_the_inputs_alone():
    """Instead of whatever a norm and an activation compute on the way."""
    Embed, Blocks, Batch = hax.make_axes(embed=32, block=3, batch=8)

    class Block(eqx.Module):
        norm: hnn.RmsNorm
        up: hnn.Linear
        down: hnn.Linear
        wrap: object = eqx.field(static=True)

        @staticmethod
        def init(wrap, *, key):
            Inner = Embed.alias("inner")
            up = hnn.Linear.init(Embed, Inner, key=key, use_bias=False)
            down = hnn.Linear.init(Inner, Embed, key=key, use_bias=False)
            return Block(hnn.RmsNorm.init(Embed, use_bias=False), up, down, wrap)

        def __call__(self, x):
            h = self.up(self.wrap(self.norm)(x))
            return x + self.down(self.wrap(hnn.gelu)(h))

    def stacked(wrap):
        model = hnn.Stacked.init(Blocks, Block)(wrap, key=jax.random.split(jax.random.key(0), Blocks.size))
        model = fp8.fp8_linear_layers(model)
        x = hax.random.normal(jax.random.key(1), (Batch, Embed))
        loss = lambda model, x: (model.fold(x) ** 2).mean().scalar()
        step = fp8.filter_value_and_grad(loss, recompute_in_scans=False)
        arrays, static = eqx.partition((model, x), eqx.is_array)
        jaxpr = jax.make_jaxpr(lambda arrays: eqx.filter(step(*eqx.combine(arrays, static)), eqx.is_array))(arrays)
        (forward, *_) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        wide = [v.aval for v in forward.outvars if v.aval.shape == (Blocks.size, Batch.size, Embed.size)]
        return [aval.dtype.name for aval in wide], step(model, x)

    plain, expected = stacked(lambda f: f)
    found, got = stacked(fp8.memory.rematerialized)
    # The block's input and what goes into the activation; and the inputs of two products.
    assert sorted(found) == ["float32"] * 2 + ["float8_e4m3fn"] * 2 and len(plain) > 6
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_scales_stay_as_they_are():
    """Of FP8 layers in a module that computes in bfloat16."""
    Embed, Batch = hax.make_axes(embed=16, batch=4)
    layer = fp8.fp8_linear_layers(hnn.Linear.init(Embed, Embed.alias("out"), key=jax.random.key(0)))
    x = hax.ones((Batch, Embed)) * 1.001
    loss = lambda layer: fp8.memory.rematerialized(layer, compute_dtype=jnp.bfloat16)(x).sum().scalar()
    (rounded, gradient) = eqx.filter_value_and_grad(loss)(layer)
    assert gradient.dot_general.state.table.array.dtype == jnp.float32 and rounded.dtype == jnp.float32
    kernel = np.abs(np.asarray(layer.weight.array.astype(jnp.bfloat16), np.float32)).max()
    assert gradient.dot_general.amax_history("kernel")[0] == kernel


def test_refuses_what_is_no_floating_dtype():
    with pytest.raises(ValueError, match="compute_dtype=.*is not a floating dtype"):
        fp8.memory.rematerialized(jax.nn.gelu, compute_dtype=jnp.int32)
