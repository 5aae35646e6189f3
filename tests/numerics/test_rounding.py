"""Stochastic rounding: unbiased, between neighbours only, and drawn anew wherever draws have to differ."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, state_is_constant, unchecked
from jax.sharding import AxisType, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._numerics.rounding import stochastic_bfloat16
from haliax_fp8._state.table import guarded, unguarded
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    CurrentScaling,
    Quantization,
    Rounding,
    RowwiseScaling,
)


MATRIX = (((1,), (0,)), ((), ()))
FORMATS = [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1]
KEY, OTHER_KEY = jax.random.key(3), jax.random.key(4)
DRAWS = 10_000

over_formats = pytest.mark.parametrize("format", FORMATS, ids=repr)


def test_it_is_shown_as_it_is_written():
    """In the recipes that errors show."""
    assert repr(Quantization(E4M3, CurrentScaling())).endswith("rounding=Rounding.TO_NEAREST)")
    assert [repr(rounding) for rounding in Rounding] == ["Rounding.TO_NEAREST", "Rounding.STOCHASTIC"]


# --- The cast ---------------------------------------------------------------------------------------------------------


def magnitudes(format):
    """Every finite value of a format that is not negative, decoded by `ml_dtypes`."""
    bits = 4 if format is E2M1 else 8
    values = np.arange(2 ** (bits - 1), dtype=np.uint8).view(format.dtype).astype(np.float64)
    return values[np.isfinite(values)]


@pytest.fixture(scope="module")
def cast():
    """One compiled function for each format: rows of equal values, rounded at random."""

    @eqx.filter_jit
    def counts(x, format, key):
        drawn = Rounding.STOCHASTIC.cast(jnp.broadcast_to(x[:, None], (x.size, DRAWS)), format, key).astype(jnp.float32)
        return drawn.min(axis=1), drawn.max(axis=1), (drawn == drawn.max(axis=1, keepdims=True)).sum(axis=1)

    return counts


@over_formats
def test_mean_is_within_five_standard_errors_and_only_neighbours_occur(cast, format):
    values = magnitudes(format)
    lower, upper = values[:-1], values[1:]  # from zero, through the subnormals, to the maximum
    if len(lower) > 30:
        # All binades, and every subnormal.
        kept = np.unique(np.concatenate([np.arange(9), np.arange(9, len(lower), 3), [len(lower) - 1]]))
        lower, upper = lower[kept], upper[kept]
    shares = np.array([0.0, 1 / 16, 0.3, 0.5, 15 / 16])
    x = (lower[:, None] + shares * (upper - lower)[:, None]).astype(np.float32)
    share = (x - lower[:, None]) / (upper - lower)[:, None]
    low, high = (np.broadcast_to(v[:, None], x.shape) for v in (lower, upper))
    for sign in (1.0, -1.0):
        smallest, largest, count = (
            np.asarray(a, np.float64).reshape(x.shape) for a in cast(jnp.asarray(sign * x.ravel()), format, KEY)
        )
        nearer, farther = (smallest, largest) if sign > 0 else (-largest, -smallest)
        exact = share == 0
        np.testing.assert_array_equal(nearer[exact], low[exact])
        np.testing.assert_array_equal(farther[exact], low[exact])
        # In 10 000 draws both neighbours occur: the rarer has a share of 1/16.
        np.testing.assert_array_equal(nearer[~exact], low[~exact])
        np.testing.assert_array_equal(farther[~exact], high[~exact])
        up = (count if sign > 0 else DRAWS - count)[~exact] / DRAWS
        error = np.sqrt(share * (1 - share) / DRAWS)[~exact]
        assert (np.abs(up - share[~exact]) <= 5 * error).all()


@over_formats
def test_what_has_one_answer_is_not_drawn(cast, format):
    """The format's own values, what lies beyond the largest, infinities, zeros; and NaN."""
    limit, values = format.max, magnitudes(format)
    x = np.concatenate([values, -values, [1.01 * limit, -3 * limit, np.inf, -np.inf]])
    expected = np.clip(x, -limit, limit)
    smallest, largest, _ = cast(jnp.asarray(x, jnp.float32), format, KEY)
    np.testing.assert_array_equal(smallest, expected)
    np.testing.assert_array_equal(largest, expected)
    assert np.isnan(np.asarray(Rounding.STOCHASTIC.cast(jnp.array([jnp.nan]), format, KEY)).astype(np.float32)).all()


@over_formats
def test_a_share_of_one_in_a_thousand(cast, format):
    """A value this close to its neighbour is moved away from it now and then: rounding to nearest never would."""
    low, high = magnitudes(format)[-2:]
    x = jnp.full(20, low + (high - low) / 1024, jnp.float32)
    _, largest, count = cast(x, format, KEY)
    seen = np.where(np.asarray(largest) == high, count, 0).sum()
    expected = 20 * DRAWS / 1024
    assert abs(seen - expected) <= 5 * np.sqrt(expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_input_draws_as_float32_does(dtype):
    x = jax.random.normal(KEY, (64,), dtype)
    data = Rounding.STOCHASTIC.cast(x, E4M3, KEY)
    np.testing.assert_array_equal(data, Rounding.STOCHASTIC.cast(x.astype(jnp.float32), E4M3, KEY))


@pytest.mark.more
def test_keys_of_an_ensemble_draw_for_their_members():
    keys, x = jax.random.split(KEY, 4).reshape(2, 2), jax.random.normal(KEY, (2, 2, 40))
    got = Rounding.STOCHASTIC.cast(x, E5M2, keys)
    for i, j in np.ndindex(2, 2):
        np.testing.assert_array_equal(got[i, j], Rounding.STOCHASTIC.cast(x[i, j], E5M2, keys[i, j]))


# --- The draws of a product -------------------------------------------------------------------------------------------

# Half way between 1 and 1.125, where E4M3 goes up as often as down; with 448 in every row and column, so that all
# scales are 1. Multiplied by a unit matrix, which is exact, it shows what each product drew.
SIZE = 64
HALVES = jnp.where(jnp.eye(SIZE, dtype=bool), 448.0, 1.0625)
UNIT = jnp.eye(SIZE)
OFF_DIAGONAL = ~np.eye(SIZE, dtype=bool)

RANDOM = Quantization(E4M3, RowwiseScaling(), Rounding.STOCHASTIC)
NEAREST = Quantization(E4M3, RowwiseScaling())
ALL_RANDOM = fp8.Recipe(RANDOM, RANDOM, RANDOM)
RANDOM_GRADIENT = fp8.Recipe(NEAREST, NEAREST, RANDOM)


def ups(product):
    """Which elements were rounded up."""
    product = np.asarray(product)
    assert set(np.unique(product[..., OFF_DIAGONAL])) == {1.0, 1.125}
    return product[..., OFF_DIAGONAL] == 1.125


def assert_independent(a, b):
    """They agree in half of the elements, within 5 standard errors."""
    assert abs((a == b).mean() - 0.5) <= 5 * 0.5 / np.sqrt(a.size)


def keyed(recipe, key=KEY):
    return fp8.with_rounding_keys(fp8.Fp8DotGeneral.init(recipe), key)


def pullback(op, x, w, g):
    return jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)[1](g)


@jax.jit
def rounded_by_each_product(key):
    op = keyed(ALL_RANDOM, key)
    dx, dw = pullback(op, UNIT, UNIT, HALVES)
    return {
        "input, fprop": op(HALVES, UNIT, MATRIX),
        "kernel, fprop": op(UNIT, HALVES, MATRIX),
        "input, wgrad": pullback(op, HALVES, UNIT, UNIT)[1].T,
        "kernel, dgrad": pullback(op, UNIT, HALVES, UNIT)[0].T,
        "output_grad, dgrad": dx,
        "output_grad, wgrad": dw,
    }


@pytest.mark.more
def test_every_operand_of_every_product_draws_its_own_numbers():
    first, again, other = (
        {name: ups(product) for name, product in rounded_by_each_product(key).items()} for key in (KEY, KEY, OTHER_KEY)
    )
    names = list(first)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(first[name], again[name])
        assert_independent(first[name], other[name])
        for second in names[:i]:
            assert_independent(first[name], first[second])


def test_an_operand_with_one_scale_is_rounded_once_for_both_products():
    tensor = Quantization(E4M3, CurrentScaling(), Rounding.STOCHASTIC)
    dx, dw = pullback(keyed(fp8.Recipe(tensor, tensor, tensor)), UNIT, UNIT, HALVES)
    np.testing.assert_array_equal(ups(dx), ups(dw))


def test_every_op_draws_its_own_numbers():
    ops = fp8.with_rounding_keys([fp8.Fp8DotGeneral.init(ALL_RANDOM) for _ in range(2)], KEY)
    assert_independent(*(ups(op(HALVES, UNIT, MATRIX)) for op in ops))


def test_a_layer_used_twice_with_other_shapes_draws_for_each():
    op = keyed(ALL_RANDOM)
    wide = ups(op(jnp.concatenate([HALVES, HALVES]), UNIT, MATRIX).reshape(2, SIZE, SIZE))
    assert_independent(wide[0], wide[1])


# --- Transformations --------------------------------------------------------------------------------------------------


def products(op, x, w, g):
    out, transposed = jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)
    return out, *transposed(g)


def random_operands():
    return (jax.random.normal(key, (SIZE, SIZE)) for key in jax.random.split(jax.random.key(9), 3))


def test_vmap_is_the_batched_call_and_checkpoint_the_plain_one():
    x, w, g = random_operands()
    op = keyed(ALL_RANDOM)
    plain = jax.jit(lambda x, w, g: products(op, x, w, g))(x, w, g)

    def rowwise(x, w):
        return jax.vmap(lambda row: op(row, w, (((0,), (0,)), ((), ()))))(x)

    def of(f):
        out, transposed = jax.vjp(f, x, w)
        return out, *transposed(g)

    assert_same(jax.jit(lambda: of(rowwise))(), plain)
    assert_same(jax.jit(lambda: of(jax.checkpoint(lambda x, w: op(x, w, MATRIX))))(), plain)


def test_scan_draws_with_the_key_of_each_iteration():
    op = fp8.Fp8DotGeneral.init(ALL_RANDOM)

    @jax.jit
    def scanned(key):
        def body(_, i):
            return None, fp8.with_rounding_keys(op, jax.random.fold_in(key, i))(HALVES, UNIT, MATRIX)

        return jax.lax.scan(body, None, jnp.arange(3))[1]

    outputs = scanned(KEY)
    assert_same(outputs[1], keyed(ALL_RANDOM, jax.random.fold_in(KEY, 1))(HALVES, UNIT, MATRIX))
    for i in range(3):
        assert_independent(ups(outputs[i]), ups(outputs[i - 1]))
    # One key for the whole loop: a layer that is used again draws the same, as documented.
    reused = jax.jit(lambda: jax.lax.scan(lambda _, __: (None, keyed(ALL_RANDOM)(HALVES, UNIT, MATRIX)), None, None, 2))
    np.testing.assert_array_equal(*reused()[1])


@pytest.mark.more
def test_per_example_gradients_draw_as_single_calls_do():
    op = fp8.Fp8DotGeneral.init(RANDOM_GRADIENT)

    def gradient(key, x, g):
        loss = lambda w: (g * fp8.with_rounding_keys(op, key)(x, w, MATRIX)).sum()
        return jax.grad(loss)(UNIT)

    single, keys = jax.jit(gradient), jax.random.split(KEY)
    x, g = jnp.stack([UNIT, UNIT]), jnp.stack([HALVES, HALVES])
    shared = jax.jit(jax.vmap(gradient, (None, 0, 0)))(KEY, x, g)
    own = jax.jit(jax.vmap(gradient))(keys, x, g)
    for i in range(2):
        np.testing.assert_array_equal(shared[i], single(KEY, UNIT, HALVES))
        np.testing.assert_array_equal(own[i], single(keys[i], UNIT, HALVES))
    # With keys of their own, equal examples draw differently.
    assert_independent(ups(own[0]), ups(own[1]))


@state_is_constant
@pytest.mark.more
@pytest.mark.parametrize("order", ["vmap outside", "vmap inside"])
@pytest.mark.parametrize("mapped", ["keys", "states", "both"])
def test_an_op_with_state_under_vmap_of_its_keys_or_its_state(mapped, order):
    """Whichever of the two is mapped makes members; each is as by itself, state and draws, and operands are shared."""
    scaling = fp8.DelayedScaling(amax_history_length=2)
    random = Quantization(E4M3, scaling, Rounding.STOCHASTIC)
    op = fp8.Fp8DotGeneral.init(fp8.Recipe(random, random, random))
    axes = {"keys": (None, 0), "states": (0, None), "both": (0, 0)}[mapped]
    given = jnp.array([0.25, 1.5, 3.0]), jax.random.split(KEY, 3)
    factors, keys = (x if axis == 0 else x[0] for x, axis in zip(given, axes, strict=True))

    def out(factor, key, x, w):
        scaled = lambda table: guarded(unguarded(table) * factor)
        with_scales = eqx.tree_at(lambda op: op.state.table.array, op, replace_fn=scaled)
        return fp8.with_rounding_keys(with_scales, key)(x, w, MATRIX)

    def of(function, factors, keys, g):
        out, pullback = jax.vjp(lambda x, w: function(factors, keys, x, w), HALVES, UNIT)
        return out, *pullback(g)

    single = jax.jit(lambda *args: of(out, *args, HALVES))
    members = range(3)
    alone = [
        single(*(x[m] if axis == 0 else x for x, axis in zip((factors, keys), axes, strict=True))) for m in members
    ]
    if order == "vmap outside":
        together = jax.jit(jax.vmap(lambda *args: of(out, *args, HALVES), axes))(factors, keys)
        expected = [jnp.stack(each) for each in zip(*alone, strict=True)]
    else:
        # Gradients of the operands, which the members share, are sums.
        mapped_out = jax.vmap(out, (*axes, None, None))
        together = jax.jit(lambda *args: of(mapped_out, *args, jnp.stack([HALVES] * 3)))(factors, keys)
        outs, *gradients = zip(*alone, strict=True)
        expected = [jnp.stack(outs), *map(sum, gradients)]
    assert jnp.isfinite(together[0]).all()
    np.testing.assert_array_equal(together[0], expected[0])
    for ours, theirs in zip(together[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    if mapped != "states":
        assert not np.array_equal(together[0][0], together[0][1]), "each draws its own numbers"


Out, In, Layers = hax.Axis("out", SIZE), hax.Axis("in", SIZE), hax.Axis("layer", 3)


class Sum(eqx.Module):
    """Adds the layer's output to a carry, so that the gradient at every layer is the same."""

    linear: hnn.Linear

    @staticmethod
    def init(*, key):
        return Sum(hnn.Linear.init(In, Out, key=key, use_bias=False))

    def __call__(self, carry, x):
        return carry + self.linear(x)


def unit_kernels(model):
    """The model with unit matrices for kernels."""
    return jax.tree.map(
        lambda w: jnp.broadcast_to(UNIT, w.shape) if eqx.is_inexact_array(w) and w.shape[-2:] == UNIT.shape else w,
        model,
    )


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_layers_of_a_stack_draw_their_own_numbers(gradient_checkpointing):
    stack = hnn.Stacked.init(Layers, Sum, gradient_checkpointing=gradient_checkpointing)(
        key=jax.random.split(jax.random.key(0), Layers.size)
    )
    model = unit_kernels(fp8.fp8_linear_layers(stack, fp8.Fp8Config(recipe=RANDOM_GRADIENT)))
    rows = hax.Axis("rows", SIZE)
    x, g = hax.named(UNIT, (rows, In)), hax.named(HALVES, (rows, Out))

    @eqx.filter_jit
    def gradient(model, key):
        loss = lambda model: (g * fp8.with_rounding_keys(model, key).fold(hax.zeros((rows, Out)), x)).sum().scalar()
        weight = fp8.filter_grad(loss)(model).stacked.linear.weight
        return weight.rearrange((Layers, In, Out)).array

    by_layer = ups(gradient(model, KEY))
    np.testing.assert_array_equal(by_layer, ups(gradient(model, KEY)))
    assert_independent(by_layer, ups(gradient(model, OTHER_KEY)))
    for layer in range(Layers.size):
        assert_independent(by_layer[layer], by_layer[layer - 1])


def test_members_of_an_ensemble_draw_their_own_numbers():
    make = lambda key: eqx.nn.Linear(SIZE, SIZE, use_bias=False, key=key)
    ensemble = eqx.filter_vmap(make)(jax.random.split(KEY, 2))
    ensemble = unit_kernels(fp8.fp8_linear_layers(ensemble, fp8.Fp8Config(recipe=RANDOM_GRADIENT)))

    def loss(model, key):
        out = eqx.filter_vmap(lambda member, x: jax.vmap(member)(x), in_axes=(eqx.if_array(0), None))(
            fp8.with_rounding_keys(model, key), UNIT
        )
        return (HALVES[None] * out).sum()

    weight = eqx.filter_jit(eqx.filter_grad(loss))(ensemble, KEY).weight
    drawn = ups(jnp.swapaxes(weight, 1, 2))
    assert_independent(drawn[0], drawn[1])


@pytest.mark.more
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_draw_their_own_numbers_where_it_is_known_that_they_differ(check_vma):
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    op = keyed(RANDOM_GRADIENT)

    def local(x, g):
        return pullback(op, x, jax.lax.pcast(UNIT, "devices", to="varying") if check_vma else UNIT, g)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=check_vma)
    x, g = jnp.concatenate([UNIT] * 4), jnp.concatenate([HALVES] * 4)
    dx, dw = jax.jit(sharded)(x, g)
    for drawn in (ups(dx.reshape(4, SIZE, SIZE)), ups(dw.reshape(4, SIZE, SIZE))):
        for device in range(4):
            if check_vma:
                assert_independent(drawn[device], drawn[device - 1])
            else:  # what is replicated must stay so, and nothing tells it from what is not
                np.testing.assert_array_equal(drawn[device], drawn[device - 1])


def test_replicated_operands_are_rounded_alike_on_all_devices():
    """Copies of a kernel must not drift apart: only what differs from device to device draws differently."""
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    op = keyed(ALL_RANDOM)
    local = lambda x: op(x, HALVES, MATRIX)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(jax.jit(sharded)(UNIT), op(UNIT, HALVES, MATRIX))


# --- Training steps ---------------------------------------------------------------------------------------------------


def linear(recipe):
    layer = eqx.nn.Linear(SIZE, SIZE, use_bias=False, key=KEY)
    return unit_kernels(fp8.fp8_linear_layers(layer, fp8.Fp8Config(recipe=recipe)))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_train_step_draws_for_every_step_and_microbatch(microbatches):
    """Microbatches of equal data: their mean is half way where one drew up and the other down."""
    model = linear(RANDOM_GRADIENT)
    step = fp8.TrainStep(lambda m, x, g: (g * jax.vmap(m)(x)).sum(), optax.sgd(1.0), microbatches=microbatches)
    # A microbatch takes one row of every few.
    x, g = (jnp.repeat(a, microbatches, axis=0) for a in (UNIT, HALVES))
    opt_state = step.init(model)
    gradient = lambda key: np.asarray(model.weight - step(model, opt_state, x, g, key=key)[0].weight).T[OFF_DIAGONAL]
    first = gradient(KEY)
    np.testing.assert_array_equal(first, gradient(KEY))
    other = gradient(OTHER_KEY)
    values, counts = np.unique(first, return_counts=True)
    size = first.size
    if microbatches == 1:
        assert values.tolist() == [1.0, 1.125]
        assert_independent(first == 1.125, other == 1.125)
    else:
        assert values.tolist() == [1.0, 1.0625, 1.125]
        assert abs(counts[1] / size - 0.5) <= 5 * 0.5 / np.sqrt(size)
        assert not np.array_equal(first, other)


def test_keys_are_no_parameters():
    """Nothing that an optimizer, a state dict or a checkpoint of gradients would hold."""
    model = linear(RANDOM_GRADIENT)
    gradients = eqx.filter_grad(lambda m: jax.vmap(fp8.with_rounding_keys(m, KEY))(UNIT).sum())(model)
    assert [x.shape for x in jax.tree.leaves(gradients)] == [(SIZE, SIZE)]
    assert jax.tree.leaves(fp8.partition_for_grad_overwrite(model)[0]) == []


# --- Refused ----------------------------------------------------------------------------------------------------------


def test_a_missing_key_is_an_error_that_says_what_to_do():
    message = r"key is missing: the recipe .* with_rounding_keys\(model, key\).*TrainStep"
    mean = lambda model: jax.vmap(model)(UNIT).mean()
    with pytest.raises(ValueError, match=message):
        mean(linear(ALL_RANDOM))
    with pytest.raises(ValueError, match=message):
        eqx.filter_grad(mean)(linear(RANDOM_GRADIENT))


def test_a_key_that_was_filtered_out_is_missing():
    """As from a tree of what an optimizer sees."""
    model = eqx.filter(fp8.with_rounding_keys(linear(ALL_RANDOM), KEY), eqx.is_inexact_array)
    with pytest.raises(ValueError, match="key is missing"):
        model.dot_general(UNIT, HALVES, MATRIX)


def test_a_key_that_was_cast_with_its_model_is_an_error():
    """Its bits are gone; and as a floating-point number it would be differentiated."""
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fp8.with_rounding_keys(linear(ALL_RANDOM), KEY))
    for gradient in (eqx.filter_grad, fp8.filter_grad):
        with pytest.raises(ValueError, match="key for stochastic rounding is.*before you call"):
            gradient(lambda model: jax.vmap(model)(UNIT.astype(jnp.bfloat16)).astype(jnp.float32).mean())(cast)


def test_a_forward_pass_that_draws_nothing_needs_no_key():
    """Nor where the kernel's or the input's second use would draw: inference never makes it."""
    second = dataclasses.replace(fp8.Recipe(NEAREST, NEAREST, RANDOM), input_for_wgrad=RANDOM, kernel_for_dgrad=RANDOM)
    op = fp8.Fp8DotGeneral.init(second)
    np.testing.assert_array_equal(op(UNIT, HALVES, MATRIX), keyed(RANDOM_GRADIENT)(UNIT, HALVES, MATRIX))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_training_step_without_a_key_is_an_error(microbatches):
    model = linear(RANDOM_GRADIENT)
    step = fp8.TrainStep(lambda m, x: jax.vmap(m)(x).sum(), optax.sgd(1.0), microbatches=microbatches)
    with pytest.raises(ValueError, match="key is missing"):
        step(model, step.init(model), UNIT)


BAD_KEYS = {
    "an integer": 0,
    "words": np.zeros(2, np.uint32),
    "an array of words": jnp.zeros(2, jnp.uint32),
    "two keys": jax.random.split(KEY),
}


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS)
def test_what_is_no_single_key_is_an_error(key):
    model = linear(RANDOM_GRADIENT)
    with unchecked(), pytest.raises(ValueError, match=r"is not a single random key; make one with"):
        fp8.with_rounding_keys(model, key)
    for microbatches in (1, 2):
        step = fp8.TrainStep(lambda m, x: jax.vmap(m)(x).sum(), optax.sgd(1.0), microbatches=microbatches)
        with unchecked(), pytest.raises((ValueError, TypeError), match="single.* key|PRNG key"):
            step(model, step.init(model), UNIT, key=key)


def test_models_without_random_rounding_take_keys_and_ignore_them():
    model = linear(dataclasses.replace(RANDOM_GRADIENT, output_grad=NEAREST))
    assert jax.tree.structure(fp8.with_rounding_keys(model, KEY)) == jax.tree.structure(model)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_bfloat16_neighbors_are_drawn_with_the_probability_of_the_definition():
    """`hi` with probability `(x - lo) / (hi - lo)`, in numbers of float64."""
    draws = 4096
    x = np.float32([1.0 + 2.0**-9, -3.14159, 1e-30, -7e37, 0.999, 1.0 + 2.0**-20, 255.9, 2.0**-127 * 1.3])
    found = stochastic_bfloat16(jnp.broadcast_to(x[:, None], (len(x), draws)), jnp.uint32(7))
    found = np.asarray(found, np.float64)
    # bfloat16 is float32 without its lower 16 bits.
    lower = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    upper = (lower.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    assert ((found == lower[:, None]) | (found == upper[:, None])).all()
    expected = (x.astype(np.float64) - lower) / (upper.astype(np.float64) - lower)
    share = (found == upper[:, None]).mean(axis=1)
    assert (np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / draws) + 2.0**-16).all()


def test_bfloat16_keeps_what_it_represents_and_what_is_not_finite():
    x = np.float32([0.0, -0.0, 1.0, -1.5, 2.0**-126, np.inf, -np.inf, np.nan] * 64)
    found = np.asarray(stochastic_bfloat16(jnp.asarray(x), jnp.uint32(1)), np.float32)
    np.testing.assert_array_equal(found, x)
    assert (np.signbit(found) == np.signbit(x))[~np.isnan(x)].all()
