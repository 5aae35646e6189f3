"""The registry of layers: what each class becomes, what it computes then, and what it still is."""

import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.state_dict as state_dicts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import E4M3, E5M2, EPS, assert_same, assert_within, equations, float64, quantize, sqnr
from model_checks import is_state
from numpy_reference import OPERANDS, DelayedScalingReference, amax, assert_state_is

import haliax_fp8
from haliax_fp8 import (
    Fp8Config,
    Fp8DotGeneral,
    apply_updates,
    calibrate,
    describe,
    filter_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    restore_linear_layers,
)
from haliax_fp8.layers import EquinoxLinear, Kernel, LayerRule, OnlyIfNamed, default_rules
from haliax_fp8.training import fp8_states


# What rounding costs on normally distributed data, each element by itself: E4M3 leaves 31.5 dB, E5M2 25.5 dB. A product
# has the noise of both operands: 28.5 dB forward, 24.5 dB backward. The noise of the products of a model adds up.
OUT_DB, GRADIENT_DB = 28.0, 24.0

Rows, In, Mid, Out = hax.make_axes(rows=96, input=48, mid=40, output=56)
Experts = hax.Axis("experts", 4)
SIZES = [33, 0, 50, 13]  # of the groups: uneven, one empty, together all rows
SHORT = Fp8Config(amax_history_length=4)


def drawn(init: Callable, seed: int = 0) -> Any:
    """What `init(key)` gives, with arrays drawn by NumPy: initialisers take seconds to compile.

    Their magnitude is `1 / sqrt(48)`, so that 48 terms of magnitude 1 sum up to one of magnitude 1.
    """
    rng = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(init, jax.random.key(0))
    normal = lambda x: jnp.asarray(rng.normal(scale=48**-0.5, size=x.shape).astype(x.dtype))
    return jax.tree.map(lambda x: normal(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def normal(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


# --- The kinds of layers ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """A layer or model of one class, and how it is called on a plain array.

    Args:
        init: `init(key)` makes it.
        call: `call(model, x)`, with a batch of rows.
        x_shape: The shape of the input.
        targets: What to convert; None for all.
        layers: How many layers are converted.
        products: How many products the output has behind it.
    """

    init: Callable
    call: Callable
    x_shape: tuple[int, ...] = (Rows.size, In.size)
    targets: Any = None
    layers: int = 1
    products: int = 1

    @functools.cached_property
    def plain(self) -> Any:
        return drawn(self.init)

    @functools.cached_property
    def x(self) -> jax.Array:
        return normal(self.x_shape, 1)

    @functools.cached_property
    def g(self) -> jax.Array:
        """The gradient of the output: the loss is the sum of output times g."""
        return normal(eqx.filter_eval_shape(self.call, self.plain, self.x).shape, 2)

    @functools.cached_property
    def config(self) -> Fp8Config:
        return Fp8Config(targets=self.targets, amax_history_length=4)

    @functools.cached_property
    def converted(self) -> Any:
        return fp8_linear_layers(self.plain, self.config)

    def loss(self, model: Any, x: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.sum(self.call(model, x) * g)

    @functools.cached_property
    def calibrated(self) -> Any:
        return calibrate(self.converted, self.loss, [(self.x, self.g)])

    def evaluate(self, model: Any, x: Any = None, g: Any = None) -> tuple[jax.Array, Any, jax.Array]:
        """The output, and the gradients of the model and of the input."""

        @eqx.filter_jit
        def run(model, x, g):
            def loss(args):
                out = self.call(*args)
                return jnp.sum(out * g), out

            gradients, out = eqx.filter_grad(loss, has_aux=True)((model, x))
            return out, *gradients

        return run(model, self.x if x is None else x, self.g if g is None else g)


def rows(layer: Any, x: jax.Array) -> jax.Array:
    """For Haliax's layers."""
    return layer(hax.named(x, (Rows, In))).array


def grouped(layer: Any, x: jax.Array) -> jax.Array:
    return layer(hax.named(x, (Rows, In)), hax.named(jnp.array(SIZES), Experts)).array


def attend(attention: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: attention(x, x, x))(x)


def batched(layer: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(layer)(x)


A, B = hax.make_axes(a=6, b=8)

KINDS = {
    "haliax.Linear": Kind(lambda key: hnn.Linear.init(In, Out, key=key), rows),
    "haliax.Linear, several axes": Kind(
        lambda key: hnn.Linear.init((A, B), (Mid, hax.Axis("c", 2)), key=key, use_bias=False, out_first=False),
        lambda layer, x: layer(hax.named(x.reshape(-1, 6, 8), (Rows, A, B))).array,
    ),
    "haliax.MoELinear": Kind(lambda key: hnn.MoELinear.init(Experts, In, Out, key=key), grouped),
    "haliax.MoELinear, out first, no bias": Kind(
        lambda key: hnn.MoELinear.init(Experts, In, Out, key=key, use_bias=False, out_first=True, use_gmm=True),
        # High precision takes neither this order nor, on a CPU, `use_gmm`: the reference is the usual layer.
        lambda layer, x: grouped(layer if layer_op(layer) else usual_moe(layer), x),
    ),
    "haliax.Embedding": Kind(
        lambda key: hnn.Embedding.init(Out, In, key=key),
        lambda embedding, x: embedding.unembed(hax.named(x, (Rows, In))).array,
        targets=lambda path, layer: True,
    ),
    "equinox.Linear": Kind(lambda key: eqx.nn.Linear(48, 56, key=key), batched),
    "equinox.Linear, no bias": Kind(lambda key: eqx.nn.Linear(48, 56, use_bias=False, key=key), batched),
    "equinox.Linear, scalar input": Kind(lambda key: eqx.nn.Linear("scalar", 56, key=key), batched, (96,)),
    "equinox.Linear, scalar output": Kind(lambda key: eqx.nn.Linear(48, "scalar", key=key), batched),
    "equinox.Linear, nested vmap": Kind(
        lambda key: eqx.nn.Linear(48, 56, key=key), lambda layer, x: jax.vmap(jax.vmap(layer))(x), (6, 16, 48)
    ),
    "equinox.MLP": Kind(
        lambda key: eqx.nn.MLP(48, 56, 40, 2, activation=jnp.tanh, key=key), batched, layers=3, products=3
    ),
    "equinox.MLP, scan": Kind(
        lambda key: eqx.nn.MLP(48, 56, 40, 3, activation=jnp.tanh, key=key, scan=True), batched, layers=3, products=4
    ),
    "equinox.MultiheadAttention": Kind(
        lambda key: eqx.nn.MultiheadAttention(4, 48, output_size=56, use_query_bias=True, key=key),
        attend,
        (6, 16, 48),
        layers=4,
        products=4,
    ),
}
SINGLE = [name for name, kind in KINDS.items() if kind.layers == 1]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# Of what one class or another does: in Haliax, in Equinox, with experts, and in a stack.
SOME = ["haliax.Linear, several axes", "equinox.Linear, nested vmap", "haliax.MoELinear", "equinox.MLP, scan"]
each_of_some_kinds = pytest.mark.parametrize("kind", [KINDS[name] for name in SOME], ids=SOME)
each_single_kind = pytest.mark.parametrize("kind", [KINDS[name] for name in SINGLE], ids=SINGLE)


def layer_op(layer: Any) -> Fp8DotGeneral | None:
    return getattr(layer, "dot_general", None)


def usual_moe(layer: hnn.MoELinear) -> hnn.MoELinear:
    return dataclasses.replace(layer, weight=layer.weight.rearrange((Experts, In, Out)), use_gmm=False)


def ops(tree: Any) -> list[Fp8DotGeneral]:
    is_op = lambda node: isinstance(node, Fp8DotGeneral)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_op) if is_op(node)]


# --- What a converted layer computes ----------------------------------------------------------------------------------


@pytest.mark.fast
@each_kind
def test_output_and_gradients(kind):
    """All of them, of a calibrated layer, against the layer in high precision; nothing is missing, nothing is exact."""
    out, grads, dx = kind.evaluate(kind.calibrated)
    expected_out, expected, expected_dx = kind.evaluate(kind.plain)
    forward, backward = (10 * np.log10(count) for count in (kind.products, 2 * kind.products - 1))
    assert OUT_DB - forward <= sqnr(expected_out, out) < 60
    assert GRADIENT_DB - backward <= sqnr(expected_dx, dx) < 60
    got = jax.tree.leaves(restore_linear_layers(grads))
    for actual, reference in zip(got, jax.tree.leaves(expected), strict=True):
        assert actual.dtype == reference.dtype and GRADIENT_DB - backward <= sqnr(reference, actual)
    assert len(ops(kind.calibrated)) == kind.layers and describe(kind.calibrated).fp8_count == kind.layers


@each_single_kind
def test_amaxes(kind):
    """Of two steps, the second with other operands, bit for bit; and the scales that follow from them."""
    expected = DelayedScalingReference(4)
    layer = kind.converted
    gradients_of = eqx.filter_jit(eqx.filter_grad(kind.loss))
    for factor in (1.0, 3.0):
        x, g = factor * kind.x, factor * kind.g
        expected.record(input=amax(x), kernel=amax(layer.weight), output_grad=amax(g))
        overwrites, gradients = partition_for_grad_overwrite(gradients_of(layer, x, g))
        layer = apply_updates(layer, gradients, overwrites)
        assert_state_is(layer.dot_general, expected)


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].layers > 1])
def test_amaxes_of_a_model(name):
    """Kernels, what goes in, and the gradient of what comes out: known without running the model."""
    kind = KINDS[name]
    layers = [node for node in jax.tree.leaves(kind.calibrated, is_leaf=is_linear) if is_linear(node)]
    for layer in layers:
        members = layer.weight.reshape(-1, layer.weight.shape[-2] * layer.weight.shape[-1])
        newest = np.reshape(layer.dot_general.amax_history("kernel")[..., 0], -1)
        np.testing.assert_array_equal(newest, np.max(np.abs(members), axis=1))
    first = layers[:3] if name == "equinox.MultiheadAttention" else layers[:1]
    for layer in first:
        assert layer.dot_general.amax_history("input")[0] == amax(kind.x)
    assert layers[-1].dot_general.amax_history("output_grad")[0] == amax(kind.g)


def is_linear(node: Any) -> bool:
    return isinstance(node, eqx.nn.Linear)


def test_vmap_is_the_batched_product():
    """Bit for bit: an `eqx.nn.Linear` under `vmap` is what the product of the whole batch is."""
    kind = KINDS["equinox.Linear, no bias"]
    layer = kind.calibrated

    def product(args):
        layer, x = args
        out = layer.dot_general(x, layer.weight, (((1,), (1,)), ((), ())))
        return jnp.sum(out * kind.g), out

    (dlayer, dx), out = eqx.filter_jit(eqx.filter_grad(product, has_aux=True))((layer, kind.x))
    for actual, expected in zip(kind.evaluate(layer), (out, dlayer, dx), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("in_features, out_features", [("scalar", "scalar"), ("scalar", 3), (4, "scalar")])
def test_scalar_features(in_features, out_features):
    """Shapes are those of the plain layer; another shape of the input is refused as the plain layer does."""
    plain = drawn(lambda key: eqx.nn.Linear(in_features, out_features, key=key))
    fp8 = fp8_linear_layers(plain, SHORT)
    x = normal(() if in_features == "scalar" else (4,), 3)
    out = fp8(x)
    assert out.shape == plain(x).shape == (() if out_features == "scalar" else (3,))
    # Three roundings of relative error 1/16: of two operands, and once more where they cancel against the bias.
    np.testing.assert_allclose(out, plain(x), atol=float(np.sum(np.abs(plain.weight) * np.max(np.abs(x)))) * 3 / 16)
    if in_features == "scalar":
        with pytest.raises(ValueError, match=r"x of shape \(1,\) must be a scalar"):
            fp8(jnp.ones(1))
    assert eqx.filter_grad(lambda layer: jnp.sum(layer(x)))(fp8).weight.shape == plain.weight.shape


@pytest.mark.parametrize("shape", [(48, 7), (48, 48), (3, 48, 7)])
def test_examples_in_the_columns_of_a_matrix(shape):
    """Equinox's layer takes any operand of `weight @ x`. A square output would not show that it is transposed."""
    plain = drawn(lambda key: eqx.nn.Linear(48, 48, use_bias=False, key=key))
    fp8, x = fp8_linear_layers(plain, recipe="current"), normal(shape, 3)
    rounded = [quantize(a, amax(a) / 448.0, E4M3) for a in (plain.weight, x)]
    expected = np.matmul(*rounded)
    assert fp8(x).shape == expected.shape
    np.testing.assert_allclose(fp8(x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["haliax.MoELinear", "haliax.Embedding", "equinox.Linear"])
def test_dtypes(name, dtype):
    """Output and gradients in the layer's dtype, state in float32; rounding to it costs less than that to FP8."""
    kind = KINDS[name]
    cast = lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf
    layer = jax.tree.map(cast, kind.calibrated, is_leaf=is_state)
    out, grads, dx = kind.evaluate(layer, *map(cast, (kind.x, kind.g)))
    assert out.dtype == dx.dtype == grads.weight.dtype == dtype
    assert grads.dot_general.scale("input").dtype == jnp.float32
    assert OUT_DB - 1 <= sqnr(kind.evaluate(kind.plain)[0], out)


# --- Mixture of experts -----------------------------------------------------------------------------------------------


def moe_loss(layer, x, sizes, g):
    """The sum of output times g, and the output."""
    out = layer(hax.named(x, (Rows, In)), hax.named(sizes, Experts)).array
    return jnp.sum(out * g), out


@functools.cache
def moe_gradients():
    """Compiled once for all group sizes: they are data."""
    return eqx.filter_jit(
        eqx.filter_grad(lambda args, sizes, g: moe_loss(*args, sizes, g), has_aux=True),
    )


@pytest.mark.parametrize(
    "sizes",
    [[33, 0, 50, 13], [24, 24, 24, 24], [0, 0, 96, 0], [1, 2, 3, 90], [0, 40, 0, 20], [0, 0, 0, 0]],
    ids=str,
)
def test_moe_is_one_product_per_expert(sizes):
    """Against each expert's rows and kernel by themselves, in float64: empty experts, and rows beyond the last group.

    An expert without rows has a gradient of exactly 0, rows without an expert an output and a gradient of exactly 0.
    """
    kind = KINDS["haliax.MoELinear"]
    layer = dataclasses.replace(kind.calibrated, bias=None)
    (dlayer, dx), out = moe_gradients()((layer, kind.x), jnp.array(sizes), kind.g)
    x, w, g = (
        quantize(value, layer.dot_general.scale(operand), dtype)
        for value, operand, dtype in zip((kind.x, layer.weight, kind.g), OPERANDS, (E4M3, E4M3, E5M2), strict=True)
    )
    expected = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
    bound = [np.zeros_like(value) for value in expected]
    ends = np.cumsum(sizes)
    for expert, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        of_group = slice(start, end)
        for target, (a, b, c) in ((expected, (x, w, g)), (bound, map(np.abs, (x, w, g)))):
            target[0][of_group] = a[of_group] @ b[expert]
            target[1][of_group] = c[of_group] @ b[expert].T
            target[2][expert] = a[of_group].T @ c[of_group]
    # Sums of n terms in float32 are off by n roundings at most (Higham, section 3.1), scaling adds two.
    for actual, value, magnitude in zip((out, dx, dlayer.weight), expected, bound, strict=True):
        assert_within(actual, value, (Rows.size + 2) * EPS * magnitude)
    assert not np.any(dlayer.weight.array[np.array(sizes) == 0])
    assert not np.any(out[sum(sizes) :]) and not np.any(dx[sum(sizes) :])


def test_routers_stay_in_high_precision():
    """By what they choose among, whatever their name, or by their name; a gate of a gated unit is none."""
    key = jax.random.key(0)
    Many = hax.Axis(Experts.name, 2 * Experts.size)
    model = {
        "gate": hnn.Linear.init(In, Experts, key=key),
        "experts": hnn.MoELinear.init(Experts, In, Out, key=key),
        "mlp": {"gate": hnn.Linear.init(In, Out, key=key), "router": eqx.nn.Linear(8, 4, key=key)},
    }
    converted = describe(fp8_linear_layers(model))
    assert {row.path: row.is_fp8 for row in converted} == {
        "experts": True,
        "gate": False,
        "mlp.gate": True,
        "mlp.router": False,
    }
    assert "a router is converted only if a target names it" in describe(model)["gate"].reason
    assert describe(fp8_linear_layers(model, targets=["gate", "router"])).fp8_count == 3
    assert describe(fp8_linear_layers(model, overrides={"mlp.router": "current"}))["mlp.router"].is_fp8
    # Without such experts, a layer with outputs of that name is one like others.
    assert describe(fp8_linear_layers(hnn.Linear.init(In, Many, key=key))).fp8_count == 1


def precision_of(equation):
    """Of both operands, which a product takes alike."""
    (precision,) = set(equation.params["precision"] or (jax.lax.Precision.DEFAULT,))
    return precision.name


def test_every_ragged_product_multiplies_fp8():
    """fprop in E4M3, dgrad and wgrad with the output's gradient in E5M2, all accumulated in float32.

    fprop may accumulate fast, the gradients may not.
    """
    kind = KINDS["haliax.MoELinear"]
    layer, plain = (eqx.partition(model, eqx.is_array) for model in (kind.converted, kind.plain))

    def on_one_device(equation):
        """What devices compute of a grouped product, which is a primitive of its own."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        a, b, sizes, scale = jax.tree.unflatten(equation.params["structure"], shapes)
        assert scale is None or scale.shape == (1,)
        scale = None if scale is None else jax.ShapeDtypeStruct((), scale.dtype)
        return equations(jax.make_jaxpr(equation.params["work"])(a, b, sizes, scale))

    def products(arrays, static):
        gradients = jax.grad(lambda arrays, x: kind.loss(eqx.combine(arrays, static), x, kind.g), argnums=(0, 1))
        eqns = list(equations(jax.make_jaxpr(gradients)(arrays, kind.x)))
        eqns += [e for outer in eqns if outer.primitive.name == "fp8_grouped_product" for e in on_one_device(outer)]
        return [
            (
                equation.primitive.name,
                *(str(v.aval.dtype) for v in (*equation.invars[:2], *equation.outvars)),
                precision_of(equation),
            )
            for equation in eqns
            if "dot_general" in equation.primitive.name
        ]

    assert sorted(products(*layer)) == [
        ("ragged_dot_general", "float8_e4m3fn", "float8_e4m3fn", "float32", "DEFAULT"),
        ("ragged_dot_general", "float8_e4m3fn", "float8_e5m2", "float32", "HIGHEST"),
        ("ragged_dot_general", "float8_e5m2", "float8_e4m3fn", "float32", "HIGHEST"),
    ]
    assert [name for name, *_ in products(*plain)] == ["ragged_dot_general"] * 3


def test_moe_under_vmap():
    """Examples with group sizes of their own: each as by itself; one amax, and one kernel gradient, over them all."""
    kind = KINDS["haliax.MoELinear"]
    layer = dataclasses.replace(kind.calibrated, bias=None)
    scales = jnp.array([1.0, 2.0, 0.5])[:, None, None]
    x, g = (scales * normal((3, *a.shape), 7) for a in (kind.x, kind.g))
    sizes = jnp.array([[24, 24, 24, 24], [0, 96, 0, 0], [10, 20, 0, 30]])

    def loss(args, sizes, g):
        layer, x = args
        losses, out = jax.vmap(functools.partial(moe_loss, layer))(x, sizes, g)
        return losses.sum(), out

    (dlayer, dx), out = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))((layer, x), sizes, g)
    apart = [moe_gradients()((layer, x[i]), sizes[i], g[i]) for i in range(3)]
    np.testing.assert_array_equal(out, jnp.stack([out for _, out in apart]))
    np.testing.assert_array_equal(dx, jnp.stack([dx for (_, dx), _ in apart]))
    gradients = [np.asarray(dlayer.weight.array, np.float64) for (dlayer, _), _ in apart]
    assert_within(dlayer.weight, sum(gradients), 3 * EPS * sum(map(np.abs, gradients)))
    newest = [dlayer.dot_general.amax_history(operand)[0] for operand in OPERANDS]
    np.testing.assert_array_equal(newest, [amax(x), amax(layer.weight), amax(g)])


def test_moe_takes_one_axis_of_rows():
    layer = KINDS["haliax.MoELinear"].converted
    with pytest.raises(ValueError, match="takes one axis of rows besides 'input': flatten the others"):
        layer(hax.ones((Rows, Mid, In)), hax.named(jnp.array(SIZES), Experts))


def test_moe_with_rows_last():
    """The input's axes may come in any order, as Haliax has it; the output's follow."""
    kind = KINDS["haliax.MoELinear"]
    sizes = hax.named(jnp.array(SIZES), Experts)
    turned = kind.calibrated(hax.named(kind.x.T, (In, Rows)), sizes)
    assert turned.axes == (Out, Rows)
    np.testing.assert_array_equal(turned.array.T, grouped(kind.calibrated, kind.x))


# --- Tied weights -----------------------------------------------------------------------------------------------------


Vocab, Position = hax.make_axes(vocab=40, position=12)


class TiedHead(eqx.Module):
    """The usual language model: one matrix looks tokens up and makes logits."""

    embedding: hnn.Embedding
    body: hnn.Linear

    def __call__(self, tokens):
        x = hax.tanh(self.body(self.embedding.embed(tokens)))
        return self.embedding.unembed(x.rename({"mid": "input"}))


def tied_head() -> TiedHead:
    hidden = In.alias("mid")
    return drawn(lambda key: TiedHead(hnn.Embedding.init(Vocab, In, key=key), hnn.Linear.init(In, hidden, key=key)))


def test_a_tied_head_is_converted_only_by_name():
    model = tied_head()
    fp8 = fp8_linear_layers(model, SHORT)
    assert fp8.embedding is model.embedding and describe(fp8).fp8_count == 1
    assert describe(fp8)["embedding"].reason == "a tied head is converted only if a target names it"
    for config in (
        Fp8Config(targets=["embedding", "body"]),
        Fp8Config(overrides={"embedding": haliax_fp8.DelayedScaling()}),
    ):
        assert {row.path for row in describe(fp8_linear_layers(model, config)) if row.is_fp8} == {"embedding", "body"}


def test_an_embedding_beside_its_head_is_not_called_tied():
    """A layer from the embedding's axes to the vocabulary is the head; one to other axes is not."""
    model = {"words": tied_head(), "head": hnn.Linear.init(In, Vocab, key=jax.random.key(0))}
    reason = describe(fp8_linear_layers(model))["words.embedding"].reason
    assert reason == "an embedding; as a tied head only if a target names it"


@pytest.mark.more
def test_a_tied_head():
    """The look-up is exact; the matrix's gradient has both parts; the state is that of the head alone."""
    model = tied_head()
    tokens = hax.named(jnp.arange(12) % 7, Position)
    g = normal((12, 40), 5)
    loss = lambda model, tokens: jnp.sum(model(tokens).array * g)
    fp8 = calibrate(fp8_linear_layers(model, Fp8Config(targets="embedding")), loss, [(tokens,)])
    np.testing.assert_array_equal(fp8.embedding.embed(tokens).array, model.embedding.embed(tokens).array)
    expected, actual = (eqx.filter_jit(eqx.filter_grad(loss))(m, tokens) for m in (model, fp8))
    assert GRADIENT_DB <= sqnr(expected.embedding.weight, actual.embedding.weight)
    assert GRADIENT_DB <= sqnr(expected.body.weight, actual.body.weight)
    # Tokens above 6 are never looked up: their rows are the head's gradient alone, others have both.
    head = eqx.filter_jit(eqx.filter_grad(lambda e, x: jnp.sum(e.unembed(x).array * g)))
    x = hax.tanh(model.body(model.embedding.embed(tokens))).rename({"mid": "input"})
    only_head = head(fp8.embedding, x).weight.array
    np.testing.assert_allclose(actual.embedding.weight.array[7:], only_head[7:], rtol=1e-5, atol=1e-5)
    assert np.all(np.any(actual.embedding.weight.array[:7] != only_head[:7], axis=1))
    newest = [actual.embedding.dot_general.amax_history(operand)[0] for operand in OPERANDS]
    np.testing.assert_array_equal(newest, [amax(x), amax(model.embedding.weight), amax(g)])


def test_a_resized_embedding():
    """Fewer tokens: their rows are kept, the state too, and the matrix is still the kernel."""
    fp8 = KINDS["haliax.Embedding"].calibrated
    fewer = fp8.resize_embeddings(Mid.size)
    assert type(fewer) is type(fp8) and fewer.Vocab.size == Mid.size
    np.testing.assert_array_equal(fewer.weight.array, fp8.weight.array[: Mid.size])
    assert_same(fp8_states(fewer), fp8_states(fp8))
    x = normal((8, 48), 1)
    # As `einsum` may do it: the matrix first.
    swapped = lambda op: op(fewer.weight.array, x, (((1,), (1,)), ((), ()))).sum()
    newest = eqx.filter_grad(swapped)(fewer.dot_general)
    assert newest.amax_history("kernel")[0] == amax(fewer.weight) != amax(x)


class LanguageModel(eqx.Module):
    """Equinox's documentation of `eqx.nn.Shared`."""

    shared: eqx.nn.Shared

    def __init__(self, key):
        embedding, linear = eqx.nn.Embedding(40, 48, key=key), eqx.nn.Linear(48, 40, key=key)
        self.shared = eqx.nn.Shared((embedding, linear), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, tokens):
        embedding, linear = self.shared()
        assert embedding.weight is linear.weight
        return jax.vmap(linear)(jax.vmap(embedding)(tokens))


@pytest.mark.more
def test_a_weight_shared_by_equinox():
    """The linear layer is converted, the weight stays one parameter with the gradients of both uses."""
    model = drawn(LanguageModel)
    tokens, g = jnp.arange(12) % 7, normal((12, 40), 5)
    loss = lambda model, tokens: jnp.sum(model(tokens) * g)
    fp8 = fp8_linear_layers(model, SHORT)
    assert [row.path for row in describe(fp8) if row.is_fp8] == ["shared.pytree.1"]
    assert_same(restore_linear_layers(fp8), model)
    fp8 = calibrate(fp8, loss, [(tokens,)])
    weight = model.shared.pytree[0].weight
    newest = [ops(fp8)[0].amax_history(operand)[0] for operand in OPERANDS]
    np.testing.assert_array_equal(newest, [amax(weight[:7]), amax(weight), amax(g)])
    assert OUT_DB <= sqnr(model(tokens), fp8(tokens))
    grads = (eqx.filter_jit(eqx.filter_grad(loss))(m, tokens) for m in (model, fp8))
    expected, actual = (gradient.shared.pytree[0].weight for gradient in grads)
    assert GRADIENT_DB <= sqnr(expected, actual)


def test_a_layer_shared_by_equinox():
    """One layer at two paths has one state; with `filter_grad` it sees the larger of both uses."""
    pair = drawn(lambda key: [eqx.nn.Linear(48, 48, key=key) for _ in range(2)])
    shared = fp8_linear_layers(eqx.nn.Shared(pair, lambda pair: pair[1], lambda pair: pair[0]), SHORT)
    assert len(ops(shared)) == 1 and describe(shared).fp8_count == 1
    x = normal((48,), 1)

    def loss(shared):
        first, second = shared()
        assert isinstance(second, eqx.nn.Linear) and second.weight is first.weight
        return jnp.sum(first(x) + second(-3.0 * x))

    (op,) = ops(filter_grad(loss)(shared))
    assert op.amax_history("input")[0] == amax(3.0 * x)


# --- Ensembles and stacks ---------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["haliax.MoELinear", "haliax.Embedding", "equinox.Linear", "equinox.Linear, scalar input", "equinox.MLP"]
)
def test_ensembles_of_filter_vmap(name):
    """Members have state of their own, that of each alone, and compute what each would compute alone."""
    kind, members = KINDS[name], 3
    plain = drawn(lambda key: eqx.filter_vmap(kind.init)(jax.random.split(key, members)))
    ensemble = fp8_linear_layers(plain, kind.config)
    assert_same(restore_linear_layers(ensemble), plain)
    factors = jnp.array([1.0, 10.0, 0.1]).reshape(members, *[1] * kind.x.ndim)
    x, g = factors * kind.x[None], jnp.broadcast_to(kind.g, (members, *kind.g.shape))

    def loss(model, x, g):
        return jnp.sum(eqx.filter_vmap(kind.call)(model, x) * g)

    ensemble = calibrate(ensemble, loss, [(x, g)])
    out = eqx.filter_jit(eqx.filter_vmap(kind.call))(ensemble, x)
    for i in range(members):
        member, original = (
            jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree)  # noqa: B023
            for tree in (ensemble, plain)
        )
        alone = calibrate(fp8_linear_layers(original, kind.config), kind.loss, [(x[i], g[i])])
        for ours, theirs in zip(ops(member), ops(alone), strict=True):
            assert ours.amax_history("kernel")[0] == theirs.amax_history("kernel")[0] > 0
            for operand in OPERANDS:
                np.testing.assert_allclose(ours.scale(operand), theirs.scale(operand), rtol=1e-5)
        # Sums in another order may round to the other side in the next layer.
        assert sqnr(kind.call(member, x[i]), out[i]) > 40


Layers = hax.Axis("layers", 3)


class Residual(eqx.Module):
    """An Equinox layer in a block of a Haliax stack."""

    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    @staticmethod
    def init(*, key):
        return Residual(eqx.nn.Linear(48, 48, key=key), eqx.nn.LayerNorm(48))

    def __call__(self, x):
        return x + 0.1 * jax.vmap(lambda row: self.linear(self.norm(row)))(x)


@pytest.mark.more
def test_equinox_layers_in_a_stack():
    """State has the axis of the stack; each layer's is that of the same layer in a loop."""
    plain = drawn(lambda key: hnn.Stacked.init(Layers, Residual)(key=jax.random.split(key, 3)))
    stack = fp8_linear_layers(plain, SHORT)
    row = describe(stack)["stacked.linear"]
    assert (row.shape, row.stacked, row.is_fp8) == ("48 -> 48", "layers 3", True)
    assert stack.stacked.linear.dot_general.amax_history("input").shape == (3, 4)
    assert_same(restore_linear_layers(stack), plain)
    x, g = normal((96, 48), 1), normal((96, 48), 2)
    folded = lambda stack, x: jnp.sum(stack.fold(x) * g)

    def looped(blocks, x):
        for block in blocks:
            x = block(x)
        return jnp.sum(x * g)

    blocks = [jax.tree.map(lambda leaf: leaf[i], plain.stacked) for i in range(3)]  # noqa: B023
    stack, loop = calibrate(stack, folded, [(x,)]), calibrate(fp8_linear_layers(blocks, SHORT), looped, [(x,)])
    for i, block in enumerate(loop):
        for operand in OPERANDS:
            history = stack.stacked.linear.dot_general.amax_history(operand)[i]
            np.testing.assert_allclose(history, block.linear.dot_general.amax_history(operand), rtol=1e-5)
    actual, expected = (eqx.filter_jit(filter_grad(f))(m, x) for f, m in ((folded, stack), (looped, loop)))
    high = eqx.filter_jit(eqx.filter_grad(folded))(plain, x)
    assert GRADIENT_DB - 10 * np.log10(3) <= sqnr(high.stacked.linear.weight, actual.stacked.linear.weight)
    weights = jnp.stack([block.linear.weight for block in expected])
    assert sqnr(weights, actual.stacked.linear.weight) > 40  # some elements round to the other side


# --- Layers of one's own ----------------------------------------------------------------------------------------------


class Dense(eqx.Module):
    """A layer that nobody has registered: its kernel comes with the input axis first."""

    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


class Fp8Dense(Dense):
    op: Fp8DotGeneral

    def __call__(self, x):
        return self.op(x, self.kernel, (((x.ndim - 1,), (0,)), ((), ())))


@dataclasses.dataclass(frozen=True)
class DenseRule(LayerRule):
    """Converts `Dense`, but not small ones."""

    layer_type = Dense

    def refusal(self, layer):
        return "it is too small to be worth it" if min(layer.kernel.shape[-2:]) < 8 else None

    def kernel(self, layer):
        return Kernel(layer.kernel, *layer.kernel.shape[-2:])

    def op(self, layer):
        return layer.op if isinstance(layer, Fp8Dense) else None

    def with_op(self, layer, op):
        return Dense(layer.kernel) if op is None else Fp8Dense(layer.kernel, op)


def test_a_layer_and_a_rule_of_ones_own():
    model = {"dense": Dense(normal((48, 56), 0)), "small": Dense(jnp.ones((4, 8))), "linear": linear()}
    assert [row.path for row in describe(fp8_linear_layers(model))] == ["linear"]
    config = Fp8Config(rules=(DenseRule(), *default_rules), amax_history_length=4)
    fp8 = fp8_linear_layers(model, config)
    assert {row.path: (row.shape, row.is_fp8, row.reason) for row in describe(fp8, config=config)} == {
        "dense": ("48 -> 56", True, ""),
        "linear": ("48 -> 56", True, ""),
        "small": ("4 -> 8", False, "it is too small to be worth it"),
    }
    assert isinstance(fp8["dense"], Fp8Dense) and fp8["small"] is model["small"]
    assert_same(restore_linear_layers(fp8, rules=config.rules), model)
    with pytest.raises(ValueError, match="small, which cannot be converted: it is too small"):
        fp8_linear_layers(model, dataclasses.replace(config, targets="small"))

    x, g = normal((96, 48), 1), normal((96, 56), 2)
    loss = lambda dense, x: jnp.sum(dense(x) * g)
    dense = calibrate(fp8["dense"], loss, [(x,)])
    expected = DelayedScalingReference(4)
    expected.record(input=amax(x), kernel=amax(dense.kernel), output_grad=amax(g))
    assert_state_is(dense.op, expected)
    assert OUT_DB <= sqnr(model["dense"](x), dense(x))
    plain, ours = (jax.grad(lambda x, d=d: loss(d, x))(x) for d in (model["dense"], dense))
    assert GRADIENT_DB <= sqnr(plain, ours)
    kernels = (eqx.filter_grad(loss)(d, x).kernel for d in (model["dense"], dense))
    assert GRADIENT_DB <= sqnr(*kernels)


class DenseBlock(eqx.Module):
    """Two layers of one's own in a block of a Haliax stack."""

    first: Dense
    second: Dense

    @staticmethod
    def init(*, key):
        return DenseBlock(*(Dense(jax.random.normal(k, (48, 48)) / 48) for k in jax.random.split(key)))

    def __call__(self, x):
        return x + self.first(x) * self.second(x)


@pytest.mark.more
def test_layers_of_ones_own_in_stacks_and_ensembles():
    """Each layer of a stack and each member of an ensemble has a state; all it takes is the kernel's last two axes."""
    config = Fp8Config(rules=(DenseRule(), *default_rules), amax_history_length=4)
    stack = hnn.Stacked.init(Layers, DenseBlock)(key=jax.random.split(jax.random.key(0), 3))
    fp8 = fp8_linear_layers(stack, config)
    assert describe(fp8, config=config)["stacked.first"].shape == "48 -> 48"
    shared = haliax_fp8.memory.share_input_scales(fp8, [("first", "second")], rules=config.rules)
    assert shared.stacked.second.op.state.shared_input == "stacked.first+second"
    assert_same(haliax_fp8.memory.separate_input_scales(shared, rules=config.rules), fp8)
    x = normal((96, 48), 1)
    loss = lambda model, x: jnp.sum(model.fold(x))
    kernels = jnp.max(jnp.abs(stack.stacked.first.kernel), axis=(1, 2))
    measured = filter_grad(loss)(shared, x).stacked.first.op.amax_history("kernel")[:, 0]
    np.testing.assert_array_equal(measured, kernels)

    ensemble = eqx.filter_vmap(Dense)(stack.stacked.first.kernel)
    ops = fp8_linear_layers(ensemble, config).op
    np.testing.assert_array_equal(ops.scale("kernel"), jnp.ones(3))


def linear(in_features=48, out_features=56) -> eqx.nn.Linear:
    return drawn(lambda key: eqx.nn.Linear(in_features, out_features, key=key))


def test_the_first_rule_that_fits_decides():
    """A rule for a class that has one already: more than 50 features, or the default."""

    class Wide(EquinoxLinear):
        def refusal(self, layer):
            return super().refusal(layer) or (None if layer.in_features > 50 else "fewer than 50 features")

    model = {"narrow": linear(), "wide": linear(64, 8)}
    for layers, converted in (((Wide(), *default_rules), {"wide"}), ((*default_rules, Wide()), {"narrow", "wide"})):
        config = Fp8Config(rules=layers)
        fp8 = fp8_linear_layers(model, config)
        assert {row.path for row in describe(fp8, config=config) if row.is_fp8} == converted


@dataclasses.dataclass(frozen=True)
class Wider(EquinoxLinear):
    """Converts layers with few outputs only if they are named, and never those with few inputs."""

    def refusal(self, layer):
        if layer.in_features < 50:
            return "fewer than 50 inputs"
        return super().refusal(layer) or (OnlyIfNamed("few outputs") if layer.out_features < 50 else None)


def test_a_layer_that_is_converted_only_if_it_is_named():
    """By a target or an override; converted, it stays so. Until then it does not count as a linear layer."""
    model = {"wide": linear(64, 64), "few": linear(64, 8), "narrow": linear(48, 64)}
    rules = (Wider(), *default_rules)
    in_fp8 = lambda model, config: {row.path for row in describe(model, config=config) if row.is_fp8}
    config = Fp8Config(rules=rules)
    fp8 = fp8_linear_layers(model, config)
    assert in_fp8(fp8, config) == {"wide"}
    assert {row.path: row.reason for row in describe(model, config=config)} == {
        "wide": "not converted",
        "few": "few outputs",
        "narrow": "fewer than 50 inputs",
    }
    assert describe(fp8, config=config).count == 2
    named = (Fp8Config(rules=rules, targets=("few", "wide")), Fp8Config(rules=rules, overrides={"few": "rowwise"}))
    for naming in named:
        both = fp8_linear_layers(model, naming)
        assert in_fp8(both, naming) == {"few", "wide"} and describe(both, config=naming).count == 3
        assert_same(fp8_linear_layers(both, config)["few"], both["few"])
    with pytest.raises(ValueError, match="select narrow, which cannot be converted"):
        fp8_linear_layers(model, Fp8Config(rules=rules, targets="narrow"))
    with pytest.raises(ValueError, match="no layer that can be converted; few cannot be: few outputs"):
        fp8_linear_layers({"few": model["few"]}, config)
    # For inference too.
    served = haliax_fp8.serving.quantize_for_inference(model, "FP8_DYNAMIC", rules=config.rules)
    assert in_fp8(served, config) == {"wide"}
    served = haliax_fp8.serving.quantize_for_inference(model, "FP8_DYNAMIC", rules=config.rules, targets="few")
    assert in_fp8(served, config) == {"few"}
    with pytest.raises(ValueError, match="reason=None of OnlyIfNamed is not a str; use"):
        OnlyIfNamed(None)


def test_a_refusal_that_is_neither_a_reason_nor_none():
    class Wrong(EquinoxLinear):
        def refusal(self, layer):
            return False

    config = Fp8Config(rules=(Wrong(), *default_rules))
    with pytest.raises(ValueError, match=r"Wrong\.refusal\(layer\) returned False: it"):
        fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)), config)


# --- What is refused --------------------------------------------------------------------------------------------------


class MyLinear(eqx.nn.Linear):
    def __call__(self, x, *, key=None):
        return super().__call__(2 * x)


class MyMoE(hnn.MoELinear):
    pass


class MyEmbedding(hnn.Embedding):
    pass


Height = hax.Axis("height", 8)
CELL = "a recurrent cell multiplies by raw weight matrices; use Fp8DotGeneral in a cell of your own"
CONVOLUTION = "convolutions have no FP8 product"
SUBCLASS = "{} is a subclass of {} and may multiply differently"
as_subclass = lambda layer, cls: cls(**{f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)})
REFUSED = {
    "GRUCell": (lambda key: eqx.nn.GRUCell(8, 4, key=key), CELL, "12 × 8"),
    "LSTMCell": (lambda key: eqx.nn.LSTMCell(8, 4, key=key), CELL, "16 × 8"),
    "Conv": (lambda key: eqx.nn.Conv(2, 3, 4, 5, key=key), CONVOLUTION, "4 × 3 × 5 × 5"),
    "Conv1d": (lambda key: eqx.nn.Conv1d(3, 4, 5, key=key), CONVOLUTION, "4 × 3 × 5"),
    "Conv2d": (lambda key: eqx.nn.Conv2d(3, 4, 1, key=key), CONVOLUTION, "4 × 3 × 1 × 1"),
    "Conv3d": (lambda key: eqx.nn.Conv3d(3, 4, 2, key=key), CONVOLUTION, "4 × 3 × 2 × 2 × 2"),
    "ConvTranspose1d": (lambda key: eqx.nn.ConvTranspose1d(3, 4, 5, key=key), CONVOLUTION, "4 × 3 × 5"),
    "ConvTranspose2d": (lambda key: eqx.nn.ConvTranspose2d(3, 4, 2, key=key), CONVOLUTION, "4 × 3 × 2 × 2"),
    "haliax.Conv": (lambda key: hnn.Conv.init(Height, In, Out, 3, key=key), CONVOLUTION, "56 × 48 × 3"),
    "haliax.ConvTranspose": (
        lambda key: hnn.ConvTranspose.init(Height, In, Out, 3, key=key),
        CONVOLUTION,
        "56 × 48 × 3",
    ),
    "subclass of eqx.nn.Linear": (
        lambda key: MyLinear(8, 4, key=key),
        SUBCLASS.format("MyLinear", "Linear"),
        "8 -> 4",
    ),
    "subclass of haliax.MoELinear": (
        lambda key: as_subclass(hnn.MoELinear.init(Experts, In, Out, key=key), MyMoE),
        SUBCLASS.format("MyMoE", "MoELinear"),
        "experts 4: input 48 -> output 56",
    ),
    "subclass of haliax.Embedding": (
        lambda key: as_subclass(hnn.Embedding.init(Out, In, key=key), MyEmbedding),
        SUBCLASS.format("MyEmbedding", "Embedding"),
        "input 48 -> output 56",
    ),
}


@pytest.mark.parametrize("init, reason, shape", REFUSED.values(), ids=REFUSED)
def test_refused_by_name(init, reason, shape):
    """Left as they are and listed with the reason; asked for by name, an error with the reason."""
    model = {"layer": drawn(init), "linear": linear()}
    fp8 = fp8_linear_layers(model)
    assert fp8["layer"] is model["layer"]
    rows = {row.path: (row.shape, row.is_fp8, row.reason) for row in describe(fp8)}
    assert rows == {"layer": (shape, False, reason), "linear": ("48 -> 56", True, "")}
    assert reason.split()[0] in str(describe(fp8))
    with pytest.raises(ValueError) as error:
        fp8_linear_layers(model, Fp8Config(targets=["layer", "linear"]))
    assert str(error.value).endswith(f"layer, which cannot be converted: {reason}")


@pytest.mark.more
def test_a_refused_layer_does_not_hide_others():
    """A cell beside a linear layer: the one is left, the other runs in FP8, and the model trains.

    The gradient of the cell is that of float64 for what the head hands back: its three operands rounded, nothing else.
    """

    class Recurrent(eqx.Module):
        cell: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __call__(self, xs):
            state, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(48), xs)
            return self.head(state)

    model = drawn(lambda key: Recurrent(eqx.nn.GRUCell(8, 48, key=key), eqx.nn.Linear(48, 56, key=key)))
    xs = normal((5, 8), 0)
    loss = lambda model, xs: jnp.sum(model(xs) ** 2)
    fp8 = calibrate(fp8_linear_layers(model, SHORT), loss, [(xs,)])
    actual = eqx.filter_jit(eqx.filter_grad(loss))(fp8, xs)

    last = lambda cell: jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(48), xs)[0]
    hidden, pullback = eqx.filter_vjp(eqx.filter_jit(last), model.cell)
    op = fp8.head.dot_general
    x, w = (quantize(a, op.scale(name), E4M3) for a, name in ((hidden, "input"), (model.head.weight, "kernel")))
    # The loss is the sum of squares, so that the output's gradient is twice the output.
    g = quantize(2 * (w @ x + float64(model.head.bias)), op.scale("output_grad"), E5M2)
    (expected,) = pullback(jnp.asarray(g @ w, jnp.float32))
    # Each step in float32 is off by less than the number of its terms in roundings, here 5 steps and 4 products of 56.
    rounding = 5 * 4 * 56 * EPS
    assert -20 * np.log10(rounding) <= sqnr(expected.weight_hh, actual.cell.weight_hh)
    in_high_precision = eqx.filter_jit(eqx.filter_grad(loss))(model, xs)
    assert GRADIENT_DB - 3 <= sqnr(in_high_precision.cell.weight_hh, actual.cell.weight_hh) < 40, "rounding shows"


# --- What a converted layer still is ----------------------------------------------------------------------------------


def with_other_state(model: Any) -> Any:
    """The model as after some training, for tests that do not care which."""
    other = lambda node: jax.tree.map(lambda x: x + 0.5, node) if is_state(node) else node
    return jax.tree.map(other, model, is_leaf=is_state)


@each_kind
def test_restoring_is_the_inverse(kind):
    assert_same(restore_linear_layers(kind.converted), kind.plain)
    assert type(restore_linear_layers(kind.converted)) is type(kind.plain)
    assert_same(restore_linear_layers(with_other_state(kind.converted)), kind.plain)
    for ours, theirs in zip(jax.tree.leaves(restore_linear_layers(kind.converted)), leaves(kind.plain), strict=True):
        assert ours is theirs or not eqx.is_array(ours)


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


@each_of_some_kinds
def test_converting_twice_keeps_the_state(kind):
    model = with_other_state(kind.converted)
    assert all(a is b for a, b in zip(leaves(fp8_linear_layers(model, kind.config)), leaves(model), strict=True))


@each_of_some_kinds
def test_shapes_alone_are_enough(kind):
    """Conversion of an abstract model gives the abstract converted model."""
    # Made here: what is made inside of a transformation cannot be kept for other tests.
    plain, concrete = kind.plain, kind.converted
    abstract = eqx.filter_eval_shape(lambda: plain)
    converted = fp8_linear_layers(abstract, kind.config)
    expected = eqx.filter_eval_shape(lambda: concrete)
    assert jax.tree.structure(converted) == jax.tree.structure(expected)
    described = [
        [(leaf.shape, leaf.dtype) for leaf in leaves(tree) if hasattr(leaf, "shape")] for tree in (converted, expected)
    ]
    assert described[0] == described[1]


@each_single_kind
def test_the_class_is_a_subclass_of_the_plain_one(kind):
    """Code that asks for the layer's class, and its other fields, works on."""
    assert isinstance(kind.converted, type(kind.plain))
    for field in dataclasses.fields(kind.plain):
        if field.name != "dot_general":
            assert getattr(kind.converted, field.name) is getattr(kind.plain, field.name)


@each_single_kind
def test_tree_surgery(kind):
    """`eqx.tree_at` replaces a weight, and a state, and leaves the rest."""
    doubled = eqx.tree_at(lambda layer: layer.weight, kind.converted, replace_fn=lambda weight: 2 * weight)
    np.testing.assert_array_equal(float64(doubled.weight), 2 * float64(kind.plain.weight))
    assert_same(doubled.dot_general.state, kind.converted.dot_general.state)
    state = fp8_states(with_other_state(kind.converted))[0]
    other = eqx.tree_at(lambda layer: layer.dot_general.state, kind.converted, state)
    assert_same((other.dot_general.state, other.weight), (state, kind.plain.weight))


@each_of_some_kinds
def test_serialisation(kind):
    """Leaves written and read, state and all."""
    model, buffer = with_other_state(kind.converted), io.BytesIO()
    eqx.tree_serialise_leaves(buffer, model)
    buffer.seek(0)
    assert_same(eqx.tree_deserialise_leaves(buffer, kind.converted), model)


@each_of_some_kinds
def test_filters(kind):
    """Partition and combine; `filter_jit` and `filter_closure_convert` take a converted model as any other."""
    model = kind.converted
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    assert_same(eqx.combine(arrays, static), model)
    assert len(leaves(arrays)) == len(leaves(eqx.filter(kind.plain, eqx.is_inexact_array))) + kind.layers
    through = eqx.filter_jit(lambda model: model)(model)
    assert_same(eqx.filter(through, eqx.is_array), eqx.filter(model, eqx.is_array))


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*SINGLE, "equinox.MultiheadAttention"])
def test_state_dicts(name):
    """Haliax's state dicts do not know of FP8: the same keys and values, and each model loads what the other saved."""
    kind = KINDS[name]  # not `eqx.nn.MLP`: a state dict takes no tuples
    fp8 = with_other_state(kind.converted)
    saved, ours = (state_dicts.to_state_dict(model) for model in (kind.plain, fp8))
    assert set(saved) == set(ours)
    for key, value in saved.items():
        np.testing.assert_array_equal(ours[key], value)
    # Arrays of JAX: Haliax shards those of NumPy over a mesh, and there is none.
    double = lambda x: 2 * x if jnp.issubdtype(x.dtype, jnp.inexact) else x
    other = {key: double(jnp.asarray(value)) for key, value in saved.items()}
    loaded = state_dicts.from_state_dict(fp8, other)
    assert_same(restore_linear_layers(loaded), state_dicts.from_state_dict(kind.plain, other))
    assert_same(fp8_states(loaded), fp8_states(fp8))


@pytest.mark.parametrize("shape", [(), (63,), (256, 64), (64, 64)])
def test_an_input_that_does_not_fit_names_the_layer(shape):
    """Without batch axis under `vmap`, of another width, with a batch axis; and with one that fits by chance."""
    model = fp8_linear_layers(eqx.nn.MLP(64, 32, 128, 1, key=jax.random.key(0)))
    with pytest.raises(ValueError) as raised:
        model(jnp.ones(shape))
    message = str(raised.value)
    assert f"x of shape {shape} does not fit a layer that describe(model) shows as 64 -> 128" in message
    assert "of shape (64,)" in message and "jax.vmap(model)" in message
    assert [row.path for row in describe(model) if row.shape == "64 -> 128"] == ["layers.0"]


def test_examples_in_columns_fit_as_in_the_plain_layer():
    """What `@` takes; with a bias, where that can be added."""
    for use_bias, count in ((False, 7), (True, 1), (True, 128)):
        layer = eqx.nn.Linear(64, 128, use_bias=use_bias, key=jax.random.key(0))
        x = jnp.ones((64, count))
        with jax.numpy_rank_promotion("allow"):
            shapes = {layer(x).shape, fp8_linear_layers(layer)(x).shape}
        assert shapes == {(128, 128 if use_bias else count)}
