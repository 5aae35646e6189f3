"""`muon_dimensions`: Muon orthogonalizes each layer's matrix, by an SVD of its gradient, and nothing else."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float64
from optax.contrib import muon

from haliax_fp8 import Fp8Config, Fp8DotGeneral, OverwriteWithGradient, TrainStep, filter_grad, fp8_linear_layers
from haliax_fp8.layers import Kernel, LayerRule, default_rules
from haliax_fp8.training import muon_dimensions, quantized_state


Batch, Vocab, E, A, B, C, D, Wide, Layers, Experts = hax.make_axes(
    batch=96, vocab=20, e=128, a=2, b=128, c=3, d=4, wide=8, layers=2, experts=2
)


class Custom(eqx.Module):
    """A layer of one's own: `(in, out)`, and a rule that does not say which axis is which."""

    weight: jax.Array
    op: Fp8DotGeneral | None = None

    def __call__(self, x):
        multiply = jax.lax.dot_general if self.op is None else self.op
        return multiply(x, self.weight, (((1,), (0,)), ((), ())))


class CustomRule(LayerRule):
    layer_type = Custom
    refusal = lambda self, layer: None
    kernel = lambda self, layer: Kernel(layer.weight, *layer.weight.shape[-2:])
    op = lambda self, layer: layer.op
    with_op = lambda self, layer, op: dataclasses.replace(layer, op=op)


RULES = (CustomRule(), *default_rules)


class Block(eqx.Module):
    norm: hnn.LayerNorm
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(key):
        up = hnn.Linear.init(E, Wide, key=key)
        return Block(hnn.LayerNorm.init(E), up, hnn.Linear.init(Wide, E, key=key, use_bias=False))

    def __call__(self, x):
        return self.down(self.up(self.norm(x)))


class Model(eqx.Module):
    """Every kind of layer; most have 128 inputs as their last axis, so that moments can be in FP8."""

    embedding: hnn.Embedding
    blocks: hnn.Stacked
    named: hnn.Linear
    experts: hnn.MoELinear
    linear: eqx.nn.Linear
    ensemble: eqx.nn.Linear
    custom: Custom
    head: hnn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 9)
        return Model(
            hnn.Embedding.init(Vocab, E, key=keys[0]),
            hnn.Stacked.init(Layers, Block)(keys[1:3]),
            hnn.Linear.init((A, B), (C, D), key=keys[3]),
            hnn.MoELinear.init(Experts, E, Wide, key=keys[4], out_first=True),
            eqx.nn.Linear(128, 6, key=keys[5]),
            eqx.filter_vmap(lambda key: eqx.nn.Linear(128, 5, key=key))(keys[6:8]),
            Custom(jax.random.normal(keys[8], (6, 128))),
            hnn.Linear.init(E, Vocab, key=keys[8]),
        )

    def __call__(self, x, ab, tokens):
        """The outputs of all layers."""
        sizes = hax.named(jnp.array([64, 32]), Experts)
        per_member = eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x), in_axes=(eqx.if_array(0), None))
        outputs = [self.embedding(tokens), self.blocks.fold(x), self.named(ab), self.experts(x, sizes), self.head(x)]
        hidden = jax.vmap(self.linear)(x.array)
        return [y.array for y in outputs] + [hidden, per_member(self.ensemble, x.array), self.custom(hidden)]


def loss_fn(model, *batch):
    """Its gradients with respect to the outputs are at random, so that those of weights have full rank."""
    return sum(jnp.sum(y * jax.random.normal(jax.random.key(i), y.shape)) for i, y in enumerate(model(*batch)))


def matrices(model):
    """What Muon has to orthogonalize, `[..., in, out]`, by the names of the axes; and what goes to Adam."""
    by_name = lambda w, *axes: float64(w.rearrange(tuple(axis.name for axis in axes)))
    block, transposed = model.blocks.stacked, lambda w: np.swapaxes(float64(w), -1, -2)
    for_muon = {
        "up": by_name(block.up.weight, Layers, E, Wide),
        "down": by_name(block.down.weight, Layers, Wide, E),
        "named": by_name(model.named.weight, A, B, C, D).reshape(256, 12),
        "experts": by_name(model.experts.weight, Experts, E, Wide),
        "linear": transposed(model.linear.weight),
        "ensemble": transposed(model.ensemble.weight),
        "custom": float64(model.custom.weight),
    }
    norm, biases = block.norm.weight, [model.named.bias, block.up.bias, model.experts.bias, model.linear.bias]
    return for_muon, [float64(x) for x in (model.embedding.weight, model.head.weight, norm, *biases)]


BATCH = (
    hax.random.normal(jax.random.key(1), (Batch, E)),
    hax.random.normal(jax.random.key(2), (Batch, A, B)),
    hax.named(jnp.arange(Batch.size) % Vocab.size, Batch),
)
MODEL = fp8_linear_layers(Model.init(), Fp8Config(rules=RULES, exclude="head", recipe="current"))
RATE = 1e-3


def changes(new, old):
    return [jax.tree.map(lambda a, b: (a - b) / RATE, x, y) for x, y in zip(matrices(new), matrices(old), strict=True)]


@pytest.mark.parametrize(
    "wrap", [lambda optimizer: quantized_state(optimizer, min_size=0), lambda optimizer: optimizer]
)
def test_the_update_of_each_matrix_is_orthogonal(wrap, standard_promotion):
    dimensions = muon_dimensions(MODEL, rules=RULES)
    step = TrainStep(loss_fn, wrap(muon(RATE, muon_weight_dimension_numbers=lambda _: dimensions)), rules=RULES)
    state = step.init(MODEL)
    if hasattr(state, "scales"):  # all but `down`, whose inputs are 8
        momentum = state.optimizer.inner_states["muon"].inner_state[0].mu
        assert sorted(str(x.dtype) for x in jax.tree.leaves(momentum)) == ["float32"] + ["uint8"] * 6
    first, state, _ = step(MODEL, state, *BATCH)
    second, _, _ = step(first, state, *BATCH)
    gradients, _ = matrices(eqx.filter_jit(filter_grad(loss_fn))(MODEL, *BATCH))
    updates, by_adam = changes(first, MODEL)
    later, _ = changes(second, first)
    for name, gradient in gradients.items():
        u, _, vt = np.linalg.svd(gradient, full_matrices=False)
        # Optax multiplies by this; Newton-Schulz leaves singular values between 0.68 and 1.21.
        size = np.sqrt(max(1.0, gradient.shape[-1] / gradient.shape[-2]))
        along = -np.swapaxes(u, -1, -2) @ updates[name] @ np.swapaxes(vt, -1, -2) / size
        values = np.diagonal(along, axis1=-2, axis2=-1)
        assert 0.6 < values.min() and values.max() < 1.25, name
        np.testing.assert_allclose(along, values[..., None] * np.eye(values.shape[-1]), atol=2e-2, err_msg=name)
        # From momentum that was stored.
        values = np.linalg.svd(later[name], compute_uv=False) / size
        assert 0.6 < values.min() and values.max() < 1.25, name
    for update in by_adam:  # whose first update has one size, and the gradient's sign
        np.testing.assert_allclose(np.abs(update), np.abs(by_adam[0]).max(), rtol=1e-2)


def axes_of(model, **options):
    dimensions = jax.tree.leaves(muon_dimensions(model, **options), is_leaf=lambda x: hasattr(x, "output_axis"))
    return [tuple(x) for x in dimensions if x is not None]


def test_of_parts_abstract_models_and_vectors():
    layer = hnn.Linear.init((A, B), (C, D), key=jax.random.key(0))
    abstract = eqx.filter_eval_shape(lambda: fp8_linear_layers({"x": layer}))
    assert axes_of(abstract) == [((2, 3), (0, 1))]
    # What is frozen is None in the trained part; a matrix of one row or column is a vector.
    scalar = eqx.nn.Linear("scalar", 4, key=jax.random.key(0))
    one = hnn.Linear.init(A, (), key=jax.random.key(0))
    model = fp8_linear_layers({"trained": layer, "frozen": layer, "scalar": scalar, "one": one})
    spec = jax.tree.map(lambda x: isinstance(x, OverwriteWithGradient), model, is_leaf=eqx.is_array)
    trained, _ = eqx.partition(model, eqx.tree_at(lambda m: m["trained"].weight.array, spec, True))
    assert axes_of(model) == [((2, 3), (0, 1))] * 2
    assert axes_of(trained) == [((2, 3), (0, 1))]


def test_no_matrix_and_a_rule_that_does_not_tell():
    with pytest.raises(ValueError, match="no linear layer whose weight is trained"):
        muon_dimensions({"head": eqx.nn.Linear(4, 4, key=jax.random.key(0))})

    class Unknown(CustomRule):
        kernel = lambda self, layer: Kernel(layer.weight)

    with pytest.raises(ValueError, match=r"custom does not say which axes.*contracted=\(0,\)"):
        muon_dimensions({"custom": Custom(jnp.ones((4, 8)))}, rules=(Unknown(),))


sgd_of = lambda labels: optax.partition({"all": optax.sgd(0.1)}, labels)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda tree: sgd_of(jax.tree.map(lambda _: "all", tree)),
        lambda tree: quantized_state(optax.chain(optax.clip(1.0), sgd_of(jax.tree.map(lambda _: "all", tree)))),
        lambda tree: muon(0.1, muon_weight_dimension_numbers=tree),
    ],
)
@pytest.mark.parametrize("convert", [fp8_linear_layers, lambda model: model])
def test_a_tree_that_optax_calls_names_the_lambda(optimizer, convert):
    model = convert(eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0)))
    init = lambda optimizer: TrainStep(lambda model, x: model(x).sum(), optimizer).init(model)
    with pytest.raises(ValueError, match="Optax calls it: pass `lambda _: labels`"):
        init(optimizer(muon_dimensions(model)))
    with pytest.raises(ZeroDivisionError):  # another error stays
        init(sgd_of(lambda _: 1 / 0))
