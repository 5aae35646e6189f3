"""Inside `shard_map`, products have the scales that the whole tensors have; and it can be inside a gradient."""

import dataclasses
import functools

import equinox as eqx
import equinox.internal as eqxi
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from transformations import with_custom_vjp

import haliax_fp8 as fp8
from haliax_fp8.experimental.attention import Fp8Attention
from haliax_fp8.recipes import E2M1, CurrentScaling, NVFP4Scaling, Recipe


NUMBERS = (((1,), (0,)), ((), ()))


def loss(model, x):
    op, w = model
    return (op(x, w, NUMBERS) ** 2).sum()


def problem(recipe):
    """A model, rows of very different sizes, and a mesh over them."""
    x = jax.random.normal(jax.random.key(0), (8, 64)) * jnp.arange(1.0, 9.0)[:, None]
    w = jax.random.normal(jax.random.key(1), (64, 32))
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    return (fp8.Fp8DotGeneral.init(recipe), w), x, mesh


def kernel_gradients(recipe, *, check_vma):
    """Inside `shard_map`, and without."""
    model, x, mesh = problem(recipe)

    def inside(model, x):
        gradient = fp8.filter_grad(loss)(model, x)[1]
        return gradient if check_vma else lax.psum(gradient, "rows")

    specs = dict(mesh=mesh, in_specs=(P(), P("rows")), out_specs=P(), check_vma=check_vma)
    divided = eqx.filter_jit(jax.shard_map(inside, **specs))(model, x)
    return divided, eqx.filter_jit(fp8.filter_grad(loss))(model, x)[1]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "deepseek"])
def test_scales_are_those_of_the_whole_tensor(recipe, check_vma):
    divided, whole = kernel_gradients(recipe, check_vma=check_vma)
    assert np.linalg.norm(divided - whole) <= 1e-6 * np.linalg.norm(whole)


def test_an_amax_found_in_blocks_is_that_of_all_devices():
    """The state is that of one device, by one maximum over devices."""
    model, x, mesh = problem(Recipe.of(NVFP4Scaling(delayed=fp8.DelayedScaling()), forward=E2M1))
    inside = lambda model, x: fp8.filter_grad(loss)(model, x)
    divided = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P())
    assert maxima_over_devices(divided, model, x) == 1
    states = [jax.tree.leaves(jax.jit(take)(model, x)[0]) for take in (divided, inside)]
    np.testing.assert_array_equal(*[state[0] for state in states])
    assert float(jnp.max(states[0][0])) > 0.0


def test_scales_of_each_device():
    """Another scale for each part: the FP8 numbers differ, by a rounding error of E4M3 and E5M2."""
    divided, whole = kernel_gradients(Recipe.of(CurrentScaling(per_device=True)), check_vma=True)
    assert 1e-4 < np.linalg.norm(divided - whole) / np.linalg.norm(whole) < 2.0**-3


@pytest.mark.parametrize("per_device", [True, False])
@pytest.mark.parametrize("scaling", [CurrentScaling, NVFP4Scaling])
def test_per_device_needs_no_communication(scaling, per_device):
    model, x, mesh = problem(Recipe.of(scaling(per_device=per_device)))
    out = jax.shard_map(lambda x: model[0](x, model[1], NUMBERS), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    assert ("all_reduce" in jax.jit(out).lower(x).as_text()) != per_device


def test_rows_apart_need_no_communication_and_are_those_of_one_device():
    recipe = Recipe.of(NVFP4Scaling(per_row=True), forward=E2M1)
    # All devices have the same kernel.
    kernel = dataclasses.replace(recipe.kernel, scaling=NVFP4Scaling(square=True, per_device=True))
    model, x, mesh = problem(dataclasses.replace(recipe, kernel=kernel))
    out = jax.shard_map(lambda x: model[0](x, model[1], NUMBERS), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    assert "all_reduce" not in jax.jit(out).lower(x).as_text()
    np.testing.assert_array_equal(jax.jit(out)(x), jax.jit(lambda x: model[0](x, model[1], NUMBERS))(x))


def maxima_over_devices(function, *args):
    """How many there are in a program."""
    reductions = jax.jit(function).lower(*args).as_text().split('"stablehlo.all_reduce"')[1:]
    return sum("stablehlo.maximum" in text.split("stablehlo.return")[0] for text in reductions)


@pytest.mark.parametrize(
    ("gradient", "check_vma"), [(fp8.filter_grad, True), (fp8.filter_grad, False), (eqx.filter_grad, True)]
)
def test_one_maximum_over_devices_serves_all_operands(gradient, check_vma):
    """Of a kernel that all devices have, too."""
    model, x, mesh = problem("delayed")
    inside = lambda model, x: gradient(loss)(model, x)[0]
    take = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P(), check_vma=check_vma)
    assert maxima_over_devices(take, model, x) == 1


REFUSED = r"with check_vma=False is taken around it, or by another function than haliax_fp8.filter_grad"
CASTS = {
    "none": lambda op: op,
    "astype": lambda op: jax.tree.map(lambda x: x.astype(fp8.fp32_max_grad), op),
    "with_max_gradients": fp8.training.with_max_gradients,
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("taken", ["inside", "outside", "outside, cast inside"])
def test_gradients_by_others(taken, cast):
    """With check_vma=False nobody would take the maximum over devices; with True each product does."""
    model, x, mesh = problem("delayed")
    with_cast = lambda model: (CASTS[cast](model[0]), model[1])
    whole, _ = eqx.filter_jit(fp8.filter_grad(loss))(model, x)
    each = lambda model, x: loss(with_cast(model) if taken == "outside, cast inside" else model, x)

    def gradient(check_vma):
        specs = dict(mesh=mesh, in_specs=(P(), P("rows")), out_specs=P(), check_vma=check_vma)
        if taken == "inside":
            inside = lambda model, x: jax.grad(lambda model: loss(with_cast(model), x))(model)[0]
            return jax.jit(jax.shard_map(inside, **specs))(model, x)
        around = jax.shard_map(lambda model, x: lax.psum(each(model, x), "rows"), **specs)
        return jax.jit(jax.grad(lambda model: around(with_cast(model) if taken == "outside" else model, x)[()]))(model)[
            0
        ]

    np.testing.assert_array_max_ulp(np.asarray(gradient(True).state.array), np.asarray(whole.state.array), 2)
    with pytest.raises(ValueError, match=REFUSED):
        gradient(False)


@pytest.mark.parametrize("check_vma", [True, False])
def test_exact_gradients(check_vma):
    """Right around it; inside, its gradient would be added up once more."""
    model, x, mesh = problem("delayed")
    specs = dict(mesh=mesh, in_specs=(P(), P("rows")), out_specs=P(), check_vma=check_vma)
    exact = fp8.training.exact_gradients
    total = lambda loss: jax.shard_map(lambda model, x: lax.psum(loss(model, x), "rows"), **specs)
    inside = jax.shard_map(lambda model, x: eqx.filter_grad(exact(loss))(model, x)[0], **specs)
    for wrong in (inside, eqx.filter_grad(total(exact(loss)))):
        with pytest.raises(ValueError, match="exact_gradients was differentiated inside shard_map"):
            eqx.filter_jit(wrong)(model, x)
    if check_vma:
        op, _ = eqx.filter_jit(eqx.filter_grad(exact(total(loss))))(model, x)
        whole, _ = eqx.filter_jit(fp8.filter_grad(loss))(model, x)
        np.testing.assert_array_max_ulp(np.asarray(op.state.array), np.asarray(whole.state.array), 2)


@pytest.mark.parametrize("specs", ["prefix", "leaves"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_around_it(check_vma, specs):
    """Specs may have the structure of the model as it is outside."""
    model, x, mesh = problem("delayed")
    of_model = P() if specs == "prefix" else jax.tree.map(lambda _: P(), model)
    total = jax.shard_map(
        lambda model, x: lax.psum(loss(model, x), "rows"),
        mesh=mesh,
        in_specs=(of_model, P("rows")),
        out_specs=P(),
        check_vma=check_vma,
    )
    take = eqx.filter_jit(fp8.filter_grad(total))
    if not check_vma:
        with pytest.raises(ValueError, match=REFUSED):
            take(model, x)
        return
    (op, _), (whole, _) = take(model, x), eqx.filter_jit(fp8.filter_grad(loss))(model, x)
    np.testing.assert_array_equal(op.amax_history("input")[0], jnp.max(jnp.abs(x)))
    np.testing.assert_array_max_ulp(np.asarray(op.state.array), np.asarray(whole.state.array), 2)


# --- Branches that only some devices take -----------------------------------------------------------------------------


def linear(key):
    return eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(key))


MODEL = fp8.fp8_linear_layers({name: linear(key) for key, name in enumerate("abc")}, amax_history_length=2)
ROWS = jnp.arange(1.0, 33.0).reshape(8, 4) * jnp.array([1.0, 1, -1, 1, -1, 1, 1, 1])[:, None]


def first_row(name):
    """A loss of a device's first row."""
    return lambda model, x: model[name](x[0]).sum()


def of_cond(model, x):
    return lax.cond(x[0, 0] > 0, first_row("a"), first_row("b"), model, x)


def of_switch(model, x):
    return lax.switch((jnp.abs(x[0, 0]) // 4).astype(int) % 3, [first_row(name) for name in "abc"], model, x)


def of_one_device(model, x):
    """One layer on the first device alone, one on all, one on none."""
    after = model["b"](x[0])
    return lax.cond(x[0, 0] == 1.0, lambda y: model["c"](y).sum(), lambda y: y.sum(), after)


def of_while(model, x):
    """JAX differentiates no `while_loop`; Equinox's has as many branches as it may have steps."""
    steps = (jnp.abs(x[0, 0]) // 4).astype(int) % 3
    body = lambda carry: (carry[0] + 1, jnp.tanh(model["a"](carry[1])))
    _, y = eqxi.while_loop(lambda carry: carry[0] < steps, body, (0, x[0]), max_steps=3, kind="bounded")
    return model["b"](y).sum()


def of_scan(model, x):
    """A branch in each step, which the backward pass computes again."""

    def body(y, _):
        return lax.cond(y[0] > 0, lambda y: jnp.tanh(model["a"](y)), lambda y: jnp.tanh(model["b"](y)), y), None

    return lax.scan(jax.checkpoint(body), x[0], None, length=3)[0].sum()


def of_straight_line(model, x):
    return (jax.vmap(lambda row: model["b"](jax.nn.relu(model["a"](row))))(x) ** 2).sum()


LOSSES = {f.__name__: f for f in (of_cond, of_switch, of_one_device, of_while, of_scan, of_straight_line)}
MESHES = {"one axis": ((2,), ("x",)), "two axes": ((2, 2), ("x", "y"))}


def applied(model, gradient):
    """The arrays of the model after a step in which weights stay."""
    overwrites, rest = fp8.partition_for_grad_overwrite(gradient)
    return eqx.filter(
        fp8.apply_updates(model, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest), overwrites), eqx.is_array
    )


def tables(arrays):
    """The tables of all layers, each on each of its devices."""
    is_state = lambda node: isinstance(node, fp8.OverwriteWithGradient)
    states = [x for x in jax.tree.leaves(arrays, is_leaf=is_state) if is_state(x)]
    return [[np.asarray(shard.data) for shard in state.table.array.addressable_shards] for state in states]


def alone(loss, model, parts):
    """What one device gets of all parts: the weights' gradients, and the tables of the next step."""
    gradients = [eqx.filter_jit(fp8.filter_grad(loss))(model, part) for part in parts]
    new = applied(model, functools.reduce(fp8.accumulate_gradients, gradients))
    weights = [fp8.partition_for_grad_overwrite(gradient)[1] for gradient in gradients]
    return jax.tree.map(lambda *x: sum(x), *weights), tables(new)


def a_step(loss, model, mesh, *, check_vma):
    """A step inside `shard_map`, whose rows all axes divide: weights' gradients, and the arrays of the next model."""
    static = eqx.filter(model, eqx.is_array, inverse=True)

    def step(arrays, x):
        whole = eqx.combine(arrays, static)
        if check_vma:
            # Without this JAX adds up a weight's gradient where the weight is used: by a collective in the branch.
            mark = lambda x: lax.pcast(x, mesh.axis_names, to="varying") if eqx.is_inexact_array(x) else x
            whole = jax.tree.map(mark, whole, is_leaf=lambda x: isinstance(x, fp8.OverwriteWithGradient))
        gradient = fp8.filter_grad(loss)(whole, x)
        return lax.psum(fp8.partition_for_grad_overwrite(gradient)[1], mesh.axis_names), applied(
            eqx.combine(arrays, static), gradient
        )

    rows = P(mesh.axis_names)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), rows), out_specs=P(), check_vma=check_vma)
    return functools.partial(jax.jit(mapped), eqx.filter(model, eqx.is_array)), mapped


def assert_as_alone(step, loss, model, mesh, x):
    weights, new = step(x)
    expected_weights, expected = alone(loss, model, jnp.split(x, mesh.size))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), weights, expected_weights)
    for on_devices, (of_one,) in zip(tables(new), expected, strict=True):
        assert len(on_devices) == mesh.size
        for table in on_devices:
            np.testing.assert_array_equal(table, of_one)
    return new


def mesh_of(name):
    shape, axes = MESHES[name]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=jax.devices()[: int(np.prod(shape))])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_branches_that_some_devices_take(loss, check_vma, mesh):
    if loss == "of_while" and check_vma:
        pytest.skip("Equinox's loop has branches of different types, without FP8 too")
    mesh, loss = mesh_of(mesh), LOSSES[loss]
    step, mapped = a_step(loss, MODEL, mesh, check_vma=check_vma)
    new = assert_as_alone(step, loss, MODEL, mesh, ROWS)
    assert maxima_over_devices(mapped, eqx.filter(MODEL, eqx.is_array), ROWS) == 1
    if loss is of_cond:
        # By hand: the largest elements of the first rows of devices, by the sign of their first element.
        first = np.asarray(ROWS[:: len(ROWS) // mesh.size])
        for name, rows in (("a", first[first[:, 0] > 0]), ("b", first[first[:, 0] < 0])):
            assert new[name].dot_general.amax_history("input")[0] == np.abs(rows).max()


def test_an_axis_that_divides_nothing():
    """JAX knows of the output, and of a scan's carry, that they are the same along it, and adds nothing up."""
    mesh, static = mesh_of("two axes"), eqx.filter(MODEL, eqx.is_array, inverse=True)

    def loss(model, x):
        body = lambda y, _: (jnp.tanh(jax.vmap(model["a"])(y)), None)
        return (lax.scan(body, x, None, length=2)[0] ** 2).sum()

    def inside(arrays, x):
        value, gradient = fp8.filter_value_and_grad(loss)(eqx.combine(arrays, static), x)
        return lax.psum(value, "x"), gradient

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    value, gradient = jax.jit(mapped)(eqx.filter(MODEL, eqx.is_array), ROWS / 32)
    expected, of_one = eqx.filter_jit(fp8.filter_value_and_grad(loss))(MODEL, ROWS / 32)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient["a"].weight, of_one["a"].weight, rtol=1e-5)
    np.testing.assert_array_equal(gradient["a"].dot_general.state.array, of_one["a"].dot_general.state.array)


class Block(eqx.Module):
    """Two layers in a branch; both read the same, so `share_input_scales` gives them one scale."""

    gate: hnn.Linear
    up: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key)
        Hidden = hax.Axis("hidden", 8)
        return Block(*(hnn.Linear.init(Hidden, Hidden.alias("mlp"), key=key, use_bias=False) for key in keys))

    def __call__(self, x):
        out = lambda y: x.array + jnp.tanh((self.gate(y) * self.up(y)).array)
        return hax.named(lax.cond(x.array[0, 0] > 0, lambda: out(x), lambda: x.array), x.axes)


@pytest.mark.more
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_branches_in_a_stack(check_vma, shared):
    stack = hnn.Stacked.init(hax.Axis("layers", 3), Block)(key=jax.random.split(jax.random.key(0), 3))
    model = fp8.fp8_linear_layers(stack, amax_history_length=2)
    model = fp8.memory.share_input_scales(model) if shared else model
    loss = lambda model, x: (model.fold(hax.named(x, ("batch", "hidden"))).array ** 2).sum()
    mesh, x = mesh_of("one axis"), jax.random.normal(jax.random.key(3), (4, 8)).at[0, 0].set(1).at[2, 0].set(-1)
    step, mapped = a_step(loss, model, mesh, check_vma=check_vma)
    assert_as_alone(step, loss, model, mesh, x)
    assert maxima_over_devices(mapped, eqx.filter(model, eqx.is_array), x) == 1


@pytest.mark.more
@pytest.mark.parametrize("check_vma", [True, False])
def test_attention_in_a_branch(check_vma):
    scaling = fp8.DelayedScaling(amax_history_length=2)
    model = {name: Fp8Attention.init(scaling=scaling, emulate=True) for name in "ab"}
    attend = lambda name: lambda model, x: model[name](x, x, x).sum()
    loss = lambda model, x: lax.cond(x[0, 0, 0, 0] > 0, attend("a"), attend("b"), model, x)
    x = jnp.abs(jax.random.normal(jax.random.key(0), (2, 8, 1, 64))) * jnp.array([1.0, -2.0])[:, None, None, None]
    mesh = mesh_of("one axis")
    step, mapped = a_step(loss, model, mesh, check_vma=check_vma)
    assert_as_alone(step, loss, model, mesh, x)
    assert maxima_over_devices(mapped, eqx.filter(model, eqx.is_array), x) == 1


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_not_finite_on_one_device_is_recorded_on_none(check_vma, value):
    """As on one device that has all rows."""
    x, mesh = ROWS.at[5, 2].set(value), mesh_of("two axes")
    step, _ = a_step(of_straight_line, MODEL, mesh, check_vma=check_vma)
    _, expected = alone(of_straight_line, MODEL, [x])
    for on_devices, (of_one,) in zip(tables(step(x)[1]), expected, strict=True):
        for table in on_devices:
            np.testing.assert_array_equal(table, of_one)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_training_step_takes_one_maximum(check_vma, microbatches):
    """Of layers whose tables differ in shape; also in the compiled program, and over parts of a mesh."""
    model = dict(MODEL) | {"b": fp8.fp8_linear_layers(linear(1), amax_history_length=5)}
    mesh, static = mesh_of("two axes"), eqx.filter(model, eqx.is_array, inverse=True)
    step = fp8.TrainStep(of_straight_line, optax.sgd(0.0), microbatches=microbatches)
    opt_state = step.init(model)
    of_arrays = lambda arrays, x: eqx.filter(step(eqx.combine(arrays, static), opt_state, x)[0], eqx.is_array)
    arrays = eqx.filter(model, eqx.is_array)
    (expected,) = zip(*tables(of_arrays(arrays, ROWS)), strict=True)
    for axes in (("x", "y"), ("x",)):
        specs = dict(mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(), check_vma=check_vma, axis_names=set(axes))
        mapped = jax.shard_map(of_arrays, **specs)
        assert maxima_over_devices(mapped, arrays, ROWS) == 1
        compiled = jax.jit(mapped).lower(arrays, ROWS).compile()
        # Weights' gradients are float32, and XLA adds them up; over axes that it divides itself, nothing is divided.
        reduced = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
        assert sum("s32[" in line for line in reduced) == 1
        for on_devices, of_one in zip(tables(compiled(arrays, ROWS)), expected, strict=True):
            for table in on_devices:
                np.testing.assert_array_equal(table, of_one)


@pytest.mark.more
@pytest.mark.parametrize("check_vma", [True, False])
def test_lost_state_is_told_from_frozen_layers(check_vma):
    """As anywhere else: an error for what Equinox takes for a constant, and none for what the loss does."""

    @eqx.filter_custom_jvp
    def constant_state(layer, x):
        return with_custom_vjp(lambda layer, x: layer(x))(layer, x)

    @constant_state.def_jvp
    def _(primals, tangents):
        inner = with_custom_vjp(lambda layer, x: layer(x))
        return eqx.filter_jvp(inner, primals, tangents)

    frozen = lambda model, x: model["b"](lax.stop_gradient(model["a"](x[0]))).sum()
    lost = lambda model, x: model["b"](constant_state(model["a"], x[0])).sum()
    mesh = mesh_of("one axis")
    assert_as_alone(a_step(frozen, MODEL, mesh, check_vma=check_vma)[0], frozen, MODEL, mesh, ROWS)
    with pytest.raises(ValueError, match="takes state for a constant"):
        alone(lost, MODEL, [ROWS])
    with pytest.raises(ValueError, match="takes state for a constant"):
        a_step(lost, MODEL, mesh, check_vma=check_vma)[0](ROWS)
