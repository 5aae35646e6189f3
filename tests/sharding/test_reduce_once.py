"""Gradients that each device adds up for itself, and all reduce once per step."""

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
from helpers import unchecked
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8.training import ReduceOnce


Batch, Position, Embed, Mlp = hax.make_axes(batch=8, position=4, embed=32, mlp=64)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
RATE = 0.1
FEATURES, DATA = {"mlp": "model"}, {"batch": "data"}
# What is divided of parameters, of activations, and the rows.
LAYOUTS = {
    "data": ({}, DATA, "data"),
    "sharded": ({"embed": "data"}, DATA, "data"),
    "sharded and features": ({"embed": "data", **FEATURES}, {**DATA, **FEATURES}, "data"),
    "over both": ({"embed": ("data", "model")}, {"batch": ("data", "model")}, ("data", "model")),
}


class Net(eqx.Module):
    """Two layers, between which features are divided, and one of Equinox."""

    up: hnn.Linear
    down: hnn.Linear
    last: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        linear = functools.partial(hnn.Linear.init, use_bias=False)
        return Net(
            linear(Embed, Mlp, key=keys[0]),
            linear(Mlp, Embed, key=keys[1]),
            eqx.nn.Linear(Embed.size, 16, key=keys[2]),
        )

    def __call__(self, x):
        x = self.down(hax.auto_sharded(hax.tanh(self.up(x))))
        return jax.vmap(jax.vmap(self.last))(x.rearrange((..., "batch", "position", "embed")).array)


def loss_fn(model, x, target):
    return ((model(x) - target) ** 2).mean()


def batch(seed=0, scale=1.0):
    """Rows of very different sizes: the maximum is that of one of them."""
    keys = jax.random.split(jax.random.key(seed))
    x = hax.random.normal(keys[0], (Batch, Position, Embed)) * hax.named(scale * jnp.exp2(jnp.arange(8.0)), Batch)
    return x, jax.random.normal(keys[1], (Batch.size, Position.size, 16))


def parts_of(x, target, microbatches, devices):
    """The rows of each microbatch and device: devices hold neighbouring rows, microbatches take every n-th."""
    for i in range(microbatches):
        rows = np.arange(i, Batch.size, microbatches).reshape(devices, -1)
        for indices in rows:
            yield hax.named(x.array[indices], (Batch.resize(len(indices)), Position, Embed)), target[indices]


def expected_step(model, x, target, microbatches, devices):
    """The step from the mean of the parts' gradients, and the maximum of their state."""
    total, losses = None, []
    for part in parts_of(x, target, microbatches, devices):
        loss, gradients = eqx.filter_jit(fp8.filter_value_and_grad(loss_fn))(model, *part)
        total = fp8.accumulate_gradients(total, gradients)
        losses.append(float(loss))
    overwrites, gradients = fp8.partition_for_grad_overwrite(total)
    gradients = jax.tree.map(lambda g: g / len(losses), gradients)
    updates = jax.tree.map(lambda g: -RATE * g, gradients)
    return fp8.apply_updates(model, updates, overwrites), np.mean(losses), gradients


def on_mesh(tree, mapping):
    def put(node):
        names = node.axis_names if isinstance(node, hax.NamedArray) else ()
        return jax.device_put(node, NamedSharding(MESH, P(*(mapping.get(name) for name in names))))

    return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))


def states(model):
    return jax.tree.leaves(fp8.partition_for_grad_overwrite(model)[0])


@pytest.mark.more
@pytest.mark.parametrize("microbatches", (1, pytest.param(2, marks=pytest.mark.more)))
@pytest.mark.parametrize("recipe", ("delayed", pytest.param("current", marks=pytest.mark.more)))
@pytest.mark.parametrize(
    "layout",
    ("sharded and features", *(pytest.param(x, marks=pytest.mark.more) for x in ("data", "sharded", "over both"))),
)
def test_a_step_is_that_of_the_parts(layout, recipe, microbatches):
    parameters, activations, over = LAYOUTS[layout]
    devices = int(np.prod([MESH.shape[axis] for axis in ((over,) if isinstance(over, str) else over)]))
    model = fp8.fp8_linear_layers(Net.init(), recipe=recipe)
    model = fp8.TrainStep(loss_fn, optax.sgd(RATE)).calibrate(model, *batch())
    x, target = batch(1)
    expected, loss, gradients = expected_step(model, x, target, microbatches, devices)
    step = fp8.TrainStep(loss_fn, optax.sgd(RATE), microbatches=microbatches, reduce_gradients=ReduceOnce(over=over))
    with jax.set_mesh(MESH), hax.axis_mapping(activations):
        sharded = on_mesh(model, parameters)
        rows = on_mesh(x, activations), jax.device_put(target, NamedSharding(MESH, P(over)))
        new, _, metrics = step(sharded, step.init(sharded), *rows)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradients), rtol=1e-3)
    for a, b, g in zip(*map(jax.tree.leaves, (fp8.trainable(new), fp8.trainable(expected), gradients)), strict=True):
        error = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(RATE * np.asarray(g))
        assert error < 5e-3, a.shape
    for a, b in zip(states(new), states(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2 * 2**-23)


@pytest.mark.more
def test_a_device_whose_rows_are_zero_does_not_keep_the_first_scale():
    """Its own stays at 1, which is larger than the one that follows from the other device's amax."""
    model, (x, target) = fp8.fp8_linear_layers(Net.init()), batch(1, scale=1e-3)
    x = x * hax.named((jnp.arange(8) < 4).astype(jnp.float32), Batch)
    expected, *_ = expected_step(model, x, target, 1, MESH.shape["data"])
    step = fp8.TrainStep(loss_fn, optax.sgd(RATE), reduce_gradients=ReduceOnce(over="data"))
    with jax.set_mesh(MESH), hax.axis_mapping(DATA):
        rows = on_mesh(x, DATA), jax.device_put(target, NamedSharding(MESH, P("data")))
        new, *_ = step(model, step.init(model), *rows)
    assert float(expected.up.dot_general.scale("input")) < 1e-3
    for a, b in zip(states(new), states(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.more
def test_gradients_travel_in_the_dtype_asked_for():
    """What devices add up was rounded to it, and the sum too; state is exact."""
    model = fp8.fp8_linear_layers(Net.init(), recipe="delayed")
    x, target = batch(1)
    _, _, gradients = expected_step(model, x, target, 2, 2)
    models = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        reduction = ReduceOnce(over="data", dtype=dtype)
        step = fp8.TrainStep(loss_fn, optax.sgd(1.0), microbatches=2, reduce_gradients=reduction)
        with jax.set_mesh(MESH), hax.axis_mapping(DATA):
            models[dtype], _, _ = step(model, step.init(model), x, target)
    exact, rounded = (np.asarray(model.last.weight - new.last.weight) for new in models.values())
    norm = np.linalg.norm(np.asarray(gradients.last.weight))
    assert np.linalg.norm(exact - np.asarray(gradients.last.weight)) < 1e-5 * norm
    # Three roundings to 8 bits, of at most 2^-9 each; not fewer than one.
    assert 2.0**-12 * norm < np.linalg.norm(rounded - exact) < 3 * 2.0**-9 * norm
    for a, b in zip(*map(states, models.values()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_auxiliary_results_and_keys_of_each_part():
    """In the order of microbatches, then devices; no two parts draw the same numbers."""
    model, (x, target) = Net.init(), batch(1)

    def loss(model, x, target, *, key):
        noise = jax.random.uniform(key)
        return loss_fn(model, x, target), {"noise": noise, "rows": x.array[:, 0, 0], "named": x["position", 0]}

    step = fp8.TrainStep(
        loss, optax.sgd(RATE), microbatches=2, has_aux=True, reduce_gradients=ReduceOnce(over=("data",))
    )
    with jax.set_mesh(MESH):
        _, _, metrics = step(model, step.init(model), x, target, loss_key=jax.random.key(0))
    aux = metrics["aux"]
    assert len(set(aux["noise"].tolist())) == 4
    expected = [part.array[:, 0, 0] for part, _ in parts_of(x, target, 2, 2)]
    np.testing.assert_array_equal(aux["rows"], np.stack(expected))
    assert aux["named"].axes[0] == hax.Axis("microbatch", 4)
    np.testing.assert_array_equal(aux["named"]["embed", 0].array, np.stack(expected))


@pytest.mark.more
def test_haliaxs_own_state():
    """States that accumulate in their own way are combined in that way."""
    from haliax.quantization import Fp8DotGeneralOp

    model = Net.init()
    up = dataclasses.replace(model.up, dot_general=Fp8DotGeneralOp.init(16))
    model = dataclasses.replace(model, up=up)
    x, target = batch(1)
    with jax.numpy_dtype_promotion("standard"):
        step = fp8.TrainStep(loss_fn, optax.sgd(RATE), reduce_gradients=ReduceOnce(over="data"))
        with jax.set_mesh(MESH), hax.axis_mapping(DATA):
            new, _, _ = step(model, step.init(model), x, target)
    amax = float(jnp.abs(x.array).max())
    assert float(new.up.dot_general.input_amax_history.max()) == amax


@pytest.mark.parametrize(
    "wrong, match",
    (
        ({"over": "data", "dtype": jnp.int32}, "dtype=.*int32.* is not a floating dtype"),
        ({"over": "data", "dtype": jnp.float8_e4m3fn}, "is not a floating dtype of 16 bits or more"),
        ({"over": "data", "dtype": "fast"}, "dtype=fast is not a floating dtype"),
    ),
)
def test_bad_choices_are_named(wrong, match):
    with unchecked(), pytest.raises(ValueError, match=match):
        ReduceOnce(**wrong)


def test_bad_steps_are_named():
    model, (x, target) = Net.init(), batch(1)

    def run(loss=loss_fn, x=x, **choice):
        step = fp8.TrainStep(loss, optax.sgd(RATE), reduce_gradients=ReduceOnce(**choice))
        step(model, step.init(model), x, target)

    with pytest.raises(ValueError, match="needs a mesh with automatic axes: call the"):
        run(over="data")
    explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="needs a mesh with automatic axes"):
        run(over="data")
    with jax.set_mesh(MESH):
        with pytest.raises(ValueError, match="over='fsdp' is not an axis of the mesh"):
            run(over="fsdp")
        odd = x["batch", : Batch.size - 1]
        with pytest.raises(ValueError, match="2 devices do not divide the leading axis of"):
            run(over="data", x=odd)

        def divided(model, x, target):
            return loss_fn(model, hax.named(jax.lax.with_sharding_constraint(x.array, P("data")), x.axes), target)

        with pytest.raises(ValueError, match="loss_fn divides an array over the mesh axes"):
            run(loss=divided, over="data")
