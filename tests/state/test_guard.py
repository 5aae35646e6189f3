"""State that anything but its own update changed: NaN on the device at its next use, an error on the host."""

import functools
import itertools

import equinox as eqx
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import rounded_up
from jax import lax

import haliax_fp8 as fp8
from haliax_fp8._state.guard import fit, guard_of, guard_on_host, is_modified, is_scaled_down
from haliax_fp8._state.table import scales_in
from haliax_fp8.layers.checks import _is_modified as is_state_changed
from haliax_fp8.training.updates import apply_exact_updates


X = jax.random.normal(jax.random.key(1), (16, 8))


@pytest.fixture(autouse=True)
def promotion():
    """As optax needs it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def mlp(**config):
    return fp8.fp8_linear_layers(eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), **config)


def mean_square(model, x):
    return (jax.vmap(model)(x) ** 2).mean()


def in_float16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, tree)


def as_tree(model):
    return eqx.filter(model, eqx.is_inexact_array)


# --- The guard itself -------------------------------------------------------------------------------------------------

SCALES = np.concatenate(
    [
        np.exp2(np.random.default_rng(0).uniform(-125, 127, 10_000)),
        np.exp2(np.arange(-126.0, 128.0)),
        [np.nextafter(np.float32(1.0), np.float32(2.0)), np.nextafter(np.float32(2.0), np.float32(1.0)), 1.125],
    ]
).astype(np.float32)


def taken(scale, guard):
    """Scales as products take them."""
    rows = jnp.stack([jnp.asarray(scale), jnp.asarray(guard)], axis=-1)[..., None, :]
    return scales_in(rows, (448.0,))[..., 0, 0]


def test_scales_with_their_guards_pass():
    guards = guard_of(jnp.asarray(SCALES))
    np.testing.assert_array_equal(taken(jnp.asarray(SCALES), guards), SCALES)
    assert not is_modified(SCALES, np.asarray(guards))
    with_infinity = np.append(SCALES, np.float32(np.inf))
    np.testing.assert_array_equal(guard_on_host(with_infinity), guard_of(jnp.asarray(with_infinity)))


def scales_of_operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales of input, kernel and output gradient; those that are exact, and those rounded up for bfloat16."""
    scales = np.random.default_rng(0).permutation(SCALES[(SCALES > 2.0**-60) & (SCALES < 2.0**60)])
    scales = scales[: len(scales) // 3 * 3].reshape(-1, 3)
    table = jnp.stack([jnp.asarray(scales), guard_of(jnp.asarray(scales))], axis=-1)
    return scales, *np.split(np.asarray(scales_in(table, (448.0, 448.0, 57344.0)))[..., 0, :], 2, axis=-1)


def test_scales_are_rounded_up_to_the_bits_of_their_operand():
    scales, exact, rounded = scales_of_operands()
    np.testing.assert_array_equal(exact, scales)
    expected = np.stack([rounded_up(scales[:, i], bits) for i, bits in enumerate((1, 7, 1))], axis=1)
    np.testing.assert_array_equal(rounded, expected.astype(np.float32))


# Of each product's two scales one is NaN; the gradient of a parameter or an input shows it.
SHOWN_BY = {"input": ("out", "dw"), "kernel": ("out", "dx"), "output_grad": ("dw", "dx")}


@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad])
def test_products_with_a_changed_scale_are_nan(filter_grad):
    for dtype in (jnp.float32, jnp.bfloat16):
        assert_changed_scales_are_shown(dtype, filter_grad)


def assert_changed_scales_are_shown(dtype, filter_grad):
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, use_bias=False, dtype=dtype, key=jax.random.key(0)))
    x = X.astype(dtype)

    @eqx.filter_jit
    def results(layer):
        total = lambda pair: jax.vmap(pair[0])(pair[1]).astype(jnp.float32).sum()
        of_layer, dx = filter_grad(total)((layer, x))
        return {"out": jax.vmap(layer)(x), "dw": of_layer.weight, "dx": dx}

    assert all(jnp.isfinite(result).all() for result in results(layer).values())
    for (row, operand), factor in itertools.product(enumerate(SHOWN_BY), (3.0, 0.0, -1.0)):
        table = layer.dot_general.state.table.array.at[row, 0].multiply(factor)
        for name, result in results(eqx.tree_at(lambda l: l.dot_general.state.table.array, layer, table)).items():
            shown = np.isnan(np.asarray(result, np.float32))
            assert shown.all() if name in SHOWN_BY[operand] else not shown.any(), (operand, factor, name)


def test_bfloat16_holds_the_product_of_two_rounded_scales():
    input_scale, kernel_scale, grad_scale = scales_of_operands()[2].astype(np.float64).T
    for products in (input_scale * kernel_scale, grad_scale * kernel_scale, input_scale * grad_scale):
        np.testing.assert_array_equal(products.astype(jnp.bfloat16).astype(np.float64), products)


def test_the_guard_is_monotone():
    scales = np.sort(SCALES)
    guards = np.asarray(guard_of(jnp.asarray(scales)))
    assert (np.diff(guards) >= 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_state_that_was_rounded_with_its_model_passes(dtype):
    info = jnp.finfo(dtype)
    guard = np.asarray(guard_of(jnp.asarray(SCALES)))
    normal = (SCALES > float(info.smallest_normal)) & (SCALES < 0.9 * float(info.max))
    scale, guard = (x[normal].astype(dtype).astype(np.float32) for x in (SCALES, guard))
    assert not is_modified(scale, guard)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_model_that_was_cast_whole_tells_its_scales(dtype):
    """As Levanter's mixed precision casts it, inside and outside the loss."""
    layer = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    op = fp8.fp8_linear_layers(layer, recipe="delayed").dot_general
    op = eqx.tree_at(lambda op: op.state, op, op.state.with_scale(jnp.array([0.5, 3.0, 0.0117])))
    cast = jax.tree.map(lambda x: x.astype(dtype), op)
    for operand, scale in (("input", 0.5), ("kernel", 3.0), ("output_grad", 0.0117)):
        actual = cast.scale(operand)
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, scale, rtol=2.0**-8)
    assert not is_state_changed(cast.state)
    # A scale that something else changed is not made to look right by that.
    wrong = eqx.tree_at(lambda op: op.state.table.array, cast, cast.state.table.array.at[..., 0].multiply(2))
    assert np.isnan(wrong.scale("kernel"))
    assert is_state_changed(wrong.state)


CHANGES = {
    "one step of Adam": lambda scale, guard: (scale - 1e-4, guard - 1e-4),
    "one of SGD": lambda scale, guard: (scale - 1e-3 * scale, guard - 1e-3 * guard),
    "weight decay": lambda scale, guard: (scale * (1 - 1e-5), guard * (1 - 1e-5)),
    "an average with the first state": lambda scale, guard: (0.999 * scale + 0.001, 0.999 * guard + 0.001),
    "the sum of two": lambda scale, guard: (scale + scale, guard + guard),
    "the sum of three": lambda scale, guard: (3 * scale, 3 * guard),
    "the sign": lambda scale, guard: (-scale, -guard),
    "another scale": lambda scale, guard: (scale * np.float32(1.5), guard),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name):
    scales = SCALES[(SCALES > 1e-12) & (SCALES < 1e4) & (np.abs(SCALES - 1.0) > 0.2)]
    guards = np.asarray(guard_of(jnp.asarray(scales)))
    with np.errstate(all="ignore"):
        scale, guard = (np.asarray(x, np.float32) for x in CHANGES[name](scales, guards))
    checked = taken(jnp.asarray(scale), jnp.asarray(guard))
    changed = (scale != scales) | (guard != guards)
    assert np.isnan(checked[changed]).all()
    indices = np.flatnonzero(changed)[:200]
    assert all(is_modified(scale[i : i + 1], guard[i : i + 1]) for i in indices)


# How a step writes state: `TrainStep` takes the gradient's tables as they are, `apply_updates` computes them again.
WRITES = [
    (fp8.filter_grad, functools.partial(apply_exact_updates, key=None)),
    (fp8.filter_grad, fp8.apply_updates),
    (eqx.filter_grad, fp8.apply_updates),
]


def test_no_step_makes_a_changed_scale_look_right():
    for filter_grad, apply in WRITES:
        assert_changed_scales_stay(filter_grad, apply)


def assert_changed_scales_stay(filter_grad, apply):
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0)))

    @eqx.filter_jit
    def after_step(layer):
        overwrites, gradients = fp8.partition_for_grad_overwrite(filter_grad(mean_square)(layer, X))
        return apply(layer, jax.tree.map(jnp.zeros_like, gradients), overwrites).dot_general.state

    before = layer.dot_general.state.table.array
    assert (after_step(layer).array[:, 1] > 0.0).all()  # Otherwise each amax is recorded.
    for row, factor in itertools.product(range(3), (1.5, -1.0)):
        changed = eqx.tree_at(lambda l: l.dot_general.state.table.array, layer, before.at[row, 0].multiply(factor))
        state = after_step(changed)
        np.testing.assert_array_equal(state.array[row], changed.dot_general.state.array[row])
        assert is_state_changed(state)


def test_what_a_trainer_leaves_of_layers_that_were_not_reached_is_a_scale_of_one():
    for value in (0.0, -0.0, -np.inf):
        assert float(taken(jnp.float32(value), jnp.float32(value))) == 1.0
        assert not is_modified(np.full(1, value, np.float32), np.full(1, value, np.float32))


def test_no_guard_fits_a_scale_that_is_not_positive():
    not_positive = np.array([0.0, -0.0, -1.0, -1e-38, -3e38, np.nan, -np.nan], np.float32)
    positive = np.concatenate([SCALES, [np.float32(np.inf)]])
    guards = np.unique(np.concatenate([guard_of(jnp.asarray(x)) for x in (not_positive, positive)]))
    guards = np.append(guards[np.isfinite(guards)], [np.inf, np.nan]).astype(np.float32)
    scale, guard = (x.ravel() for x in np.meshgrid(not_positive, guards))
    unreached = (scale == 0.0) & (guard == 0.0)
    assert not np.asarray(fit(jnp.asarray(scale), jnp.asarray(guard)))[~unreached].any()
    assert all(is_modified(scale[i : i + 1], guard[i : i + 1]) for i in np.flatnonzero(~unreached)[::97])


def test_device_and_host_agree_on_numbers_that_are_not_ordinary():
    """Subnormal ones too, which a CPU takes for zero where it computes with them."""
    special = np.array([0.0, -0.0, 1e-40, 2e-40, -1e-40, -1.0, -2.0, 0.25, 0.5, np.inf, -np.inf, np.nan], np.float32)
    special = np.concatenate([special, np.asarray(guard_of(jnp.array([1e-38, 0.25, np.inf])))])
    scale, guard = (x.ravel() for x in np.meshgrid(special, special))
    fits = np.asarray(fit(jnp.asarray(scale), jnp.asarray(guard)))
    changed = [is_modified(scale[i : i + 1], guard[i : i + 1]) for i in range(scale.size)]
    np.testing.assert_array_equal(~fits, changed)


def test_a_guard_is_positive():
    guards = np.asarray(guard_of(jnp.asarray(SCALES)))
    assert not np.asarray(fit(jnp.asarray(SCALES), jnp.asarray(-guards))).any()
    assert is_modified(SCALES[:1], -guards[:1])


def test_state_of_a_scale_that_is_not_positive_stays_nan():
    """A changed scale gets no new guard: not where scales are carried to another recipe, nor by a remedy."""
    for dtype in (jnp.float32, jnp.bfloat16):
        layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, use_bias=False, dtype=dtype, key=jax.random.key(0)))
        for value in (np.nan, 0.0, -1.0):
            scales = jnp.ones(3).at[0].set(value)
            state = layer.dot_general.state.with_scale(scales)
            changed = eqx.tree_at(lambda l: l.dot_general.state, layer, state)
            assert np.isnan(state.scale[0]) and np.isnan(jax.vmap(changed)(X.astype(dtype)).astype(jnp.float32)).all()
            with pytest.raises(ValueError, match="changed by something other"):
                fp8.training.check_not_modified(changed)


def test_sums_of_scales_and_guards_are_not_scaled_down():
    """Nor are they if they were rounded to bfloat16; but divided by two, each single one is."""
    for count in (1, 2, 3, 16):
        scale = jax.random.permutation(jax.random.key(count), SCALES[(SCALES > 2.0**-90) & (SCALES < 2.0**110)])
        scale = scale[: len(scale) // count * count].reshape(count, -1)
        sums = [x.sum(axis=0) for x in (scale, guard_of(scale))]
        assert not is_scaled_down(*sums).any()
        assert not is_scaled_down(*[x.astype(jnp.bfloat16).astype(jnp.float32) for x in sums]).any()
        # Half of float16's last bit may be missing.
        large = sums[0] > 2.0**-10
        for factor in (0.75, 0.5, 0.1, 1 / 4096) if count == 1 else ():
            assert is_scaled_down(*[jnp.float32(factor) * x[large] for x in sums]).all(), factor


@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad])
def test_gradients_that_are_divided_with_their_state_are_noticed(filter_grad):
    """By a loss scale, or by the number of examples whose gradients were added; before state is split from them."""
    model, x = mlp(), jnp.stack([X, 2 * X])

    def applied(gradients):
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        return fp8.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients), overwrites)

    def scaled(factor):
        gradients = filter_grad(lambda model, x: mean_square(model, x) / factor)(model, X)
        return jax.tree.map(lambda g: g * factor, gradients)

    per_example = eqx.filter_vmap(eqx.filter_grad(mean_square), in_axes=(None, 0))(model, x)
    wrong = [scaled(factor) for factor in (0.5, 1 / 1024)] + [jax.tree.map(lambda g: g.mean(0), per_example)]
    for gradients in wrong:
        changed = eqx.filter_jit(applied)(gradients)
        assert np.isnan(mean_square(changed, X))
        with pytest.raises(ValueError, match="gradients that were divided before state was"):
            fp8.describe(changed)
    for gradients in (scaled(1.0), scaled(4.0), jax.tree.map(lambda g: g.sum(0), per_example)):
        assert np.isfinite(mean_square(eqx.filter_jit(applied)(gradients), X))


@pytest.mark.parametrize("length", [3, 1024])
@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad])
def test_gradients_that_are_averaged_with_their_state_are_noticed(filter_grad, length):
    """Microbatches whose sizes differ, averaged by hand; what is right passes, whatever was recorded before."""
    plain = fp8.restore_linear_layers(mlp())
    gradient = eqx.filter_jit(filter_grad(mean_square))
    uses = eqx.filter_jit(filter_grad(lambda model, x: mean_square(model, x) + mean_square(model, 0.3 * x)))
    total = lambda parts: jax.tree.map(lambda *g: sum(g[1:], start=g[0]), *parts)
    ways = {
        "mean": lambda parts: jax.tree.map(lambda g: g / len(parts), total(parts)),
        "weighted mean": lambda parts: jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, parts[0], parts[-1]),
        "sum": total,
        "accumulated": lambda parts: functools.reduce(fp8.accumulate_gradients, parts, None),
        "bfloat16": lambda parts: jax.tree.map(lambda g: g.astype(jnp.bfloat16), parts[-1]),
        "alone": lambda parts: parts[0],
    }

    def after(way, steps, take=gradient):
        model = fp8.fp8_linear_layers(plain, amax_history_length=length)
        for _ in range(steps):
            parts = [take(model, X * (1.0 + i)) for i in range(8)]
            overwrites, gradients = fp8.partition_for_grad_overwrite(ways[way](parts))
            model = fp8.apply_updates(model, jax.tree.map(jnp.zeros_like, gradients), overwrites)
        return model

    for way in ("mean", "weighted mean"):
        with pytest.raises(ValueError, match="gradients that were divided before state was"):
            fp8.describe(after(way, 3))
    for way in ("sum", "accumulated", "bfloat16", "alone"):
        fp8.describe(after(way, 4))
    # Uses of one gradient are a sum as well, or a maximum.
    fp8.describe(after("alone", 4, take=uses))


@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad])
def test_a_model_that_is_float16_as_a_whole_records_its_amaxes(filter_grad):
    """Where float16 rounds a scale up, or to zero; the amax is that of the gradient as long as float16 holds it."""
    # A scale that follows each amax.
    recipe = fp8.Recipe.of(fp8.DelayedScaling(amax_history_length=1))
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, key=jax.random.key(0)), recipe=recipe)
    half = in_float16(layer)
    for factor in (8e-4, 5e-4, 1e-4, 1e-5, 1e-6):
        loss = lambda layer, factor=factor: jnp.sum(jax.vmap(layer)(X).astype(jnp.float32) ** 2) * factor
        expected = filter_grad(loss)(layer).dot_general.amax_history("output_grad")[0]
        # As JAX returns it for state in float16.
        gradients = in_float16(filter_grad(loss)(half))
        overwrites, rest = fp8.partition_for_grad_overwrite(gradients)
        stepped = fp8.apply_updates(half, jax.tree.map(jnp.zeros_like, rest), overwrites)
        np.testing.assert_allclose(stepped.dot_general.amax_history("output_grad")[0], expected, rtol=0.05)
        fp8.training.check_not_modified(stepped)


@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad])
def test_gradients_that_were_cast_to_float16_before_state_was_split_from_them_are_an_error(filter_grad):
    model = mlp()
    gradients = filter_grad(mean_square)(model, X)
    overwrites, rest = fp8.partition_for_grad_overwrite(in_float16(gradients))
    with pytest.raises(ValueError, match="overwrites are in float16.*Split state from gradients"):
        fp8.apply_updates(model, rest, overwrites)
    overwrites, rest = fp8.partition_for_grad_overwrite(gradients)
    assert np.isfinite(mean_square(fp8.apply_updates(model, in_float16(rest), overwrites), X))
    in_bfloat16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gradients)
    overwrites, rest = fp8.partition_for_grad_overwrite(in_bfloat16)
    assert np.isfinite(mean_square(fp8.apply_updates(model, rest, overwrites), X))


def test_the_scale_of_a_layer_that_was_not_reached_is_the_one_that_products_take():
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0)))
    for value in (0.0, -np.inf):
        state = layer.dot_general.state
        emptied = eqx.tree_at(lambda l: l.dot_general.state, layer, state.with_array(jnp.full_like(state.array, value)))
        assert (emptied.dot_general.state.scale == 1.0).all()
        np.testing.assert_array_equal(jax.vmap(emptied)(X), jax.vmap(layer)(X))


def test_scales_that_are_not_calibrated_in_float16_are_not_changed_ones():
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, key=jax.random.key(0)), recipe="static")
    cast = in_float16(layer)
    fp8.training.check_not_modified(cast)
    with pytest.raises(ValueError, match="not calibrated"):
        fp8.TrainStep(mean_square, optax.sgd(0.1))(cast, (), X)


# --- Loops that are wrong ---------------------------------------------------------------------------------------------


def whole_tree(optimizer):
    """The loop that trains what is inexact, scales too."""

    def step(model, opt_state):
        loss, gradients = eqx.filter_value_and_grad(mean_square)(model, X)
        updates, opt_state = optimizer.update(gradients, opt_state, as_tree(model))
        return eqx.apply_updates(model, updates), opt_state, loss

    return step, lambda model: optimizer.init(as_tree(model))


def decayed(model, opt_state):
    """Weight decay by hand, over the whole tree."""
    loss, gradients = fp8.filter_value_and_grad(mean_square)(model, X)
    overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
    model = fp8.apply_updates(model, jax.tree.map(lambda g: -1e-3 * g, gradients), overwrites)
    shrunk = jax.tree.map(lambda x: x * 0.999 if eqx.is_inexact_array(x) else x, model)
    return shrunk, opt_state, loss


def averaged(model, opt_state):
    """A step with an average of models that is evaluated and trained on."""
    loss, gradients = fp8.filter_value_and_grad(mean_square)(model, X)
    overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
    new = fp8.apply_updates(model, jax.tree.map(lambda g: -1e-3 * g, gradients), overwrites)
    (old, static), new = eqx.partition(model, eqx.is_inexact_array), as_tree(new)
    return eqx.combine(optax.incremental_update(new, old, 0.1), static), opt_state, loss


WRONG = {
    "adamw": whole_tree(optax.adamw(1e-3)),
    "sgd": whole_tree(optax.sgd(1e-2)),
    "lion": whole_tree(optax.lion(1e-4)),
    "weight decay": (decayed, lambda model: None),
    "average": (averaged, lambda model: None),
}


@pytest.mark.parametrize("how", ["jit", "scan"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_give_nan_by_the_second_step(name, how):
    step, init = WRONG[name]
    model = mlp(amax_history_length=4)
    state = init(model)
    if how == "scan":
        dynamic, static = eqx.partition((model, state), eqx.is_array)

        def body(carry, _):
            *new, loss = step(*eqx.combine(carry, static))
            return eqx.filter(tuple(new), eqx.is_array), loss

        dynamic, losses = jax.jit(lambda d: lax.scan(body, d, length=20))(dynamic)
        model = eqx.combine(dynamic, static)[0]
    else:
        step, losses = eqx.filter_jit(step), []
        for _ in range(20):
            model, state, loss = step(model, state)
            losses.append(loss)
    assert np.isfinite(losses[0]) and np.isnan(losses[1:]).all()
    for look in (
        fp8.describe,
        fp8.training.check_not_modified,
        lambda m: fp8.quantization_statistics(m, mean_square, X),
        fp8.TrainStep(mean_square, optax.sgd(0.1)).init,
        lambda m: fp8.TrainStep(mean_square, optax.sgd(0.1))(m, (), X),
        lambda m: fp8.apply_updates(m, None, None),
    ):
        with pytest.raises(ValueError, match=r"layers\.0, .* was changed by something other(.|\n)*apply_updates\("):
            look(model)


@pytest.mark.more
@pytest.mark.parametrize("how", ["swapped", "rest twice", "gradients twice"])
def test_exchanged_arguments_of_apply_updates(how):
    model = mlp()
    gradients = fp8.filter_grad(mean_square)(model, X)
    overwrites, rest = fp8.partition_for_grad_overwrite(gradients)
    arguments = {
        "swapped": (overwrites, rest),
        "rest twice": (rest, rest),
        "gradients twice": (gradients, gradients),
    }[how]
    with pytest.raises(ValueError, match="partition_for_grad_overwrite"):
        fp8.apply_updates(model, *arguments)
    assert fp8.apply_updates(model, rest, overwrites) is not None


# --- Loops that are right ---------------------------------------------------------------------------------------------


def test_haliax_own_loop_keeps_scales_consistent():
    """A trainer that overwrites state as it comes."""
    model, optimizer = mlp(amax_history_length=4), optax.adamw(1e-3)
    state = optimizer.init(fp8.trainable(model))

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = eqx.filter_value_and_grad(mean_square)(model, X)
        overwrites, gradients = haxq.partition_for_grad_overwrite(gradients)
        updates, state = optimizer.update(gradients, state, fp8.trainable(model))
        return haxq.apply_updates(model, updates, overwrites), state, loss

    for _ in range(5):
        model, state, loss = step(model, state)
        assert np.isfinite(loss)
    fp8.training.check_not_modified(model)


@pytest.mark.more
def test_an_average_of_parameters_alone_is_fine():
    step = fp8.TrainStep(mean_square, optax.adamw(1e-3))
    model = mlp(amax_history_length=4)
    state, average = step.init(model), fp8.trainable(model)
    for _ in range(5):
        model, state, _ = step(model, state, X)
        average = optax.incremental_update(fp8.trainable(model), average, 0.1)
    averaged = eqx.combine(average, model)
    fp8.training.check_not_modified(averaged)
    assert np.isfinite(mean_square(averaged, X))


@pytest.mark.more
def test_a_state_that_was_changed_stays_so():
    """A right step after a wrong one does not hide it."""
    model = mlp(amax_history_length=4)
    gradients = fp8.filter_grad(mean_square)(model, X)
    overwrites, rest = fp8.partition_for_grad_overwrite(gradients)
    model = fp8.apply_updates(model, rest, overwrites)
    broken = jax.tree.map(lambda x: x * 0.99 if eqx.is_inexact_array(x) else x, model)
    for grad in (fp8.filter_grad, eqx.filter_grad):
        overwrites, rest = fp8.partition_for_grad_overwrite(grad(mean_square)(broken, X))
        rest = jax.tree.map(jnp.zeros_like, rest)
        after = eqx.filter_jit(fp8.apply_updates)(broken, rest, overwrites)
        assert np.isnan(mean_square(after, X))


# --- A trainer that takes gradients itself ----------------------------------------------------------------------------


def twice(model, x):
    return (jax.vmap(lambda x: model(model(x)))(x) ** 2).mean()


@pytest.mark.more
@pytest.mark.parametrize("loss_fn", [mean_square, twice])
def test_exact_gradients_are_those_of_filter_grad(loss_fn):
    model = mlp(amax_history_length=4)
    ours = eqx.filter_jit(fp8.filter_grad(loss_fn))(model, X)
    theirs = eqx.filter_jit(eqx.filter_grad(fp8.training.exact_gradients(loss_fn)))(model, X)
    both = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert all(bool((a == b).all()) for a, b in both)


@pytest.mark.more
def test_exact_gradients_with_auxiliary_results_and_a_factor():
    model = mlp(amax_history_length=4)
    loss_fn = fp8.training.exact_gradients(
        lambda m, x: (mean_square(m, x), {"sum": x.sum(), "name": "a"}), has_aux=True
    )
    plain = fp8.training.exact_gradients(mean_square)
    gradients, aux = eqx.filter_grad(loss_fn, has_aux=True)(model, X)
    tripled = eqx.filter_grad(lambda m, x: 3.0 * plain(m, x))(model, X)
    assert aux["name"] == "a" and float(aux["sum"]) == float(X.sum())
    for a, b in zip(jax.tree.leaves(fp8.trainable(gradients)), jax.tree.leaves(fp8.trainable(tripled)), strict=True):
        np.testing.assert_array_equal(3.0 * a, b)
    a, b = (g.layers[0].dot_general.amax_history("input") for g in (gradients, tripled))
    np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="an argument other than its first"):
        jax.grad(lambda x: plain(model, x))(X)


def test_the_weight_of_a_loss_is_not_rounded_to_the_dtype_of_the_gradients():
    """65536, the loss scale that mixed precision begins with, is infinite in float16; 1/3 is not a bfloat16."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        factors = jnp.asarray([1.5e-3, 1.25e-3, 1.75e-3, 1.125e-3, 1e-3], dtype)
        exact = fp8.training.exact_gradients(lambda params, x=factors: (params * x).astype(jnp.float32).sum())
        for weight in (1 / 3, 0.3, 2.0**16, 2.0**17):
            got = jax.vjp(exact, jnp.ones(5, dtype))[1](jnp.float32(weight))[0]
            expected = (np.asarray(factors, np.float32) * np.float32(weight)).astype(dtype)
            np.testing.assert_array_equal(np.asarray(got), expected, err_msg=f"{dtype}, {weight}")


def test_numbers_as_operands_record_their_amaxes():
    op = fp8.Fp8DotGeneral.init()
    product = lambda op: op(jnp.float32(2.0), jnp.float32(3.0), (((), ()), ((), ())))
    for gradient in (fp8.filter_grad, eqx.filter_grad):
        new = gradient(product)(op)
        assert [float(new.amax_history(operand)[0]) for operand in SHOWN_BY] == [2.0, 3.0, 1.0]
