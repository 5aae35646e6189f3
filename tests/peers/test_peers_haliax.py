"""Haliax's tests of its FP8 layers, as black boxes for ours: same models, same steps, same tolerances.

And its functions for training: code that was written for `haliax.quantization` works on our modules unchanged.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import optax
import pytest
from numpy_reference import OPERANDS, DelayedScalingReference, amax, assert_state_is

import haliax_fp8
from haliax_fp8 import Fp8Config, Fp8DotGeneral, fp8_linear_layers


with_functions_of = pytest.mark.parametrize("library", [haxq, haliax_fp8], ids=["haliax", "haliax_fp8"])


# --- Haliax's own tests ----------------------------------------------------------------------------------------------


@pytest.mark.more
def test_fp8_is_reasonable():
    In, Out = hax.Axis("In", 8), hax.Axis("Out", 8)
    linear = hnn.Linear.init(In, Out, key=jrandom.PRNGKey(0), init_scale=0.1)
    x = hax.random.normal(jrandom.PRNGKey(3), In)
    fp8_output = fp8_linear_layers(linear)(x)

    assert fp8_output.axes == (Out,)
    assert fp8_output.dtype == jnp.float32
    expected = np.asarray(linear.weight.array) @ np.asarray(x.array)
    np.testing.assert_allclose(fp8_output.array, expected, atol=2e-2, rtol=5e-2)


@pytest.mark.more
@with_functions_of
def test_fp_loop(library):
    """Five steps of SGD: histories and scales are those of a computation by hand."""
    Batch, In, Out = hax.Axis("Batch", 16), hax.Axis("In", 16), hax.Axis("Out", 32)
    key, init_key = jrandom.split(jrandom.PRNGKey(seed=123))
    linear = fp8_linear_layers(hnn.Linear.init(In, Out, key=init_key))

    @eqx.filter_jit
    def train_step(model, x, dy):
        grads = eqx.filter_grad(lambda model: hax.sum(model(x) * dy).scalar())(model)
        overwrites, grads = library.partition_for_grad_overwrite(grads)
        updates = jax.tree.map(lambda g: -1e-3 * g, grads)
        return library.apply_updates(model, updates, overwrites)

    expected = DelayedScalingReference(1024)
    for _ in range(5):
        key, x_key, g_key = jrandom.split(key, 3)
        x, g = hax.random.normal(x_key, (Batch, In)), hax.random.normal(g_key, (Batch, Out))
        expected.record(input=amax(x), kernel=amax(linear.weight), output_grad=amax(g))
        linear = train_step(linear, x, g)
        for operand in OPERANDS:
            history, scale = linear.dot_general.amax_history(operand), linear.dot_general.scale(operand)
            np.testing.assert_allclose(history, expected.history[operand], rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(scale, expected.scale[operand], rtol=1e-3, atol=1e-3)


@pytest.fixture
def mlp():
    Input, Hidden, Output = hax.Axis("Input", 16), hax.Axis("Hidden", 64), hax.Axis("Output", 32)
    return hnn.MLP.init(Input, Output, Hidden, 3, key=jrandom.PRNGKey(123), init_scale=0.1)


def is_fp8(layer):
    return isinstance(layer.dot_general, Fp8DotGeneral)


def reference_mlp(mlp, x):
    output = np.asarray(x.array)
    for i, layer in enumerate(mlp.layers):
        output = np.asarray(layer.weight.array) @ output
        output = np.maximum(output, 0) if i < len(mlp.layers) - 1 else output
    return output


def test_layer_splicing_keeps_the_output(mlp):
    mlp_q = fp8_linear_layers(mlp)
    assert all(is_fp8(layer) for layer in mlp_q.layers)

    x = hax.random.normal(jrandom.PRNGKey(0), mlp.In) * 10  # so that nothing underflows
    np.testing.assert_allclose(mlp_q(x).array, reference_mlp(mlp, x), atol=1e-3, rtol=1e-3)
    assert not np.allclose(mlp_q(x).array, 0)


@pytest.mark.more
def test_layer_splicing_keeps_the_output_relative_to_its_size(mlp):
    """The outputs above are below 1e-3; once scales are known, the error is small against them too."""
    mlp_q = fp8_linear_layers(mlp)
    x = hax.random.normal(jrandom.PRNGKey(0), mlp.In) * 10
    gradients_of = eqx.filter_jit(eqx.filter_grad(lambda mlp: hax.sum(mlp(x)).scalar()))
    for _ in mlp.layers:  # a layer's scale is right once the scales of the layers before it are
        overwrites, grads = haliax_fp8.partition_for_grad_overwrite(gradients_of(mlp_q))
        mlp_q = haliax_fp8.apply_updates(mlp_q, jax.tree.map(jnp.zeros_like, grads), overwrites)
    expected = reference_mlp(mlp, x)
    assert np.linalg.norm(mlp_q(x).array - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("targets", "converted"), [("layers.0", [True, False, False, False]), (["0", "1"], [True, True, False, False])]
)
def test_layer_splicing_of_targets(mlp, targets, converted):
    mlp_q = fp8_linear_layers(mlp, Fp8Config(targets=targets))
    assert [is_fp8(layer) for layer in mlp_q.layers] == converted


class Block(eqx.Module):
    up_proj: hnn.Linear
    down_proj: hnn.Linear

    @staticmethod
    def init(In, Out, key):
        return Block(hnn.Linear.init(In, Out, key=key), hnn.Linear.init(Out, In, key=key))

    def __call__(self, x):
        return self.down_proj(self.up_proj(x))


class Tformer(eqx.Module):
    blocks: hnn.Stacked

    @staticmethod
    def init(Layer, In, Out, key):
        return Tformer(hnn.Stacked.init(Layer, Block)(In, Out, key=jrandom.split(key, Layer.size)))

    def __call__(self, x):
        return self.blocks.fold(x)


@pytest.fixture
def tformer():
    return Tformer.init(hax.Axis("Layer", 3), hax.Axis("In", 16), hax.Axis("Out", 32), jrandom.PRNGKey(0))


def test_fp8ize_stacking(tformer):
    """Every layer of a stack gets scales and histories of its own."""
    block = fp8_linear_layers(tformer).blocks.stacked
    for layer in (block.up_proj, block.down_proj):
        assert is_fp8(layer)
        for operand in OPERANDS:
            assert layer.dot_general.scale(operand).shape == (3,)
            assert layer.dot_general.amax_history(operand).shape == (3, 1024)


def test_fp8ize_stacking_of_targets(tformer):
    block = fp8_linear_layers(tformer, Fp8Config(targets=["up_proj"])).blocks.stacked
    assert is_fp8(block.up_proj)
    assert not is_fp8(block.down_proj)


def dot_operands(jaxpr):
    """The operands' dtypes of every `dot_general` in a jaxpr and the jaxprs nested in it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(tuple(var.aval.dtype.name for var in eqn.invars))
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")):
            inner = getattr(param, "jaxpr", param)
            found += dot_operands(inner) if hasattr(inner, "eqns") else []
    return found


def test_fp8_feeds_fp8_operands_to_dot():
    """All three products of a layer multiply FP8 operands, not values that went through FP8 and back."""
    In, Out = hax.Axis("In", 16), hax.Axis("Out", 8)
    linear = fp8_linear_layers(hnn.Linear.init(In, Out, key=jrandom.PRNGKey(0)))
    x = hax.random.normal(jrandom.PRNGKey(3), In)
    jaxpr = jax.make_jaxpr(jax.grad(lambda args: hax.sum(args[0](args[1])).scalar()))((linear, x))
    assert sorted(map(sorted, dot_operands(jaxpr.jaxpr))) == [
        ["float8_e4m3fn", "float8_e4m3fn"],
        ["float8_e4m3fn", "float8_e5m2"],
        ["float8_e4m3fn", "float8_e5m2"],
    ]


def test_fp8_feeds_fp8_operands_to_the_dot_of_inference():
    """Without a gradient too: what is compiled multiplies FP8 operands."""
    In, Out = hax.Axis("In", 16), hax.Axis("Out", 8)
    linear = fp8_linear_layers(hnn.Linear.init(In, Out, key=jrandom.PRNGKey(0)))
    x = hax.random.normal(jrandom.PRNGKey(3), In)
    lowered = jax.jit(lambda linear, x: linear(x).array).lower(linear, x).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 1
    assert products[0].count("f8E4M3FN") == 2


def test_fp8_grads_match_reference():
    In, Out = hax.Axis("In", 32), hax.Axis("Out", 16)
    linear = hnn.Linear.init(In, Out, key=jrandom.PRNGKey(0), init_scale=1.0)
    x = hax.random.normal(jrandom.PRNGKey(3), In)
    gradient = eqx.filter_grad(lambda model: hax.sum(model(x) ** 2).scalar())(fp8_linear_layers(linear)).weight.array

    expected = np.outer(2 * np.asarray(linear.weight.array) @ np.asarray(x.array), np.asarray(x.array))
    assert np.linalg.norm(gradient - expected) < 0.1 * np.linalg.norm(expected)


# --- Haliax's functions on our modules -------------------------------------------------------------------------------

Batch, In, Out = hax.make_axes(batch=8, input=4, output=2)


@pytest.fixture
def layer():
    plain = hnn.Linear.init(In, Out, key=jrandom.key(0))
    return fp8_linear_layers(plain, Fp8Config(amax_history_length=3))


def batch_of(seed):
    x_key, g_key = jrandom.split(jrandom.key(seed))
    return hax.random.normal(x_key, (Batch, In)), hax.random.normal(g_key, (Batch, Out))


@eqx.filter_jit
def gradients(layer, x, g):
    return eqx.filter_grad(lambda layer: hax.sum(layer(x) * g).scalar())(layer)


def test_haliax_partition_finds_our_state(layer):
    """All state on one side, all parameters on the other."""
    overwrites, params = haxq.partition_for_grad_overwrite(layer)
    assert [id(x) for x in jax.tree.leaves(params)] == [id(layer.weight.array), id(layer.bias.array)]
    state = [id(x) for x in jax.tree.leaves(layer.dot_general)]
    assert state and [id(x) for x in jax.tree.leaves(overwrites)] == state


def accumulate_in_a_loop(layer, batches):
    total = gradients(layer, *batches[0])
    for batch in batches[1:]:
        total = haxq.accumulate_gradients(total, gradients(layer, *batch))
    return total


def accumulate_from_zeros(layer, batches):
    """As Haliax's documentation has it: the first call gets zeros."""
    total = jax.tree.map(jnp.zeros_like, gradients(layer, *batches[0]))
    for batch in batches:
        total = haxq.accumulate_gradients(total, gradients(layer, *batch))
    return total


def accumulate_in_a_scan(layer, batches):
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
    zeros = jax.tree.map(jnp.zeros_like, gradients(layer, *batches[0]))
    return jax.lax.scan(
        lambda total, batch: (haxq.accumulate_gradients(total, gradients(layer, *batch)), None), zeros, stacked
    )[0]


@pytest.mark.parametrize(
    "accumulate",
    [accumulate_in_a_loop, accumulate_from_zeros, accumulate_in_a_scan],
    ids=["loop", "zeros", "scan"],
)
def test_haliax_accumulation_takes_the_maximum_of_our_state(layer, accumulate):
    """The newest amax is the largest of the microbatches, as if they had been one batch; over several steps."""
    expected = DelayedScalingReference(3)
    for step in range(4):
        batches = [batch_of(10 * step + i) for i in range(3)]
        expected.record(
            input=max(amax(x) for x, _ in batches),
            kernel=amax(layer.weight),
            output_grad=max(amax(g) for _, g in batches),
        )
        overwrites, grads = haxq.partition_for_grad_overwrite(accumulate(layer, batches))
        layer = haxq.apply_updates(layer, jax.tree.map(lambda g: -0.1 * g, grads), overwrites)
        assert_state_is(layer.dot_general, expected)


def test_haliax_accumulation_sums_parameters(layer):
    batches = [batch_of(seed) for seed in range(3)]
    total = accumulate_in_a_loop(layer, batches).weight.array
    parts = [np.asarray(gradients(layer, *batch).weight.array, np.float64) for batch in batches]
    np.testing.assert_allclose(total, sum(parts), rtol=1e-5, atol=1e-6)


def test_haliax_apply_updates_is_ours_where_each_layer_is_used_once(layer):
    """Bit for bit the same model, whichever of the two functions applies the same gradients."""
    optimizer = optax.sgd(0.1)
    models = {haxq: layer, haliax_fp8: layer}
    for step in range(4):
        for library, model in models.items():
            overwrites, grads = library.partition_for_grad_overwrite(gradients(model, *batch_of(step)))
            updates, _ = optimizer.update(grads, optimizer.init(grads))
            models[library] = library.apply_updates(model, updates, overwrites)
        assert eqx.tree_equal(models[haxq], models[haliax_fp8])
