"""Weights in bfloat16 without float32 masters: sums of parameter and update, rounded up or down at random."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unchecked
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from haliax_fp8 import (
    Fp8Config,
    TrainStep,
    apply_updates,
    cast_params,
    filter_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    trainable,
    with_rounding_keys,
)
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.recipes import Rounding
from haliax_fp8.training import quantized_state


KEY = jax.random.key(3)
PLAIN = cast_params(eqx.nn.MLP(128, 128, 128, 1, key=KEY), jnp.bfloat16)
X = jax.random.normal(jax.random.key(1), (8, 128), jnp.bfloat16)


@pytest.fixture(autouse=True)
def _promotion_for_optax():
    """Optax divides floats by integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x).astype(jnp.float32) - 1.0))


def stochastic(optimizer, **options):
    return TrainStep(loss_fn, optimizer, parameter_rounding=Rounding.STOCHASTIC, **options)


def bits(model):
    return [np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint8) for x in jax.tree.leaves(model)]


def test_small_updates_arrive_whole_on_average():
    """One 64th of the distance to the next bfloat16, 256 times: to nearest, nothing would change."""
    model = {"a": jnp.ones(512, jnp.bfloat16), "b": jnp.ones(512, jnp.bfloat16), "c": jnp.ones(4)}
    update = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-7 / 64), model)
    nothing = jax.tree.map(lambda _: None, model)

    @jax.jit
    def run(model, keys):
        each = lambda model, key: (apply_updates(model, update, nothing, key=key), None)
        return jax.lax.scan(each, model, keys)[0]

    new = run(model, jax.random.split(KEY, 256))
    expected, deviation = 1.0 + 256 * 2.0**-7 / 64, 2.0**-7 * np.sqrt(256 * (1 / 64) * (63 / 64))
    for name in "ab":
        values = np.asarray(new[name], np.float64)
        assert abs(values.mean() - expected) < 4 * deviation / np.sqrt(512)
        assert 0.8 * deviation < values.std() < 1.2 * deviation
    # Each array has random bits of its own; those in float32 are summed as ever.
    assert (np.asarray(new["a"]) != np.asarray(new["b"])).any()
    np.testing.assert_array_equal(new["c"], np.float32(expected))
    np.testing.assert_array_equal(apply_updates(model, update, nothing)["a"], np.float32(1.0))


@pytest.mark.more
def test_a_step_is_the_guides_loop_with_everything_in_float32():
    """And the same with `with_rounding_keys` and the same key, whose own numbers are others."""
    optimizer, step = optax.adamw(1e-2), stochastic(optax.adamw(1e-2))
    model = fp8_linear_layers(PLAIN, Fp8Config(recipe="nvfp4"))
    opt_state = step.init(model)
    assert {x.dtype for x in jax.tree.leaves(opt_state[0].mu)} == {np.dtype(np.float32)}
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    @eqx.filter_jit
    def by_hand(model, opt_state, x, key):
        grads = filter_grad(lambda model, x: loss_fn(with_rounding_keys(model, key), x))(model, x)
        overwrites, grads = partition_for_grad_overwrite(grads)
        updates, opt_state = optimizer.update(wide(grads), opt_state, wide(trainable(model)))
        return apply_updates(model, updates, overwrites, key=key), opt_state

    new, _, _ = step(model, opt_state, X, key=KEY)
    expected, _ = by_hand(model, opt_state, X, KEY)
    for a, b in zip(bits(trainable(new)), bits(trainable(expected)), strict=True):
        # Products may differ in the last bit between two programs.
        assert (a == b).mean() > 0.98
    assert not any(map(np.array_equal, bits(trainable(new)), bits(trainable(model))))


@pytest.mark.more
def test_a_resumed_run_has_the_same_bits(tmp_path):
    step = stochastic(quantized_state(optax.adamw(1e-2)))
    model = fp8_linear_layers(PLAIN)

    def run(state, start, end):
        for index in range(start, end):
            *state, _ = step(*state, X, key=jax.random.fold_in(KEY, index))
        return state

    whole = run((model, step.init(model)), 0, 4)
    save(tmp_path / "run", tuple(run((model, step.init(model)), 0, 2)))
    state, _ = load_into((model, step.init(model)), tmp_path / "run", strict=True)
    assert eqx.tree_equal(run(state, 2, 4), whole)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_devices_round_their_parts_as_one_device_would(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    model = {"a": jax.random.normal(KEY, (16, 8), jnp.bfloat16)}
    update = {"a": jnp.full((16, 8), 1e-3)}
    apply = jax.jit(lambda model, update: apply_updates(model, update, {"a": None}, key=KEY))
    expected = apply(model, update)["a"]
    with jax.set_mesh(mesh):
        new = apply(*jax.device_put((model, update), NamedSharding(mesh, P("data"))))["a"]
    assert new.sharding.shard_shape(new.shape) == (4, 8)
    np.testing.assert_array_equal(np.asarray(new), np.asarray(expected))


FLOAT32 = eqx.nn.MLP(8, 8, 8, 1, key=KEY)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: stochastic(optax.sgd(0.1))(PLAIN, optax.sgd(0.1).init(trainable(PLAIN)), X),
            "key is missing: parameter_rounding=.*key=jax.random.fold_in",
        ),
        (lambda: stochastic(optax.sgd(0.1)).init(FLOAT32), "parameter_rounding=.*float32.*cast_params"),
        (
            lambda: apply_updates(
                FLOAT32, *partition_for_grad_overwrite(eqx.filter(FLOAT32, eqx.is_array))[::-1], key=KEY
            ),
            "key is for bfloat16 parameters.*float32.*cast",
        ),
        (
            lambda: stochastic(optax.sgd(0.1)).init(cast_params(FLOAT32, jnp.float16)),
            "model has parameters in float16.*cast_params",
        ),
    ],
)
def test_wrong_calls_name_the_remedy(call, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        call()
