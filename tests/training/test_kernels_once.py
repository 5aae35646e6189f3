"""Kernels that a step quantizes once: the numbers of quantizing them in each microbatch, bit for bit."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import equations
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, TrainStep, fp8_linear_layers, quantize_kernels
from haliax_fp8.layers import Kernel, LayerRule, default_rules
from haliax_fp8.recipes import E4M3, CurrentScaling, HighPrecision, Quantization, Stochastic
from haliax_fp8.training import exact_gradients


Batch, In, Hidden, Heads, Size = hax.make_axes(batch=4, embed=64, mlp=96, heads=3, head_size=32)
PARTS = 3


class Model(eqx.Module):
    """Kernels that lie along what fprop sums over, or across it, with one contracted axis or two; and one of muP."""

    up: hnn.Linear
    heads: hnn.Linear
    out: hnn.Linear
    last: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 4)
        linear = functools.partial(hnn.Linear.init, use_bias=False)
        mup = hnn.Linear.output_reparam()
        return Model(
            linear(In, Hidden, key=keys[0]),
            linear(Hidden, (Heads, Size), key=keys[1], out_first=False),
            linear((Heads, Size), In, key=keys[2], reparam_cls=mup),
            eqx.nn.Linear(In.size, 32, key=keys[3]),
        )

    def __call__(self, x):
        x = self.out(self.heads(hnn.gelu(self.up(x))))
        return jax.vmap(self.last)(x.array)


def loss_fn(model, x):
    return (model(hax.named(x, (Batch, In))).astype(jnp.float32) ** 2).mean()


def parts_of_batch(dtype=jnp.float32):
    # Of different sizes, so that the maximum over microbatches is not that of the last.
    return jax.random.normal(jax.random.key(1), (PARTS, Batch.size, In.size), dtype) * jnp.array(
        [1, 4, 2], dtype
    ).reshape(3, 1, 1)


def accumulated(gradient, model, parts):
    """The sum over microbatches, in a loop."""
    total = None
    for part in parts:
        total = fp8.accumulate_gradients(total, gradient(model, part))
    return total


def in_a_scan(gradient, model, parts):
    first = gradient(model, parts[0])
    add = lambda total, part: (fp8.accumulate_gradients(total, gradient(model, part)), None)
    return jax.lax.scan(add, first, parts[1:])[0]


def assert_same(actual, expected):
    """The same trees, bit for bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
        assert np.all(np.isfinite(np.asarray(a, np.float32))) or a.ndim == 2


def quantized_kernels(function, *args):
    """How many arrays a function rounds to FP8 that are as large as the first kernel."""
    jaxpr = jax.make_jaxpr(function)(*args)
    size = In.size * Hidden.size
    return sum(
        eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.float8_e4m3fn
        for eqn in equations(jaxpr)
        if eqn.outvars and getattr(eqn.outvars[0].aval, "size", 0) == size
    )


RECIPES = ("delayed", "static", "current", "rowwise", "rowwise_wgrad_bf16", "deepseek", "mxfp8", "nvfp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_has_the_same_numbers(recipe):
    """In bfloat16, where scales of tensors are rounded up; two steps, so that the second has new scales."""
    model = fp8.cast_params(fp8_linear_layers(Model.init(), recipe=recipe), jnp.bfloat16)
    batch = parts_of_batch(jnp.bfloat16).reshape(-1, In.size)
    results = []
    for choice in ("in_each_microbatch", "once"):
        step = TrainStep(loss_fn, optax.sgd(0.1), microbatches=PARTS, quantize_kernels=choice)
        trained, opt_state = step.calibrate(model, batch, key=jax.random.key(3)), step.init(model)
        for i in range(2):
            trained, opt_state, metrics = step(trained, opt_state, batch, key=jax.random.key(i))
        results.append((fp8.trainable(trained), [op.state for op in ops(trained)], metrics))
    assert_same(*results)


def ops(model):
    return [x for x in jax.tree.leaves(model, is_leaf=is_op) if is_op(x)]


def is_op(node):
    return isinstance(node, fp8.Fp8DotGeneral)


def test_loops_and_gradients_of_all_kinds():
    """Copies made outside of the loss or within; loops that are unrolled or scanned; three ways to take gradients."""
    model, parts = fp8_linear_layers(Model.init(), amax_history_length=4), parts_of_batch()
    inside = lambda model, parts: jax.lax.scan(
        lambda loss, part: (loss + loss_fn(quantized := model, part), None), jnp.float32(0), parts
    )[0]

    @eqx.filter_jit
    def gradients(model, parts):
        ours, equinox = fp8.filter_grad(loss_fn), eqx.filter_grad(loss_fn)
        exact = eqx.filter_grad(exact_gradients(loss_fn))
        quantized = quantize_kernels(model)
        by_ours = [
            in_a_scan(ours, model, parts),
            in_a_scan(ours, quantized, parts),
            accumulated(ours, quantized, parts),
            accumulated(exact, quantized, parts),
        ]
        by_equinox = [accumulated(equinox, model, parts), accumulated(equinox, quantized, parts)]
        scans = [
            fp8.filter_grad(inside)(model, parts),
            fp8.filter_grad(lambda model, parts: inside(quantize_kernels(model), parts))(model, parts),
        ]
        split = lambda tree: fp8.partition_for_grad_overwrite(tree)
        return [[split(tree) for tree in trees] for trees in (by_ours, by_equinox, scans)]

    for expected, *others in gradients(model, parts):
        for actual in others:
            assert_same(actual, expected)


def test_each_kernel_is_quantized_once():
    model, parts = fp8_linear_layers(Model.init()), parts_of_batch()
    each = quantized_kernels(lambda: accumulated(fp8.filter_grad(loss_fn), model, parts))
    once = quantized_kernels(lambda: accumulated(fp8.filter_grad(loss_fn), quantize_kernels(model), parts))
    assert (each, once) == (2 * PARTS, 1)


# --- Layers that products reach in other ways -------------------------------------------------------------------------


class Blocks(eqx.Module):
    """A stack in a scan, with checkpointing or without; a tied head; experts; a layer that is called twice."""

    plain: hnn.Stacked
    checkpointed: hnn.Stacked
    table: hnn.Embedding
    experts: hnn.MoELinear
    ensemble: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 8)
        Layers, Vocab, Experts = hax.make_axes(layers=2, vocab=40, experts=2)
        stack = lambda keys, **options: hnn.Stacked.init(Layers, Block, **options)(key=keys)
        members = eqx.filter_vmap(lambda key: eqx.nn.Linear(In.size, 8, key=key))(keys[5:8])
        return Blocks(
            stack(keys[:2]),
            stack(keys[2:4], gradient_checkpointing=True),
            hnn.Embedding.init(Vocab, In, key=keys[4]),
            hnn.MoELinear.init(Experts, In, In.alias("out"), key=keys[5], use_bias=False, out_first=True),
            members,
        )

    def __call__(self, x):
        x = self.checkpointed.fold(self.plain.fold(x))
        sizes = hax.named(jnp.array([1, 3], jnp.int32), self.experts.Experts)
        rows = self.experts(x, sizes).rename({"out": "embed"})
        of_members = eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x), in_axes=(eqx.if_array(0), None))(
            self.ensemble, rows.array
        )
        return self.table.unembed(rows).array.sum() + of_members.sum()


class Block(eqx.Module):
    linear: hnn.Linear

    @staticmethod
    def init(*, key):
        return Block(hnn.Linear.init(In, In.alias("out"), key=key))

    def __call__(self, x):
        twice = lambda x: self.linear(x).rename({"out": "embed"})
        return x + hax.tanh(twice(hax.tanh(twice(x))))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "deepseek"])
def test_stacks_experts_ensembles_and_heads(recipe):
    targets = ["linear", "experts", "table", "ensemble"]
    model, parts = fp8_linear_layers(Blocks.init(), recipe=recipe, targets=targets), parts_of_batch()
    loss = lambda model, x: model(hax.named(x, (Batch, In))) ** 2

    @eqx.filter_jit
    def both(model, parts):
        gradient = fp8.filter_grad(loss)
        quantized = quantize_kernels(model)
        assert all(op.kernel_copies is not None for op in ops(quantized))
        return [accumulated(gradient, m, parts[:2]) for m in (model, quantized)]

    assert_same(*both(model, parts))


def test_a_layer_that_jax_differentiates_before_it_maps():
    """A `custom_jvp` around it, and forward mode."""
    layer, x = fp8_linear_layers(eqx.nn.Linear(8, 4, key=jax.random.key(0)), recipe="rowwise"), jnp.ones((3, 8))

    @jax.custom_jvp
    def call(weight, x):
        raise AssertionError("not called")

    def both(make):
        model = make(layer)
        with_weight = lambda weight, x: eqx.tree_at(lambda m: m.weight, model, weight)(x)

        @jax.custom_jvp
        def call(weight, x):
            return with_weight(weight, x)

        call.defjvp(lambda primals, tangents: jax.jvp(with_weight, primals, tangents))
        mapped = lambda weight: (jax.vmap(call, (None, 0))(weight, x * jnp.arange(3.0)[:, None]) ** 2).sum()
        tangent = jax.jvp(lambda x: with_weight(layer.weight, x), (x[0],), (x[1],))
        each = jax.vmap(jax.grad(lambda weight, x: (with_weight(weight, x) ** 2).sum()), (None, 0))(layer.weight, x)
        return jax.grad(mapped)(layer.weight), tangent, each

    assert_same(*jax.jit(lambda: (both(quantize_kernels), both(lambda layer: layer)))())


def test_divided_weights():
    """A kernel divided over devices: by automatic axes, and inside `shard_map`, where devices take the maximum."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = fp8_linear_layers(eqx.nn.Linear(64, 32, key=jax.random.key(0)))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    divided = eqx.tree_at(lambda m: m.weight, model, put(model.weight, None, "data"))
    x = jax.random.normal(jax.random.key(1), (4, 64))
    loss = lambda model, x: (jax.vmap(model)(x) ** 2).mean()

    @eqx.filter_jit
    def gradients(model, x, make):
        return fp8.filter_grad(loss)(make(model), x)

    with jax.set_mesh(mesh):
        found = [gradients(divided, put(x), make) for make in (lambda m: m, quantize_kernels)]
    assert_same(found[1], found[0])

    rows = PartitionSpec("data")

    @jax.jit
    def mapped(x):
        def both(x):
            take = lambda model: fp8.filter_grad(loss)(model, x)
            return take(model), take(quantize_kernels(model)), take(outside)

        outside = quantize_kernels(model)
        replicated = PartitionSpec()
        return jax.shard_map(both, mesh=mesh, in_specs=rows, out_specs=replicated)(x)

    expected, *others = mapped(x)
    for actual in others:
        assert_same(actual, expected)


# --- Layers without copies --------------------------------------------------------------------------------------------


def test_kernels_rounded_at_random_stay_as_they_are():
    random = Quantization(E4M3, CurrentScaling(), Stochastic())
    recipe = dataclasses.replace(fp8.Recipe.of(CurrentScaling()), kernel=random)
    model = fp8_linear_layers(Model.init(), recipe=recipe)
    assert all(op.kernel_copies is None for op in ops(quantize_kernels(model)))


def test_products_in_high_precision_have_no_copy():
    high = Quantization(E4M3, HighPrecision())
    recipe = dataclasses.replace(fp8.Recipe.of(CurrentScaling()), kernel_for_dgrad=high, output_grad=high)
    recipe = dataclasses.replace(recipe, output_grad_for_wgrad=fp8.Recipe.of(CurrentScaling()).output_grad)
    model = quantize_kernels(fp8_linear_layers(Model.init(), recipe=recipe))
    assert all(op.kernel_copies.dgrad is None and op.kernel_copies.fprop is not None for op in ops(model))
    assert quantize_kernels(Model.init()) is not None
    plain = Model.init()
    assert eqx.tree_equal(quantize_kernels(plain), plain)


class Dense(eqx.Module):
    weight: jax.Array
    op: fp8.Fp8DotGeneral | None = None

    def __call__(self, x):
        return self.op(x, self.weight, (((x.ndim - 1,), (0,)), ((), ())))


@dataclasses.dataclass(frozen=True)
class DenseRule(LayerRule):
    """As `docs/models.md` has it, with what fprop sums over, or without."""

    contracted: tuple[int, ...] | None = None
    layer_type = Dense

    def refusal(self, layer):
        return None

    def kernel(self, layer):
        return Kernel(layer.weight, *layer.weight.shape[-2:], contracted=self.contracted)

    def op(self, layer):
        return layer.op

    def with_op(self, layer, op):
        return Dense(layer.weight, op)


def test_layers_of_your_own():
    weight, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (4, 32))
    convert = lambda rule, **options: fp8_linear_layers(Dense(weight), rules=(rule, *default_rules), **options)
    made = lambda model, rule: quantize_kernels(model, Fp8Config(rules=(rule, *default_rules)))
    given, unknown, wrong = DenseRule((0,)), DenseRule(), DenseRule((1,))
    for recipe, rule in (("rowwise", given), ("delayed", unknown), ("delayed", wrong)):
        model = convert(rule, recipe=recipe)
        copied = made(model, rule)
        assert copied.op.kernel_copies is not None
        np.testing.assert_array_equal(copied(x), model(x))
    rowwise = convert(unknown, recipe="rowwise")
    with pytest.raises(ValueError, match=r"does not tell what its product sums over.*contracted="):
        made(rowwise, unknown)
    with pytest.raises(ValueError, match=r"summed over axes \(0,\) in fprop.*contracted=\(0,\)"):
        made(rowwise, wrong)(x)
    # Without the rule, there is no layer to look for.
    assert quantize_kernels(rowwise).op.kernel_copies is None


# --- What must not outlive a step -------------------------------------------------------------------------------------


def test_a_model_with_copies_is_not_trained_or_saved(tmp_path):
    model = fp8_linear_layers(Model.init(), amax_history_length=4)
    quantized, x = quantize_kernels(model), parts_of_batch()[0]
    step = TrainStep(loss_fn, optax.sgd(0.1))
    overwrites, gradients = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss_fn)(quantized, x))
    for misuse in (
        lambda: step.init(quantized),
        lambda: step(quantized, step.init(model), x),
        lambda: step.calibrate(quantized, x),
        lambda: fp8.trainable(quantized),
        lambda: fp8.partition_for_grad_overwrite(quantized),
        lambda: fp8.apply_updates(quantized, gradients, overwrites),
    ):
        with pytest.raises(ValueError, match=r"has quantized kernels, in up, heads, out and 1 more.*Pass the model"):
            misuse()
    assert_same(
        fp8.trainable(fp8.apply_updates(model, gradients, overwrites)),
        jax.tree.map(jnp.add, fp8.trainable(model), gradients),
    )
    with pytest.raises(ValueError, match="with quantized kernels was saved"):
        quantized.up.dot_general.to_state_dict()
    # Equinox saves any array; what is too many is noticed when it is read.
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", quantized)
    with pytest.raises(Exception, match=r"changed (shape|dtype)|shape"):
        eqx.tree_deserialise_leaves(tmp_path / "model.eqx", model)


def test_copies_of_another_kernel():
    model, x = fp8_linear_layers(Model.init()), parts_of_batch()[0]
    quantized = quantize_kernels(model)
    with pytest.raises(ValueError, match=r"kernel has dtype bfloat16 in a product in bfloat16.*compute_dtype"):
        loss_fn(fp8.cast_params(quantized, jnp.bfloat16), x.astype(jnp.bfloat16))
    # An op that rounds by itself takes kernels of both dtypes.
    rounding = quantize_kernels(fp8_linear_layers(Model.init(), compute_dtype=jnp.bfloat16))
    np.testing.assert_array_equal(
        loss_fn(fp8.cast_params(rounding, jnp.bfloat16), x.astype(jnp.bfloat16)),
        loss_fn(fp8_linear_layers(fp8.cast_params(Model.init(), jnp.bfloat16), compute_dtype=jnp.bfloat16), x.astype(jnp.bfloat16)),
    )
    other = eqx.tree_at(lambda m: m.last.weight, quantized, jnp.ones((16, In.size)))
    other = eqx.tree_at(lambda m: m.last.bias, other, jnp.ones(16))
    with pytest.raises(ValueError, match=r"kernel has shape \(16, 64\), but .* of shape \(32, 64\)"):
        loss_fn(other, x)


def test_the_choice_is_checked():
    with pytest.raises(ValueError, match="quantize_kernels='twice' must be 'in_each_microbatch' or 'once'"):
        TrainStep(loss_fn, optax.sgd(0.1), quantize_kernels="twice")
    with pytest.raises(ValueError, match="must be a tuple of LayerRule"):
        TrainStep(loss_fn, optax.sgd(0.1), rules=(Dense,))
    assert TrainStep(loss_fn, optax.sgd(0.1), quantize_kernels="once").quantize_kernels.name == "ONCE"
