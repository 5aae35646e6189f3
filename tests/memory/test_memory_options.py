"""What changes memory and speed, and no value: kernels kept or quantized again, shared scales, checkpoint policies;
and compressed activations, which change gradients within FP8's rounding."""

import dataclasses
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, assert_same, unchecked

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, fp8_linear_layers
from haliax_fp8.memory import KernelResidual


Embed, Mlp, Rows = hax.make_axes(embed=32, mlp=64, rows=16)
KERNEL_RESIDUALS = [
    KernelResidual.KEEP,
    KernelResidual.REQUANTIZE,
    KernelResidual.REQUANTIZE_WHERE_CHEAP,
]


class GatedMlp(eqx.Module):
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    activation: object = eqx.field(static=True, default=lambda gate, up: hnn.silu(gate) * up)

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        linear = lambda In, Out, key: hnn.Linear.init(In, Out, key=key, use_bias=False)
        return GatedMlp(linear(Embed, Mlp, keys[0]), linear(Embed, Mlp, keys[1]), linear(Mlp, Embed, keys[2]))

    def __call__(self, x):
        return x + self.down(self.activation(self.gate(x), self.up(x)))


def stacked(policy=False):
    Blocks = hax.Axis("block", 3)
    return hnn.Stacked.init(Blocks, GatedMlp, gradient_checkpointing=policy)(
        key=jax.random.split(jax.random.key(0), Blocks.size)
    )


MODELS = {"one": lambda: GatedMlp.init(key=jax.random.key(0)), "stacked": stacked}


def inputs(dtype=jnp.float32):
    return hax.random.normal(jax.random.key(1), (Rows, Embed)).astype(dtype)


def loss(model, x):
    out = model.fold(x) if isinstance(model, hnn.Stacked) else model(x)
    return (out**2).mean().scalar().astype(jnp.float32)


def trained(model, steps=3, gradient=fp8.filter_value_and_grad):
    """Losses, and the model after a few steps of gradient descent."""

    @eqx.filter_jit
    def step(model, x):
        value, gradients = gradient(loss)(model, x)
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        return value, fp8.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients), overwrites)

    losses = []
    for _ in range(steps):
        value, model = step(model, inputs())
        losses.append(float(value))
    return losses, model


def arrays_of(tree):
    """Of models whose choices differ, and with them their structure."""
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


# --- What is kept of kernels ------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    "model, recipe", [("one", "delayed"), ("stacked", "delayed"), ("one", "current"), ("one", "rowwise")]
)
def test_kernels_kept_or_quantized_again_train_the_same(model, recipe):
    results = [
        trained(fp8_linear_layers(MODELS[model](), Fp8Config(recipe=recipe, kernel_residual=choice)))
        for choice in KERNEL_RESIDUALS
    ]
    for losses, new in results[1:]:
        assert losses == results[0][0]
        assert_same(arrays_of(new), arrays_of(results[0][1]))


def kept_in_fp8(config):
    """The sizes of the FP8 arrays between the passes of one layer, its input not counted."""
    layer = fp8_linear_layers(hnn.Linear.init(Embed, Mlp, key=jax.random.key(0), use_bias=False), config)
    pullback = jax.vjp(lambda layer, x: layer(x).array, layer, inputs())[1]
    kept = [x for x in jax.tree.leaves(pullback) if getattr(x, "dtype", None) == jnp.float8_e4m3fn]
    return sorted(x.size for x in kept)


@pytest.mark.more
def test_what_is_kept_of_a_kernel():
    activation, kernel = Rows.size * Embed.size, Embed.size * Mlp.size
    # The default keeps a kernel only if devices send it, which nobody knows before the program is divided over them.
    expected = {"delayed": [[activation, kernel], [activation], [activation, kernel]]}
    # Current scaling would take the kernel's amax again; rows are quantized along the other axis anyway.
    expected |= {"current": expected["delayed"]}
    expected |= {"rowwise": [[activation, kernel], [activation], [activation]]}
    for recipe, sizes in expected.items():
        found = [kept_in_fp8(Fp8Config(recipe=recipe, kernel_residual=choice)) for choice in KERNEL_RESIDUALS]
        assert found == sizes, recipe


def test_one_device_quantizes_kernels_again():
    """By default one device runs the program that quantizes every kernel again, not the one that keeps them."""
    counts = []
    for choice in (KernelResidual.REQUANTIZE_WHERE_CHEAP, KernelResidual.REQUANTIZE, KernelResidual.KEEP):
        model = fp8_linear_layers(MODELS["one"](), Fp8Config(kernel_residual=choice))
        compiled = eqx.filter_jit(fp8.filter_grad(loss)).lower(model, inputs()).compile().compiled
        counts.append(compiled.as_text().count("f8e4m3fn["))
    assert counts[0] == counts[1] != counts[2]


@pytest.mark.more
def test_a_choice_can_be_changed_and_keeps_the_state():
    _, model = trained(fp8_linear_layers(MODELS["one"]()))
    again = fp8_linear_layers(model, Fp8Config(kernel_residual=KernelResidual.KEEP))
    assert again.up.dot_general.kernel_residual == KernelResidual.KEEP
    assert_same(arrays_of(again), arrays_of(model))


def test_what_is_no_choice_is_refused():
    with unchecked(), pytest.raises(ValueError, match="kernel_residual='keep'"):
        Fp8Config(kernel_residual="keep")


# --- Shared input scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_scales_of_the_tensor_itself_are_shared_anyway(recipe):
    with pytest.raises(ValueError, match="keeps state for their input"):
        fp8.memory.share_input_scales(fp8_linear_layers(MODELS["one"](), Fp8Config(recipe=recipe)))


@pytest.mark.more
@pytest.mark.parametrize(
    "model, gradient",
    [("one", fp8.filter_value_and_grad), ("one", eqx.filter_value_and_grad), ("stacked", fp8.filter_value_and_grad)],
)
def test_layers_that_share_train_the_same(model, gradient):
    """They read the same tensor, so the largest scale of the group is each one's own."""
    plain = fp8_linear_layers(MODELS[model]())
    shared = fp8.memory.share_input_scales(plain)
    assert_same(arrays_of(shared), arrays_of(plain))
    results = [trained(m, gradient=gradient) for m in (plain, shared)]
    assert results[0][0] == results[1][0]
    assert_same(*(arrays_of(new) for _, new in results))
    separated = fp8.memory.separate_input_scales(results[1][1])
    assert jax.tree.structure(separated) == jax.tree.structure(results[0][1])


@pytest.mark.more
def test_attention_of_equinox_that_shares_trains_the_same():
    """`vmap` over the batch outside and over the tokens inside; three layers share their input's scale."""
    attention = eqx.nn.MultiheadAttention(2, 16, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 5, 16))
    loss_fn = lambda model: (jax.vmap(lambda x: model(x, x, x))(x) ** 2).mean()
    plain = fp8_linear_layers(attention)
    shared = fp8.memory.share_input_scales(plain)
    assert shared.query_proj.dot_general.state.shared_input == "query_proj+key_proj+value_proj"
    assert shared.output_proj.dot_general.state.shared_input is None
    results = [eqx.filter_jit(fp8.filter_value_and_grad(loss_fn))(model) for model in (plain, shared)]
    assert results[0][0] == results[1][0]
    assert_same(*(arrays_of(gradients) for _, gradients in results))


@pytest.mark.more
def test_layers_with_other_inputs_take_the_larger_scale():
    """As in cross-attention: what is not the same tensor still fits the range."""

    class Two(eqx.Module):
        gate: hnn.Linear
        up: hnn.Linear

        def __call__(self, x):
            return self.gate(x) + self.up(100.0 * x)

    one = MODELS["one"]()
    model = fp8.memory.share_input_scales(fp8_linear_layers(Two(one.gate, one.up), Fp8Config(amax_history_length=1)))
    _, model = trained(model, steps=1)
    scales = [float(layer.dot_general.scale("input")) for layer in (model.gate, model.up)]
    assert scales[1] == pytest.approx(100 * scales[0], rel=1e-6)
    out, _ = fp8.filter_value_and_grad(lambda m: m(inputs()).array.sum())(model)
    x = inputs()
    expected = fp8.restore_linear_layers(model)(x).array.sum()
    assert abs(out - expected) < 0.1 * abs(model.up(100 * x).array).sum()


@pytest.mark.parametrize(
    "groups, words", [([("no", "such")], "name no two layers"), (("gate", "up"), "sequence of sequences")]
)
def test_groups_that_do_not_fit(groups, words):
    with pytest.raises(ValueError, match=words):
        fp8.memory.share_input_scales(fp8_linear_layers(MODELS["one"]()), groups)


def test_groups_are_taken_at_their_word():
    """Nobody can tell from the layers whether they read the same tensor; these do not, and only share a scale."""
    shared = fp8.memory.share_input_scales(fp8_linear_layers(MODELS["one"]()), [("gate", "down")])
    assert shared.down.dot_general.state.shared_input == "gate+down"


def test_only_layers_that_quantize_alike_share():
    """Of three layers of a group, two have the same recipe for their input."""
    config = Fp8Config(overrides={"gate": fp8.DelayedScaling(margin=1)})
    shared = fp8.memory.share_input_scales(fp8_linear_layers(MODELS["one"](), config), [("gate", "up", "down")])
    groups = [layer.dot_general.state.shared_input for layer in (shared.gate, shared.up, shared.down)]
    assert groups == [None, "up+down", "up+down"]
    one = fp8_linear_layers(MODELS["one"]())
    rounded = dataclasses.replace(one.gate.dot_general, compute_dtype=np.dtype(jnp.bfloat16))
    one = eqx.tree_at(lambda model: model.gate.dot_general, one, rounded)
    shared = fp8.memory.share_input_scales(one, [("gate", "up", "down")])
    assert (shared.gate.dot_general.state.shared_input, shared.up.dot_general.state.shared_input) == (None, "up+down")


def test_layers_of_different_modules_do_not_share():
    """Their inputs are others: a group's name says which module it is of."""
    shared = fp8.memory.share_input_scales({name: fp8_linear_layers(MODELS["one"]()) for name in ("first", "second")})
    groups = {name: model.gate.dot_general.state.shared_input for name, model in shared.items()}
    assert groups == {"first": "first.gate+up", "second": "second.gate+up"}


def test_a_model_that_is_not_converted_is_refused():
    with pytest.raises(ValueError, match="Convert the model first"):
        fp8.memory.share_input_scales(MODELS["one"]())


@pytest.mark.more
def test_the_input_is_quantized_once():
    """After XLA's common subexpressions: with one scale there is one FP8 copy of what both layers read.

    Only gradients that record share a scale: with those of Equinox each layer reads the one in its own state.
    """

    def quantizations(model, gradient=fp8.filter_grad):
        arrays, static = eqx.partition(model, eqx.is_array)
        step = lambda arrays, x: gradient(loss)(eqx.combine(arrays, static), x)
        lowered = jax.jit(lambda *args: eqx.filter(step(*args), eqx.is_array)).lower(arrays, inputs())
        # Fusions on a CPU compute the same thing wherever they need it.
        program = lowered.compile(compiler_options={"xla_disable_hlo_passes": "fusion"})
        return len(re.findall(r" = f8e4m3fn\[16,32\]\S* convert\(", program.as_text() or ""))

    plain = fp8_linear_layers(MODELS["one"]())
    shared = fp8.memory.share_input_scales(plain)
    assert [quantizations(plain), quantizations(shared), quantizations(shared, eqx.filter_grad)] == [2, 1, 2]


# --- Checkpointing ----------------------------------------------------------------------------------------------------

POLICIES = {outputs: fp8.memory.SaveFp8Operands(outputs=outputs) for outputs in (True, False)}


@pytest.mark.more
@pytest.mark.parametrize("policy", POLICIES.values())
def test_policies_change_no_number(policy):
    expected = trained(fp8_linear_layers(stacked()), steps=2)
    got = trained(fp8_linear_layers(stacked(policy)), steps=2)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    one = fp8_linear_layers(MODELS["one"]())
    plain, kept = (
        eqx.filter_jit(fp8.filter_grad(lambda m, f=f: (f(m, inputs()).array ** 2).mean()))(one)
        for f in (lambda m, x: m(x), eqx.filter_checkpoint(lambda m, x: m(x), policy=policy))
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("outputs, wide", [(True, 2), (False, 0)])
def test_what_policies_keep(outputs, wide):
    """FP8 inputs of the three products; beside them the results that something asks for, or nothing as large."""
    model = fp8_linear_layers(MODELS["one"]())
    arrays, static = eqx.partition(model, eqx.is_array)
    block = jax.checkpoint(lambda arrays, x: eqx.combine(arrays, static)(x).array, policy=POLICIES[outputs])
    kept = jax.tree.leaves(jax.vjp(block, arrays, inputs())[1])
    # Arguments are there anyway.
    given = [x.shape for x in jax.tree.leaves((arrays, inputs()))]
    made = [aval for aval in kept if aval.shape not in given or aval.dtype == jnp.float8_e4m3fn]
    in_fp8 = [aval.shape for aval in made if aval.dtype == jnp.float8_e4m3fn]
    assert sorted(in_fp8) == sorted([(16, 32), (16, 32), (16, 64)])
    large = [aval for aval in kept if aval.dtype != jnp.float8_e4m3fn and aval.shape in ((16, 64), (16, 32))]
    assert len(large) - 1 == wide, "the block's input, and results"


def test_policies_are_values():
    """Programs with equal policies are the same to JAX."""
    make = [
        fp8.memory.SaveFp8Operands,
        lambda: fp8.memory.SaveFp8Operands(outputs=False),
        fp8.memory.RecomputeElementwise,
        lambda: dataclasses.replace(fp8.memory.RecomputeElementwise(), prevent_cse=True),
    ]
    assert len({policy() for policy in (*make, *make)}) == len(make)


# --- Compressed activations -------------------------------------------------------------------------------------------


def test_compressed_gradients_are_those_at_rounded_inputs():
    swiglu = lambda gate, up: jax.nn.silu(gate) * up
    gate, up, g = (jax.random.normal(jax.random.key(i), (16, 64)) for i in range(3))
    out, pullback = jax.vjp(fp8.memory.compressed(swiglu), gate, up)
    np.testing.assert_array_equal(out, swiglu(gate, up))
    rounded = []
    for x in (np.asarray(gate), np.asarray(up)):
        scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=1, keepdims=True) / 448))
        rounded.append((x / scale).astype(jnp.float8_e4m3fn).astype(np.float64) * scale)
    expected = jax.vjp(swiglu, *(jnp.asarray(x, jnp.float32) for x in rounded))[1](g)
    for a, b in zip(pullback(g), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(jnp.abs(b).max()))


@pytest.mark.more
def test_an_outlier_among_compressed_activations_spoils_its_own_row_only():
    """The gradient of a square is twice what was kept, bit for bit: one scale for each row, one for a vector."""
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    x[3, 5] = 3e6
    for values in (x, x[3], x.reshape(2, 8, 64)):
        (gradient,) = jax.vjp(fp8.memory.compressed(jnp.square), jnp.asarray(values))[1](jnp.ones(values.shape))
        scale = 2.0 ** np.ceil(np.log2(np.abs(values).max(axis=-1, keepdims=True) / 448))
        kept = (values / scale).astype(jnp.float8_e4m3fn).astype(np.float64) * scale
        np.testing.assert_array_equal(np.asarray(gradient, np.float64), 2 * kept)


def test_compressed_activations_keep_a_byte_per_element():
    swiglu = lambda gate, up: jax.nn.silu(gate) * up
    x = jnp.ones((16, 64), jnp.bfloat16)
    kept = lambda f: [y for y in jax.tree.leaves(jax.vjp(f, x, x)[1]) if y.size == x.size]
    assert {y.dtype for y in kept(fp8.memory.compressed(swiglu))} == {np.dtype(jnp.float8_e4m3fn)}
    assert len(kept(fp8.memory.compressed(swiglu))) == 2 < len(kept(swiglu))


@pytest.mark.more
def test_compressed_named_arrays_train():
    model = fp8_linear_layers(MODELS["one"]())
    compressed = dataclasses.replace(model, activation=fp8.memory.compressed(model.activation))
    losses, other = trained(model, steps=5)[0], trained(compressed, steps=5)[0]
    assert other[0] == losses[0] and other[-1] < other[0]
    np.testing.assert_allclose(other, losses, rtol=0.02)


@pytest.mark.more
def test_compressed_under_transformations():
    f = fp8.memory.compressed(lambda x: jax.nn.gelu(x))
    x = jax.random.normal(jax.random.key(0), (4, 16))
    gradient = jax.grad(lambda x: f(x).sum())
    # Its terms are of magnitude 1, and cancel.
    np.testing.assert_allclose(jax.vmap(gradient)(x), jax.jit(gradient)(x), rtol=0, atol=8 * EPS)
    assert gradient(x[0, 0]).shape == ()


def test_compressed_refuses_scalings_with_state():
    with pytest.raises(ValueError, match="must quantize without state"):
        fp8.memory.compressed(jax.nn.gelu, fp8.DelayedScaling())
