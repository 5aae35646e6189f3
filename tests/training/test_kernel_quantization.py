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
from helpers import assert_same, equations, unchecked
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model_checks import is_state

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, TrainStep, fp8_linear_layers, quantize_kernels
from haliax_fp8.layers import Kernel, LayerRule, default_rules
from haliax_fp8.recipes import E4M3, CurrentScaling, HighPrecision, Quantization, Rounding
from haliax_fp8.training import exact_gradients


Batch, In, Hidden, Heads, Size = hax.make_axes(batch=4, embed=32, mlp=64, heads=2, head_size=32)
PARTS = 3


def values(seed, *shape):
    """Numbers whose FP8 data are within two binades, and whose scales have few bits: sums are exact in any order.

    A copy in another layout may be summed in another order. NVFP4's scale of a tensor is `amax / 2688`.
    """
    keys = jax.random.split(jax.random.key(seed))
    signs = jax.random.rademacher(keys[0], shape, jnp.float32)
    return (signs * jax.random.randint(keys[1], shape, 11, 22).astype(jnp.float32) / 8).at[(0,) * len(shape)].set(2.625)


class Model(eqx.Module):
    """Kernels that lie along what fprop sums over, or across it, with one contracted axis or two; and one of muP."""

    up: hnn.Linear
    heads: hnn.Linear
    out: hnn.Linear
    last: eqx.nn.Linear

    @staticmethod
    def init():
        linear = functools.partial(hnn.Linear.init, use_bias=False, key=jax.random.key(0))
        model = Model(
            linear(In, Hidden),
            linear(Hidden, (Heads, Size), out_first=False),
            linear((Heads, Size), In, reparam_cls=hnn.Linear.output_reparam()),
            eqx.nn.Linear(In.size, 32, key=jax.random.key(1)),
        )
        leaves, structure = jax.tree.flatten(model)
        return jax.tree.unflatten(structure, [values(i, *x.shape) for i, x in enumerate(leaves)])


def inputs_and_gradients(factor=1.0):
    """For each layer its input and the gradient of its output."""
    named = lambda seed, *axes: hax.named(factor * values(seed, *(axis.size for axis in axes)), axes)
    return {
        "up": (named(10, Batch, In), named(11, Batch, Hidden)),
        "heads": (named(12, Batch, Hidden), named(13, Batch, Heads, Size)),
        "out": (named(14, Batch, Heads, Size), named(15, Batch, In)),
        "last": (factor * values(16, Batch.size, In.size), factor * values(17, Batch.size, 32)),
    }


def loss_fn(model, batch):
    """All gradients are exact, as no layer's output is another one's input."""
    total = jnp.float32(0)
    for name, (x, g) in batch.items():
        layer = getattr(model, name)
        out = jax.vmap(layer)(x) if name == "last" else layer(x).rearrange(g.axes).array
        total += (out * getattr(g, "array", g)).astype(jnp.float32).sum()
    return total


def microbatches(dtype=jnp.float32):
    """Of different sizes, so that the maximum is not that of the last."""
    batches = [inputs_and_gradients(factor) for factor in (1.0, 4.0, 2.0)]
    stacked = lambda *xs: jnp.stack([getattr(x, "array", x) for x in xs]).astype(dtype)
    is_named = lambda x: isinstance(x, hax.NamedArray)
    return jax.tree.map(stacked, *batches, is_leaf=is_named)


def of_microbatch(arrays):
    """The named arrays again."""
    is_named = lambda x: isinstance(x, hax.NamedArray)
    like = inputs_and_gradients()
    return jax.tree.map(lambda x, a: hax.named(a, x.axes) if is_named(x) else a, like, arrays, is_leaf=is_named)


def loss_of_arrays(model, arrays):
    return loss_fn(model, of_microbatch(arrays))


def accumulated(gradient, model, parts):
    """The sum over microbatches, in a loop."""
    total = None
    for i in range(PARTS):
        total = fp8.accumulate_gradients(total, gradient(model, jax.tree.map(lambda x: x[i], parts)))  # noqa: B023
    return total


def in_a_scan(gradient, model, parts):
    first = gradient(model, jax.tree.map(lambda x: x[0], parts))
    add = lambda total, part: (fp8.accumulate_gradients(total, gradient(model, part)), None)
    return jax.lax.scan(add, first, jax.tree.map(lambda x: x[1:], parts))[0]


def quantized_kernels(function):
    """How many arrays a function rounds to FP8 that are as large as the first layer's kernel, and as no other one's."""
    size = In.size * Hidden.size
    return sum(
        eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == jnp.float8_e4m3fn
        and eqn.outvars[0].aval.size == size
        for eqn in equations(jax.make_jaxpr(function)())
    )


@pytest.mark.more
@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_a_step_has_the_same_numbers(recipe):
    """With one scale per tensor in bfloat16, where scales are rounded up."""
    dtype = jnp.bfloat16 if fp8.recipes.named[recipe].scale_rounding else jnp.float32
    model, batch = fp8.cast_params(fp8_linear_layers(Model.init(), recipe=recipe), dtype), microbatches(dtype)
    if fp8.recipes.named[recipe].is_stateful:
        # Scales that are not powers of two.
        states = fp8.partition_for_grad_overwrite(model)[0]
        model = eqx.combine(jax.tree.map(with_scales, states, is_leaf=is_state), model, is_leaf=is_state)
    results = []
    for choice in ("in_each_microbatch", "once"):
        loss = lambda model, batch: loss_of_arrays(model, jax.tree.map(lambda x: x[0], batch))
        step = TrainStep(loss, optax.sgd(0.1), microbatches=PARTS, quantize_kernels=choice)
        trained, _, metrics = step(model, step.init(model), batch, key=jax.random.key(3))
        results.append((fp8.trainable(trained), [op.state for op in ops(trained)], metrics))
    assert_same(*results)


def with_scales(node):
    return node.with_scale(jnp.array([0.01, 0.0059, 0.0003])) if is_state(node) else node


def ops(model):
    return [x for x in jax.tree.leaves(model, is_leaf=is_op) if is_op(x)]


def is_op(node):
    return isinstance(node, fp8.Fp8DotGeneral)


@pytest.mark.more
def test_loops_and_gradients_of_all_kinds():
    """Copies made outside of the loss or within; loops that are unrolled or scanned; three ways to take gradients."""
    model = fp8_linear_layers(Model.init(), amax_history_length=4)
    few = lambda batch: {name: batch[name] for name in ("heads", "last")}
    loss = lambda model, arrays: loss_fn(model, few(of_microbatch(arrays)))

    def in_a_loop(model, parts):
        add = lambda total, part: (total + loss(model, part), None)
        return jax.lax.scan(add, jnp.float32(0), parts)[0]

    @eqx.filter_jit
    def gradients(model, parts):
        ours, equinox = fp8.filter_grad(loss), eqx.filter_grad(loss)
        exact = eqx.filter_grad(exact_gradients(loss))
        quantized = quantize_kernels(model)
        return [
            [
                in_a_scan(ours, model, parts),
                in_a_scan(ours, quantized, parts),
                accumulated(ours, quantized, parts),
                in_a_scan(exact, quantized, parts),
                fp8.filter_grad(lambda model: in_a_loop(quantize_kernels(model), parts))(model),
            ],
            [in_a_scan(equinox, model, parts), in_a_scan(equinox, quantized, parts)],
        ]

    for expected, *others in gradients(model, microbatches()):
        for actual in others:
            assert_same(*map(fp8.partition_for_grad_overwrite, (actual, expected)))


@pytest.mark.more
def test_each_kernel_is_quantized_once():
    model, parts = fp8_linear_layers(Model.init()), microbatches()
    gradient = fp8.filter_grad(loss_of_arrays)
    count = lambda make: quantized_kernels(lambda: accumulated(gradient, make(model), parts))
    # No gradient of the input is wanted, so there is no dgrad. The two kernels after it are of the same size.
    assert (count(lambda model: model), count(quantize_kernels)) == (2 * PARTS, 2)


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


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_stacks_experts_ensembles_and_heads(recipe):
    targets = ["linear", "experts", "table", "ensemble"]
    model, x = fp8_linear_layers(Blocks.init(), recipe=recipe, targets=targets), values(0, Batch.size, In.size)
    gradient = fp8.filter_grad(lambda model, x: model(hax.named(x, (Batch, In))) ** 2)

    @eqx.filter_jit
    def both(model, x):
        quantized = quantize_kernels(model)
        assert all(op.quantized_kernel is not None for op in ops(quantized))
        return [gradient(m, x) for m in (model, quantized)]

    expected, actual = both(model, x)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # The same FP8 data, summed in another order: 32 terms, each off by half a unit of float32 at most.
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * 2.0**-24 * float(jnp.abs(b).max()))


def test_a_layer_that_jax_differentiates_before_it_maps():
    """A `custom_jvp` around it, and forward mode."""
    layer, x = fp8_linear_layers(eqx.nn.Linear(8, 4, key=jax.random.key(0)), recipe="rowwise"), jnp.ones((3, 8))

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


@pytest.mark.more
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
        plain, quantized = (gradients(divided, put(x), make) for make in (lambda m: m, quantize_kernels))
    assert_same(quantized, plain)

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


@pytest.mark.more
def test_kernels_rounded_at_random_stay_as_they_are():
    random = Quantization(E4M3, CurrentScaling(), Rounding.STOCHASTIC)
    recipe = dataclasses.replace(fp8.Recipe.of(CurrentScaling()), kernel=random)
    model = fp8_linear_layers(Model.init(), recipe=recipe)
    assert all(op.quantized_kernel is None for op in ops(quantize_kernels(model)))


@pytest.mark.more
def test_products_in_high_precision_have_no_copy():
    high = Quantization(E4M3, HighPrecision())
    base = fp8.Recipe.of(CurrentScaling())
    recipe = dataclasses.replace(base, kernel_for_dgrad=high, output_grad=high, output_grad_for_wgrad=base.output_grad)
    model = fp8_linear_layers(Model.init(), recipe=recipe)
    quantized, batch = quantize_kernels(model), inputs_and_gradients()
    assert all(op.quantized_kernel.dgrad is None and op.quantized_kernel.fprop is not None for op in ops(quantized))
    gradient = eqx.filter_jit(fp8.filter_grad(loss_fn))
    assert_same(gradient(quantized, batch), gradient(model, batch))
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


@pytest.mark.more
def test_layers_of_your_own():
    weight, x = values(0, 32, 32), values(1, 4, 32)
    convert = lambda rule, **options: fp8_linear_layers(Dense(weight), rules=(rule, *default_rules), **options)
    made = lambda model, rule: quantize_kernels(model, rules=(rule, *default_rules))
    right, unknown, wrong = DenseRule((0,)), DenseRule(), DenseRule((1,))
    for recipe, rule in (("rowwise", right), ("delayed", unknown), ("delayed", wrong)):
        model = convert(rule, recipe=recipe)
        copied = made(model, rule)
        assert copied.op.quantized_kernel is not None
        np.testing.assert_array_equal(copied(x), model(x))
    rowwise = convert(unknown, recipe="rowwise")
    with pytest.raises(ValueError, match=r"does not show what its product sums over.*contracted="):
        made(rowwise, unknown)
    with pytest.raises(ValueError, match=r"summed over axes \(0,\) in fprop.*contracted=\(0,\)"):
        made(rowwise, wrong)(x)
    # Without the rule, there is no layer to look for.
    assert quantize_kernels(rowwise).op.quantized_kernel is None


class PerHead(Dense):
    """A kernel for each head, which is an axis of the product's batch."""

    def __call__(self, x):
        return fp8.Fp8Einsum(self.op)("bhk,hkn->bhn", x, self.weight)


class PerHeadRule(DenseRule):
    layer_type = PerHead

    def kernel(self, layer):
        return Kernel(layer.weight, leading=(), contracted=(1,))

    def with_op(self, layer, op):
        return PerHead(layer.weight, op)


@pytest.mark.more
def test_batched_kernels_have_copies_where_scales_do_not_run_along_a_sum():
    """dgrad sums over one axis of such a kernel less than the rule's kernel shows."""
    weight, x, config = values(0, 4, 32, 64), values(1, 3, 4, 32), Fp8Config(rules=(PerHeadRule(), *default_rules))
    loss = eqx.filter_jit(fp8.filter_value_and_grad(lambda model, x: jnp.sum(model(x) ** 2)))
    for recipe in ("delayed", "deepseek"):
        model = fp8_linear_layers(PerHead(weight), dataclasses.replace(config, recipe=recipe))
        copied = quantize_kernels(model, rules=config.rules)
        assert copied.op.quantized_kernel is not None
        assert_same(loss(copied, x), loss(model, x))
    rowwise = fp8_linear_layers(PerHead(weight), dataclasses.replace(config, recipe="rowwise"))
    with pytest.raises(ValueError, match=r"kernel has batch axes \(0,\),.*under vmap over its batch"):
        quantize_kernels(rowwise, rules=config.rules)(x)


# --- What must not outlive a step -------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_model_with_copies_is_not_trained_or_saved(tmp_path):
    model = fp8_linear_layers(Model.init(), amax_history_length=4)
    quantized, x = quantize_kernels(model), inputs_and_gradients()
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
        with pytest.raises(ValueError, match=r"has quantized kernels, in up.*Pass the original"):
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


@pytest.mark.more
def test_copies_of_another_kernel():
    layer, (x, _) = fp8_linear_layers(Model.init().last), inputs_and_gradients()["last"]
    quantized, half = quantize_kernels(layer), functools.partial(fp8.cast_params, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"kernel has dtype bfloat16 in a.*compute_dtype"):
        jax.vmap(half(quantized))(x.astype(jnp.bfloat16))
    # An op that rounds by itself takes kernels of both dtypes.
    rounding = fp8_linear_layers(Model.init().last, compute_dtype=jnp.bfloat16)
    outputs = [jax.vmap(half(make(rounding)))(x.astype(jnp.bfloat16)) for make in (quantize_kernels, lambda m: m)]
    assert_same(*outputs)
    # A cast of everything reaches the scale, which is then another one than the kernel was divided by.
    whole = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, tree)
    with pytest.raises(ValueError, match="kernel's scale is in bfloat16.*with a scale in float32"):
        jax.vmap(whole(quantize_kernels(rounding)))(x.astype(jnp.bfloat16))
    outputs = [jax.vmap(make(whole(rounding)))(x.astype(jnp.bfloat16)) for make in (quantize_kernels, lambda m: m)]
    assert_same(*outputs)
    other = eqx.tree_at(lambda m: (m.weight, m.bias), quantized, (jnp.ones((16, In.size)), jnp.ones(16)))
    with pytest.raises(ValueError, match=r"kernel has shape \(16, 32\), but .* of shape \(32, 32\)"):
        jax.vmap(other)(x)


def test_the_choice_is_checked():
    with unchecked(), pytest.raises(ValueError, match="must be a tuple of LayerRule"):
        TrainStep(loss_fn, optax.sgd(0.1), rules=(Dense,))
    assert TrainStep(loss_fn, optax.sgd(0.1), quantize_kernels="once").quantize_kernels.name == "ONCE"
