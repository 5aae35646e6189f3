"""Fp8Attention against a float64 model of what cuDNN documents, and the errors for what it does not take."""

import dataclasses
import inspect

import attention_reference
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8
from haliax_fp8.devices import Device
from haliax_fp8.experimental.attention import Fp8Attention
from haliax_fp8.experimental.attention.emulated import TENSORS
from haliax_fp8.recipes import Percentile


LENGTH = 4
E4M3_STEP = 2.0**-4  # the largest relative error of rounding to three bits of mantissa


def new_op(**options):
    return Fp8Attention.init(scaling=fp8.DelayedScaling(amax_history_length=LENGTH), **options)


def operands(seed=0, batch=2, tokens=12, heads=4, kv_heads=2, head_dim=64, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    query, grad = (jax.random.normal(k, (batch, tokens, heads, head_dim), dtype) for k in keys[:2])
    key, value = (jax.random.normal(k, (batch, tokens, kv_heads, head_dim), dtype) for k in keys[2:])
    return query, key, value, grad


@eqx.filter_jit
def gradients(op, query, key, value, grad, is_causal):
    """The output, and the gradients of the op, query, key and value."""

    def loss(args):
        out = args[0](*args[1:], is_causal=is_causal)
        return (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(), out

    of_all, out = fp8.filter_grad(loss, has_aux=True)((op, query, key, value))
    return out, *of_all


def trained(op, *arrays, steps=3, **options):
    """The op after a few steps, whose scales fit the tensors."""
    for _ in range(steps):
        op = dataclasses.replace(op, state=op.state.overwritten_by(gradients(op, *arrays, **options)[1].state))
    return op


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(
    ("is_causal", "heads", "kv_heads", "head_dim"), [(True, 4, 2, 64), (False, 3, 1, 64), (True, 2, 2, 128)]
)
def test_it_computes_what_cudnn_documents(is_causal, heads, kv_heads, head_dim):
    arrays = operands(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    # Not the scales that training finds: the first output of a causal attention is a value, and at a scale made from
    # another value it often lies in the middle between two numbers of the format.
    ones = dict.fromkeys(TENSORS, 1.0)
    amaxes = attention_reference.attention(*arrays, ones, is_causal=is_causal, rounds=False)[-1]
    scales = {name: float(np.float32(1.1 * amaxes[name] / 448.0)) for name in TENSORS}
    op = new_op()
    op = dataclasses.replace(op, state=op.state.with_scale(jnp.asarray([*scales.values()], jnp.float32)))
    out, of_op, *of_operands = gradients(op, *arrays, is_causal)
    *expected, amaxes = attention_reference.attention(*arrays, scales, is_causal=is_causal)
    *exact, _ = attention_reference.attention(*arrays, scales, is_causal=is_causal, rounds=False)
    for found, rounded, unrounded in zip((out, *of_operands), expected, exact, strict=True):
        # Float32 may put a value on the other side of a rounding boundary: one step of the format, for a few values.
        assert distance(found, rounded) < 0.05 * E4M3_STEP
        # A value is rounded up to five times on its way, each time by less than half of `E4M3_STEP` on average.
        assert 0.1 * E4M3_STEP < distance(found, unrounded) < 5 * E4M3_STEP / 2
    for name in TENSORS:
        np.testing.assert_allclose(of_op.amax_history(name)[0], amaxes[name], rtol=0.05 * E4M3_STEP, err_msg=name)


def test_without_rounding_it_is_attention():
    """What calibration runs, in float32, against JAX's own attention."""
    query, key, value, grad = operands()
    out, _, *found = gradients(new_op().observed, query, key, value, grad, True)
    attend = lambda *args: jax.nn.dot_product_attention(*args, is_causal=True)
    expected, pull = jax.vjp(attend, query, key, value)
    for a, b in zip((out, *found), (expected, *pull(grad)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.more
def test_forward_mode_is_the_derivative_at_the_quantized_operands():
    arrays = operands(tokens=6)
    op = trained(new_op(), *arrays, is_causal=True)
    primals, tangents = arrays[:3], operands(seed=1, tokens=6)[:3]
    _, found = jax.jvp(lambda *args: op(*args, is_causal=True), primals, tangents)
    _, expected = jax.jvp(lambda *args: jax.nn.dot_product_attention(*args, is_causal=True), primals, tangents)
    assert distance(found, expected) < 3 * E4M3_STEP


def test_a_second_derivative_is_refused():
    query, key, value, _ = operands(tokens=4)
    op = new_op()
    with pytest.raises(ValueError, match="differentiated twice"):
        jax.grad(lambda q: jax.grad(lambda q: op(q, key, value).sum())(q).sum())(query)


@pytest.mark.more
def test_bfloat16_and_no_batch():
    query, key, value, grad = (x[0] for x in operands(dtype=jnp.bfloat16))
    op = trained(new_op(), *(x[None] for x in (query, key, value, grad)), is_causal=True)
    out, _, *found = gradients(op, query, key, value, grad, True)
    batched, _, *expected = gradients(op, *(x[None] for x in (query, key, value, grad)), True)
    for a, b in zip((out, *found), (batched, *expected), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a, b[0])


@pytest.mark.more
def test_scores_that_are_not_finite_are_seen():
    query, key, value, grad = operands(batch=1, tokens=4)
    op = new_op()
    out, of_op, *_ = gradients(op, query.at[0, 0, 0, 0].set(jnp.inf), key, value, grad, False)
    assert bool(jnp.isnan(out).any())
    assert float(op.state.overwritten_by(of_op.state).scale[TENSORS.index("query")]) == 1.0


# --- Calibration, and a model that trains -----------------------------------------------------------------------------


@pytest.mark.more
def test_calibration_fills_all_ten_histories():
    query, key, value, grad = operands()
    loss = lambda op, query: (op(query, key, value, is_causal=True) * grad).sum()
    op = fp8.calibrate(new_op(), loss, [(query,)])
    *_, amaxes = attention_reference.attention(
        query, key, value, grad, dict.fromkeys(TENSORS, 1.0), is_causal=True, rounds=False
    )
    for name in TENSORS:
        np.testing.assert_allclose(op.amax_history(name)[0], amaxes[name], rtol=1e-4, err_msg=name)
    assert op.scaling == new_op().scaling


class Model(eqx.Module):
    """A layer of attention with two heads, on bytes."""

    embedding: jax.Array
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    attend: Fp8Attention | None

    def __call__(self, tokens):
        x = self.embedding[tokens]
        query, key, value = jnp.split(jax.vmap(jax.vmap(self.qkv))(x).reshape(*x.shape[:2], 6, 64), 3, axis=2)
        attend = jax.nn.dot_product_attention if self.attend is None else self.attend
        mixed = attend(query, key, value, is_causal=True).reshape(*x.shape[:2], -1)
        return (x + jax.vmap(jax.vmap(self.out))(mixed)) @ self.embedding.T


def copying_loss(model, tokens):
    """The second half of each sequence repeats the first: only attention can know it."""
    scores = jax.nn.log_softmax(model(tokens)[:, :-1].astype(jnp.float32))
    half = tokens.shape[1] // 2
    known = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2)[:, half:, 0]
    return -known.mean()


@pytest.mark.more
def test_a_transformer_trains_as_with_bfloat16_attention():
    import optax

    first = jax.random.randint(jax.random.key(3), (64, 16, 8), 0, 16)
    batches = jnp.concatenate([first, first], axis=2)

    def final_loss(attend):
        keys = jax.random.split(jax.random.key(0), 3)
        width = 64
        model = Model(
            jax.random.normal(keys[0], (16, width)) * 0.3,
            eqx.nn.Linear(width, 6 * 64, key=keys[1]),
            eqx.nn.Linear(2 * 64, width, key=keys[2]),
            attend,
        )
        step = fp8.TrainStep(copying_loss, optax.adam(3e-3))
        state = step.init(model)
        for batch in [*batches] * 4:
            model, state, metrics = step(model, state, batch)
        return float(metrics["loss"])

    with jax.numpy_dtype_promotion("standard"):  # Optax divides by a power of its counter
        exact, low = final_loss(None), final_loss(new_op())
    assert low < 1.05 * exact


# --- Errors -----------------------------------------------------------------------------------------------------------


ZEROS = jnp.zeros((1, 4, 2, 64))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((jnp.zeros((1, 4, 2, 96)),) * 3, {}, "head_dim=96, not one of"),
        ((ZEROS, jnp.zeros((1, 4, 3, 64)), jnp.zeros((1, 4, 3, 64))), {}, "a number of heads that divides"),
        ((ZEROS, ZEROS, ZEROS[:, :2]), {}, "do not fit"),
        ((ZEROS, ZEROS[0], ZEROS[0]), {}, "or without the batch"),
        ((ZEROS.astype(jnp.int32),) * 3, {}, "is int32; pass a floating-point array"),
        (([1.0], ZEROS, ZEROS), {}, "is list; pass a floating-point array"),
        ((ZEROS[:, :2], ZEROS, ZEROS), {"is_causal": True}, "needs as many keys as queries"),
        ((ZEROS,) * 3, {"is_causal": 1}, "is_causal=1"),
        ((ZEROS, ZEROS, ZEROS, ZEROS), {}, "bias was passed"),
        ((ZEROS,) * 3, {"mask": jnp.ones((4, 4), bool)}, "mask was passed"),
    ],
)
def test_what_it_does_not_take(arguments, options, message):
    # Not through jaxtyping, which in tests would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(Fp8Attention.__call__)(new_op(), *arguments, **options)


def test_what_an_op_cannot_be_made_of():
    with pytest.raises(ValueError, match="takes percentiles"):
        Fp8Attention.init(scaling=fp8.DelayedScaling(amax_compute=Percentile(99.0)))
    for device, message in (("a100", "compute capability 9.0"), ("tpu7x", "not an NVIDIA GPU")):
        with Device.by_name(device).as_default():
            with pytest.raises(ValueError, match=message):
                Fp8Attention.init()
            assert Fp8Attention.init(emulate=True).emulate
    with Device.by_name("h100").as_default():
        assert not Fp8Attention.init().emulate


def test_a_program_for_another_platform_is_refused():
    query, key, value, _ = operands()
    lower = lambda op: jax.jit(lambda q: op(q, key, value)).trace(query).lower(lowering_platforms=("tpu",))
    with pytest.raises(ValueError, match="without cuDNN's FP8 attention"):
        lower(new_op())
    assert "f8E4M3FN" in lower(new_op(emulate=True)).as_text()


def test_state_is_named_and_read():
    op = new_op(stack=(hax.Axis("layers", 3),))
    assert op.scale("scores_grad").shape == (3,) and op.amax_history("output").shape == (3, LENGTH)
    assert repr(op) == "Fp8Attention(DelayedScaling E4M3)"
    with pytest.raises(ValueError, match="tensor='kernel' is not one of"):
        op.scale("kernel")
    with pytest.raises(ValueError, match=r"the state of \(3,\) layers"):
        op(ZEROS, ZEROS, ZEROS)
    assert op.to_state_dict() == {} and op.from_state_dict({}) is op
