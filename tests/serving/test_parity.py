"""A served model computes what the training model computes, bit for bit; and what would break that is noticed."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8 import (
    DelayedScaling,
    apply_updates,
    calibrate,
    cast_params,
    fp8_linear_layers,
    partition_for_grad_overwrite,
)
from haliax_fp8._cli.demo import next_token_loss
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.recipes import BlockScaling, MXFP8Scaling, RowwiseScaling
from haliax_fp8.serving import QuantizedKernel, quantize_for_inference, serving_mismatch


Batch, Position, Embed, Heads, Size, Layers = hax.make_axes(
    batch=2, position=4, embed=32, heads=3, head_size=16, layers=2
)
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
FIXED = DelayedScaling(amax_history_length=4)
RECIPES = {"delayed": FIXED, "powers of two": dataclasses.replace(FIXED, power_of_two=True)}


class Block(eqx.Module):
    """Layers with several axes, with the kernel in both orders."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(key):
        keys = jax.random.split(key)
        down = hnn.Linear.init((Heads, Size), Embed, key=keys[1], out_first=False, use_bias=False)
        return Block(hnn.Linear.init(Embed, (Heads, Size), key=keys[0]), down)

    def __call__(self, x):
        return x + self.down(hnn.silu(self.up(x))).rearrange(x.axes)


class Net(eqx.Module):
    """Stacked layers of Haliax, and one of Equinox behind them, mapped over two axes."""

    blocks: hnn.Stacked
    last: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), Layers.size)
        return Net(hnn.Stacked.init(Layers, Block)(keys), eqx.nn.Linear(32, 24, key=jax.random.key(2)))

    def __call__(self, x):
        x = self.blocks.fold(x)
        return jax.vmap(jax.vmap(self.last))(x.array)


class Mapped(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, x):
        return jax.vmap(jax.vmap(self.mlp))(x.array)


def batch(dtype):
    return hax.random.normal(jax.random.key(1), (Batch, Position, Embed), dtype=dtype)


def loss_of(logits):
    return -jax.nn.log_softmax(logits.astype(jnp.float32))[..., 0].mean()


def trained(recipe, dtype):
    """The models of the last two steps, of parameters in float32 that the loss casts."""

    @eqx.filter_jit
    def step(model):
        grads = eqx.filter_grad(lambda model: loss_of(cast_params(model, dtype)(batch(dtype))))(model)
        overwrites, grads = partition_for_grad_overwrite(grads)
        return apply_updates(model, jax.tree.map(lambda g: -0.5 * g, grads), overwrites)

    before = step(fp8_linear_layers(Net.init(), recipe=recipe))
    return before, step(before)


@eqx.filter_jit
def logits_and_loss(model, x):
    logits = model(x)
    return logits, loss_of(logits)


def bits(model, dtype=jnp.bfloat16):
    return [np.asarray(x).tobytes() for x in logits_and_loss(model, batch(dtype))]


CASES = [
    pytest.param("delayed", "bfloat16"),
    *(
        pytest.param(recipe, dtype, marks=pytest.mark.more)
        for recipe, dtype in (("delayed", "float32"), ("powers of two", "bfloat16"), ("powers of two", "float32"))
    ),
]


@pytest.mark.more
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_served_as_trained(recipe, dtype, tmp_path):
    """Logits and loss, plain and in a scan, after a resume; and not with what is almost the same."""
    dtype = DTYPES[dtype]
    before, model = trained(RECIPES[recipe], dtype)
    bits_of = lambda model: bits(model, dtype)
    in_training = bits_of(cast_params(model, dtype))
    served = quantize_for_inference(cast_params(model, dtype), "FP8")
    assert isinstance(served.blocks, hnn.BlockSeq)
    assert bits_of(served) == in_training
    in_scan = quantize_for_inference(cast_params(model, dtype), "FP8", unstack=False)
    assert isinstance(in_scan.blocks, hnn.Stacked)
    assert bits_of(in_scan) == in_training
    # What is read back has the scales of the next step.
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    read = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", fp8_linear_layers(Net.init(), recipe=RECIPES[recipe]))
    assert bits_of(quantize_for_inference(cast_params(read, dtype), "FP8")) == in_training
    # The scales of the step before, and kernels that were not rounded to the dtype of the step.
    previous = jax.tree.map(lambda old, new: old if is_state(old) else new, before, model, is_leaf=is_state)
    assert bits_of(quantize_for_inference(cast_params(previous, dtype), "FP8")) != in_training
    if dtype == jnp.bfloat16:
        assert bits_of(with_data_of(quantize_for_inference(model, "FP8"), served)) != in_training


def is_state(node):
    return hasattr(node, "scalings")


def with_data_of(other, served):
    """`served`, with kernels that were quantized from other weights."""
    is_kernel = lambda node: isinstance(node, QuantizedKernel)
    stored = lambda a, b: dataclasses.replace(b.stored, data=a.stored.data)
    both = lambda a, b: dataclasses.replace(b, stored=stored(a, b)) if is_kernel(b) else b
    return jax.tree.map(both, other, served, is_leaf=is_kernel)


@pytest.mark.more
def test_calibrated_without_training():
    """A model that was trained in bfloat16: static scales from calibration."""
    model = cast_params(Net.init(), jnp.bfloat16)
    static = fp8_linear_layers(model, recipe="static")
    with pytest.raises(ValueError, match=r"no scale of its input and kernel.*calibrate the model first"):
        quantize_for_inference(static, "FP8")
    with pytest.raises(ValueError, match=r"has no training state.*calibrate the model first"):
        quantize_for_inference(model, "FP8")
    with pytest.raises(ValueError, match=r"no scale of its input and kernel yet"):
        quantize_for_inference(fp8_linear_layers(model), "FP8")
    calibrated = calibrate(static, lambda model, x: loss_of(model(x)), [(batch(jnp.bfloat16),)])
    assert bits(quantize_for_inference(calibrated, "FP8")) == bits(calibrated)


COMPUTED = {
    "rowwise": (RowwiseScaling(), "FP8_DYNAMIC"),
    "deepseek": (BlockScaling(), "FP8_BLOCK"),
    "mxfp8": (MXFP8Scaling(), "MXFP8"),
}


FURTHER = (pytest.param(name, marks=pytest.mark.more) for name in ("deepseek", "mxfp8"))


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["rowwise", *FURTHER])
def test_computed_scales_as_trained(recipe):
    """Recipes without state: the same kernels, and the same inputs."""
    scaling, layout = COMPUTED[recipe]
    model = fp8_linear_layers(cast_params(Net.init(), jnp.bfloat16), recipe=scaling)
    assert bits(quantize_for_inference(model, layout)) == bits(model)
    with pytest.raises(ValueError, match="stores no scale of its input"):
        quantize_for_inference(model, "FP8")


@pytest.mark.more
def test_mismatch():
    """Nothing for the same numbers; and the definitions in float64, for others."""
    x = batch(jnp.bfloat16)
    mlp = cast_params(Mapped(eqx.nn.MLP(32, 24, 32, 1, key=jax.random.key(0))), jnp.bfloat16)
    model = calibrate(fp8_linear_layers(mlp, recipe="static"), lambda model, x: loss_of(model(x)), [(x,)])
    static = serving_mismatch(model, quantize_for_inference(model, "FP8"), x)
    assert dataclasses.astuple(static.served) == (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    plain = quantize_for_inference(model, "W8A16")
    chosen = jax.random.randint(jax.random.key(5), (Batch.size, Position.size), 0, 24)
    mismatch = serving_mismatch(model, plain, x, tokens=chosen)
    p, q = (np.asarray(logits_and_loss(m, x)[0]).astype(np.float64) for m in (model, plain))
    assert mismatch.positions == 8 and mismatch.served.equal == (p == q).mean() < 1.0
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p, q))
    ratio = np.take_along_axis(q / p, np.asarray(chosen)[..., None], -1)
    np.testing.assert_allclose(mismatch.served.mean, np.abs(np.log(ratio)).mean(), rtol=1e-9)
    np.testing.assert_allclose(mismatch.served.largest, np.abs(np.log(ratio)).max(), rtol=1e-9)
    np.testing.assert_allclose(mismatch.served.kl, (p * np.log(p / q)).sum(-1).mean(), rtol=1e-6)
    np.testing.assert_allclose(mismatch.served.k3, (ratio - 1 - np.log(ratio)).mean(), rtol=1e-6)
    assert mismatch.served.agreement == (p.argmax(-1) == q.argmax(-1)).mean()
    assert "floor" in str(mismatch)
    with pytest.raises(ValueError, match="tokens has shape"):
        serving_mismatch(model, plain, x, tokens=chosen[:1])


@pytest.mark.more
def test_language_model():
    """Attention, norms and a loss that takes parts of the logits."""
    config = TransformerConfig(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=48, vocab=32)
    tokens = hax.random.randint(jax.random.key(1), (Batch, Position), 0, config.vocab)
    plain = cast_params(Transformer.init(config, key=jax.random.key(0)), jnp.bfloat16)
    model = calibrate(fp8_linear_layers(plain, recipe=FIXED), next_token_loss, [(tokens,)])
    loss, logits = eqx.filter_jit(next_token_loss), eqx.filter_jit(lambda model: model(tokens).array)
    served = quantize_for_inference(model, "FP8")
    assert loss(served, tokens) == loss(model, tokens)
    np.testing.assert_array_equal(logits(served), logits(model))


@pytest.mark.more
@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_turns_of_a_loop(unroll):
    """What a loop rounds between its turns of several blocks, and behind it; between other elementwise operations."""
    Three, x = hax.Axis("layers", 3), batch(jnp.bfloat16)
    blocks = hnn.Stacked.init(Three, Block)(jax.random.split(jax.random.key(0), 3))
    around = lambda x: hnn.silu(x * 1.37) * (x + 0.3)
    loss = lambda model, x: model.fold(x).array.astype(jnp.float32).sum()
    model = calibrate(fp8_linear_layers(cast_params(blocks, jnp.bfloat16), recipe="static"), loss, [(x,)])
    call = eqx.filter_jit(lambda model: around(model.fold(around(x), unroll=unroll)).array)
    served = quantize_for_inference(model, "FP8")
    np.testing.assert_array_equal(call(served), call(model))
    via = eqx.filter_jit(
        lambda model: around(model.fold_via(lambda block, x: block(x), unroll=unroll)(around(x))).array
    )
    np.testing.assert_array_equal(via(served), call(model))
    twice = lambda block, x: (block(x), x)
    scanned = eqx.filter_jit(lambda model: model.scan_via(twice, unroll=unroll)(around(x)))
    for ours, theirs in zip(scanned(served), scanned(model), strict=True):
        np.testing.assert_array_equal(ours.array, theirs.array)
