"""Moments in FP8: their numbers, what stays in float32, and that every optimizer trains with them."""

import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import unchecked
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from haliax_fp8 import TrainStep, fp8_linear_layers, trainable, transfer_optimizer_state
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.memory import HostOptimizer
from haliax_fp8.training import QuantizedState, quantized_state
from haliax_fp8.training.quantized_state import _Blocks, _rounded


SIZE = 128
MAX, SMALLEST_NORMAL = 448.0, 2.0**-6
# Every positive normal value of E4M3, by the definition of its dtype.
GRID = np.arange(0x08, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.fixture(autouse=True)
def _promotion_for_optax():
    """Optax divides floats by integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


store = optax.trace(decay=0.0)
"""Its state is the gradient that it was given."""


@functools.cache
def stored_by(steps):
    """A function that stores an array in FP8 `steps` times, with other random bits each time; and its last state."""
    optimizer = quantized_state(store, min_size=0)

    @jax.jit
    def run(x):
        def step(state, _):
            _, state = optimizer.update(x, state)
            return state, state.dequantize().trace

        return jax.lax.scan(step, optimizer.init(x), length=steps)

    return run


def stored(x, steps=1):
    state, values = stored_by(steps)(jnp.asarray(x, jnp.float32))
    return state, np.asarray(values, np.float64)


def bits(x):
    return np.asarray(x).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def reference(x):
    """Scale, exponent and the two neighbors of each value, of one block, in float64, from the formulas of COAT."""
    magnitude = np.abs(np.asarray(x, np.float64))
    scale, smallest = magnitude.max(), magnitude[magnitude > 0.0].min()
    exponent = min(np.log(MAX / SMALLEST_NORMAL) / np.log(scale / smallest), 16.0) if scale > smallest else 16.0
    q = np.clip((magnitude / scale) ** exponent * MAX, SMALLEST_NORMAL, MAX)
    # What float32 computes may lie just across a grid point.
    lower, upper = (np.searchsorted(GRID, q * (1 + side * 1e-4), "right") for side in (-1, 1))
    low, high = GRID[np.maximum(lower - 1, 0)], GRID[np.minimum(upper, GRID.size - 1)]
    value = lambda n: np.where(magnitude > 0.0, (n / MAX) ** (1 / exponent) * scale, 0.0)
    return scale, exponent, value(low), value(high)


RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(SIZE).astype(np.float32)
HARD = {
    "normal": NORMAL,
    "squares": NORMAL**2,
    "one outlier": np.where(np.arange(SIZE) == 5, 1e4, NORMAL).astype(np.float32) ** 2,
    "one spike in zeros": np.where(np.arange(SIZE) == 5, 3.0, 0.0).astype(np.float32),
    "tiny": np.float32(1e-30) * (1.0 + NORMAL**2),
    "tiny beside large": np.where(np.arange(SIZE) % 2, 1e-30, 1.0).astype(np.float32) * (1.0 + NORMAL**2),
    # Larger gradients are limited: float32 does not hold their squares.
    "all magnitudes": np.exp(RNG.uniform(np.log(2e-38), np.log(1.8e19), SIZE)).astype(np.float32),
    "equal": np.full(SIZE, -0.3, np.float32),
}


@pytest.mark.parametrize("name", HARD)
def test_each_value_becomes_one_of_its_neighbors_by_the_formulas(name):
    x = HARD[name].astype(np.float32)
    state, values = stored(x, steps=4)
    scale, exponent, low, high = reference(x)
    np.testing.assert_array_equal(state.scales[0], np.float32([scale]))
    np.testing.assert_allclose(state.exponents[0], [exponent], rtol=1e-5)
    # By the definition, from the bits that are stored.
    q = bits(state.optimizer.trace)
    np.testing.assert_allclose(values[-1], np.sign(q) * (np.abs(q) / MAX) ** (1 / exponent) * scale, rtol=2e-4)
    assert (np.sign(values) == np.sign(x)).all(), "nothing but zeros becomes zero"
    assert (np.abs(values) >= low * (1 - 2e-4)).all() and (np.abs(values) <= high * (1 + 2e-4)).all()


@pytest.mark.parametrize("name", ["normal", "squares", "one outlier", "tiny beside large"])
def test_the_mean_of_many_draws_is_the_value(name):
    x, steps = HARD[name].astype(np.float64), 4096
    _, values = stored(HARD[name], steps)
    _, _, low, high = reference(x)
    # Of a value between its neighbors: the largest standard error of the mean.
    tolerance = 5.0 * (high - low) / 2 / np.sqrt(steps) + 1e-5 * np.abs(x)
    np.testing.assert_array_less(np.abs(values.mean(0) - x), tolerance)
    # Of those that go up and down about equally often; rare events have heavy tails.
    often = values.std(0) > 0.3 * (values.max(0) - values.min(0))
    assert often.sum() > 20, "rounded at random"
    correlation = np.corrcoef(values[:, often].T)
    np.fill_diagonal(correlation, 0.0)
    assert np.abs(correlation).max() < 6 / np.sqrt(steps), "elements are rounded independently"


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_value_that_is_not_finite_makes_its_block_nan(bad):
    x = np.concatenate([NORMAL, np.where(np.arange(SIZE) == 3, bad, NORMAL), np.zeros(SIZE)])
    _, values = stored(x)
    assert np.isfinite(values[-1][:SIZE]).all() and np.isnan(values[-1][SIZE : 2 * SIZE]).all()
    np.testing.assert_array_equal(values[-1][2 * SIZE :], 0.0)


@pytest.mark.parametrize("spike", [3e38, 1e20, np.inf, np.nan])
def test_updates_after_one_huge_gradient(spike):
    """Float32 holds 3e38, and not its square. The step is late enough that no correction of bias hides an update."""
    gradient, wide = jnp.asarray(np.stack([NORMAL, NORMAL])), optax.adam(1.0, b2=0.9)

    @functools.partial(jax.jit, static_argnums=0)
    def run(optimizer, spike):
        def step(state, index):
            updates, state = optimizer.update(jnp.where(index == 60, gradient.at[0, 5].set(spike), gradient), state)
            return state, updates

        return jax.lax.scan(step, optimizer.init(gradient), jnp.arange(70))[1][60:]

    expected, updates = run(wide, spike), run(quantized_state(wide, min_size=0), spike)
    assert np.isfinite(updates[:, 1]).all()
    if not np.isfinite(spike):
        assert np.isnan(updates[0, 0, 5]) and np.isnan(updates[1:, 0]).all()
        return
    assert np.abs(updates).max() < 4.0
    # A block's neighboring values are far apart while it spans 40 decades.
    others = (np.asarray(updates) / expected)[:, 0, np.arange(SIZE) != 5]
    assert 1 / 3 < others.min() and others.max() < 3


def test_a_second_moment_follows_its_own_gradient():
    """Its gradient becomes 10 times smaller, that of its block does not. Rounded to nearest, `0.999 v` stays `v`."""
    steps, decay = 4000, 0.999
    optimizer = optax.scale_by_rms(decay=decay)
    quantized = quantized_state(optimizer, min_size=0)
    early = jnp.ones((8, SIZE)).at[:, ::2].set(0.5)
    late = early.at[:, 1::2].set(0.05)

    @jax.jit
    def run():
        def step(state, index):
            return quantized.update(jnp.where(index < 1000, early, late), state)[1], None

        return jax.lax.scan(step, quantized.init(early), jnp.arange(steps))[0]

    v = np.asarray(run().dequantize().nu, np.float64)
    past = (1 - decay**1000) * decay ** (steps - 1000)
    expected = past * np.asarray(early) ** 2 + (1 - decay ** (steps - 1000)) * np.asarray(late) ** 2
    np.testing.assert_allclose((v / expected).reshape(-1, 2).mean(0), 1.0, atol=0.05)


def test_tiny_second_moments_do_not_blow_updates_up():
    """A gradient of 1e-8 beside one of 10, of which to nearest with one scale `v` would be zero and `m` would not."""
    gradient = jnp.where(jnp.arange(4 * SIZE).reshape(4, SIZE) % 32 == 0, 10.0, 1e-8) * (1.0 + 0.1 * NORMAL)[None]
    optimizer = quantized_state(optax.scale_by_adam(eps=1e-16), min_size=0)
    update = jax.jit(optimizer.update)
    state = optimizer.init(gradient)
    for _ in range(20):
        updates, state = update(gradient, state)
        assert float(jnp.abs(updates).max()) < 3.0
    assert float(jnp.abs(updates).min()) > 0.3


# -- Every optimizer, on trees of every kind --

Layers, Embed, Mlp, Vocab = hax.make_axes(layers=2, embed=128, mlp=256, vocab=64)


class Model(eqx.Module):
    """An embedding, and two layers of a stack that are summed: small programs, and the arrays of a model."""

    embedding: hnn.Embedding
    up: hnn.Linear
    down: hnn.Linear
    matrix: jax.Array
    odd: jax.Array

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        layers = lambda key, *axes: hax.vmap(lambda key: hnn.Linear.init(*axes, key=key), Layers)(
            jax.random.split(key, Layers.size)
        )
        embedding = hnn.Embedding.init(Vocab, Embed, key=keys[0])
        return Model(
            embedding, layers(keys[1], Embed, Mlp), layers(keys[2], Mlp, Embed), jnp.eye(128), jnp.ones((128, 100))
        )


def loss_fn(model, tokens):
    x = model.embedding(tokens)
    x = hax.named(x.array @ model.matrix, x.axes)
    hidden = hax.tanh(hax.dot(x, model.up.weight, axis=Embed) + model.up.bias)
    out = hax.sum(hax.dot(hidden, model.down.weight, axis=Mlp) + model.down.bias, Layers)
    error = hax.mean(hax.square(out - hax.roll(x, 1, "batch"))).scalar()
    return error.astype(jnp.float32) + 0.01 * jnp.mean(jnp.square(model.odd.astype(jnp.float32)))


TOKENS = hax.named(jnp.arange(32) % Vocab.size, "batch")

OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, weight_decay=0.1),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=1000),
}


def moments(state):
    """Data, scale and dequantized value of each array that is quantized."""
    arrays = zip(jax.tree.leaves(state.optimizer), state.scales, jax.tree.leaves(state.dequantize()), strict=True)
    return [(data, scale, value) for data, scale, value in arrays if scale is not None]


def sharded(model):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P(*(["data"] if x.shape[0] % 4 == 0 else []))))
    return jax.tree.map(put, model)


TREES = {
    "stacked": Model.init,
    "bf16": lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), Model.init()),
    "sharded": lambda: sharded(Model.init()),
}
# In the default run.
DEFAULT = [("adamw", "sharded"), ("muon", "bf16"), ("lion", "stacked")]
CASES = [
    pytest.param(name, tree, marks=pytest.mark.fast if (name, tree) in DEFAULT else pytest.mark.more)
    for name in OPTIMIZERS
    for tree in TREES
]


def losses_of(step, model, opt_state, count):
    losses = []
    for _ in range(count):
        model, opt_state, metrics = step(model, opt_state, TOKENS)
        losses.append(float(metrics["loss"]))
    return model, opt_state, losses


@pytest.mark.parametrize("name, tree", CASES)
def test_every_optimizer_trains_resumes_and_changes_precision(name, tree, tmp_path):
    model, count = TREES[tree](), 6
    in_float32, in_fp8 = TrainStep(loss_fn, OPTIMIZERS[name]), TrainStep(loss_fn, quantized_state(OPTIMIZERS[name]))
    _, wide, expected = losses_of(in_float32, model, in_float32.init(model), count)
    almost, state, losses = losses_of(in_fp8, model, in_fp8.init(model), count - 1)
    # An update computes a block's smallest element and its data in two programs. At the optimization level of these
    # tests XLA makes a fused multiply-add of `a * m + b * g` in one of them alone, at its own level in both.
    last = eqx.filter_jit(in_fp8, compiler_options={"xla_backend_optimization_level": 3})
    trained, state, (loss,) = losses_of(last, almost, state, 1)
    losses.append(loss)
    # The gap, of all that was learned: both start at the same loss.
    assert losses[0] == expected[0] and expected[-1] < expected[0]
    assert abs(losses[-1] - expected[-1]) < 0.05 * (expected[0] - expected[-1])
    # Not the embedding's, the biases' and what 128 does not divide. By itself Muon leaves arrays of three axes to Adam.
    assert len(moments(state)) == {"adam": 6, "adamw": 6, "muon": 5}.get(name, 3)
    for data, scale, _ in moments(state):
        weight = next(x for x in jax.tree.leaves(model) if x.shape == data.shape)
        assert scale.shape == (*weight.shape[:-1], weight.shape[-1] // SIZE)
        assert data.dtype == jnp.uint8 and scale.dtype == jnp.float32
        assert all(x.sharding.is_equivalent_to(weight.sharding, weight.ndim) for x in (data, scale))
    # Saved and loaded, the same numbers follow.
    save(tmp_path / "run.safetensors", (trained, state))
    (loaded, loaded_state), _ = load_into((trained, in_fp8.init(trained)), tmp_path / "run.safetensors", strict=True)
    assert losses_of(in_fp8, loaded, loaded_state, 2)[2] == losses_of(in_fp8, trained, state, 2)[2]
    # From FP8 to float32 nothing changes; the reverse rounds once.
    unrounded = transfer_optimizer_state(state, trained, trained, optimizer=OPTIMIZERS[name])
    assert jax.tree.structure(unrounded) == jax.tree.structure(wide)
    again = transfer_optimizer_state(unrounded, trained, trained, optimizer=in_fp8.optimizer)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    exponents = [pair for pair in zip(again.exponents, state.exponents, strict=True) if pair[0] is not None]
    for (*_, a), (*_, b), (k, other) in zip(moments(again), moments(state), exponents, strict=True):
        np.testing.assert_allclose(k, other, rtol=1e-4)
        # Of a value that float32 computes just beside the grid, the other neighbor may be drawn.
        assert (jnp.abs(a - b) > 1e-3 * jnp.abs(b)).sum() <= 1e-4 * a.size
    expected = losses_of(in_fp8, trained, state, 2)[2]
    for go_on, other in ((in_float32, unrounded), (in_fp8, again)):
        assert losses_of(go_on, trained, other, 2)[2] == pytest.approx(expected, rel=1e-3)


# -- What stays in float32, and says why --

PARAMS = {"weight": jnp.ones((64, 128)), "bias": jnp.ones(128), "odd": jnp.ones((128, 100))}


def reasons(optimizer, params):
    return dict(optimizer.init(params).unquantized)


def test_what_stays_in_float32_says_why(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    state = quantized_state(optax.adam(1e-3)).init(PARAMS)
    shown = " ".join(str(state).split())
    for line in (
        "0.mu.weight E4M3[64, 128]",
        "0.nu.bias float32 fewer than min_size=4096 elements",
        "0.mu.odd float32 the last axis, 100, is not a multiple of 128",
    ):
        assert line in shown
    assert state.optimizer[0].mu["odd"].dtype == jnp.float32
    of_trace = functools.partial(quantized_state, store)
    assert reasons(of_trace(min_size=0, where=lambda path, x: path != "weight" and x.size > 0), PARAMS) == {
        "trace.weight": "left out by where",
        "trace.odd": "the last axis, 100, is not a multiple of 128",
    }
    for embedding in (
        hnn.Embedding.init(Vocab, Embed, key=jax.random.key(0)),
        eqx.nn.Embedding(64, 128, key=jax.random.key(0)),
    ):
        (reason,) = reasons(of_trace(), trainable({"deep": [embedding]})).values()
        assert reason == "an embedding"
    # Copies of parameters, which are no moments, and sums of gradients.
    copies = reasons(quantized_state(optax.contrib.schedule_free_adamw(1e-3)), {"w": PARAMS["weight"]})
    assert copies == {"z.w": "starts as more than one number, unlike a moment"}
    sums = reasons(quantized_state(optax.MultiSteps(optax.adam(1e-3), 2)), {"w": PARAMS["weight"]})
    assert sums == {"acc_grads.w": "a sum of gradients"}


def test_the_part_of_each_device_is_what_128_has_to_divide():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    put = lambda size: jax.device_put(jnp.ones((64, size)), NamedSharding(mesh, P(None, "data")))
    state = quantized_state(store).init({"fits": put(512), "does not": put(128)})
    assert state.unquantized == (
        ("trace.does not", "the last axis, 128, of which each device has 32, is not a multiple of 128"),
    )
    assert state.optimizer.trace["does not"].sharding.spec == P(None, "data")
    assert state.scales[1].sharding.shard_shape((64, 4)) == (64, 1)


def test_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, P("data", "model")))}
        optimizer = quantized_state(optax.adamw(1e-3))

        @jax.jit
        def run(params, state):
            step = lambda state, _: (optimizer.update(jax.tree.map(jnp.sin, params), state, params)[1], None)
            return jax.lax.scan(step, optimizer.init(params) if state is None else state, length=2)[0]

        inside, outside = run(params, None), run(params, optimizer.init(params))
        for state in (inside, outside):
            assert {
                jax.typeof(x).sharding.spec for x in jax.tree.leaves((state.scales, state.optimizer)) if x.ndim
            } == {P("data", "model")}


# -- Inside and around other transformations --

TWO = {"a": jnp.ones((64, 128)), "b": jnp.ones((64, 128))}
LABELS = {"a": "adam", "b": "sgd"}
NESTED = {
    "in chain": (optax.chain(optax.clip(1.0), quantized_state(optax.adam(1e-2))), 4),
    "around chain": (quantized_state(optax.chain(optax.clip(1.0), optax.adam(1e-2))), 4),
    "in masked": (optax.masked(quantized_state(optax.adam(1e-2)), {"a": True, "b": False}), 2),
    "around masked": (quantized_state(optax.masked(optax.adam(1e-2), {"a": True, "b": False})), 2),
    "in multi_transform": (
        optax.multi_transform({"adam": quantized_state(optax.adam(1e-2)), "sgd": optax.sgd(1e-2)}, LABELS),
        2,
    ),
    "around multi_transform": (
        quantized_state(optax.multi_transform({"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, 0.9)}, LABELS)),
        3,
    ),
    "in MultiSteps": (optax.MultiSteps(quantized_state(optax.adam(1e-2)), 2), 4),
    "around MultiSteps": (quantized_state(optax.MultiSteps(optax.adam(1e-2), 2)), 4),
    "in apply_if_finite": (optax.apply_if_finite(quantized_state(optax.adam(1e-2)), 3), 4),
    "inject_hyperparams": (quantized_state(optax.inject_hyperparams(optax.adam)(1e-2)), 4),
}


@pytest.mark.parametrize("name", NESTED)
def test_it_nests_and_runs_in_a_donated_scan(name):
    """Four steps of a constant gradient, in bfloat16: Adam updates by its learning rate."""
    optimizer, count = NESTED[name]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TWO)
    state = optimizer.init(params)
    is_state = lambda node: isinstance(node, QuantizedState)
    states = [node for node in jax.tree.leaves(state, is_leaf=is_state) if is_state(node)]
    assert sum(x.dtype == jnp.uint8 for node in states for x in jax.tree.leaves(node.optimizer)) == count
    gradient = {name: jax.random.normal(jax.random.key(len(name)), x.shape, x.dtype) for name, x in params.items()}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, state, gradient):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), updates

        return jax.lax.scan(step, (params, state), length=4)

    (_, after), updates = run(params, state, gradient)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert updates["a"].dtype == jnp.bfloat16
    size = jnp.abs(updates["a"].astype(jnp.float32)).max(0)
    assert float(jnp.median(size)) == pytest.approx(1e-2, rel=0.1)


def test_moments_in_the_host_are_quantized_in_layers():
    """In a stack, each layer's; the same numbers as of the layer alone, but for random bits."""
    params = {
        "stack": hax.ones((hax.Axis("layers", 2), hax.Axis("a", 64), Embed), jnp.bfloat16),
        "one": jnp.ones((64, 128)),
    }
    gradients = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype), params)
    results = []
    for optimizer in (optax.adamw(1e-2), quantized_state(optax.adamw(1e-2))):
        host = HostOptimizer(optimizer)
        state, new = host.init(params), params
        update = jax.jit(host.update)
        for _ in range(3):
            new, state = update(gradients, state, new)
        results.append((new, state))
    (expected, _), (new, state) = results
    assert [x.dtype for x in jax.tree.leaves(state.optimizer[2].optimizer[0].mu)] == [jnp.uint8]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer[2].scales)} == {"pinned_host"}
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        moved = jnp.abs(b.astype(jnp.float32) - 1.0).mean()
        assert float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).mean()) < 0.1 * float(moved)
    with pytest.raises(ValueError, match=r"one layer otherwise than that of a stack.*min_size=0"):
        HostOptimizer(quantized_state(optax.adamw(1e-2), min_size=2**13 + 1)).init(params)


def test_an_element_an_ulp_beyond_its_blocks_measured_maximum_stays_finite():
    """The maximum and the data come from two programs, which may round differently."""
    x = jnp.full((4096, SIZE), 1.0 + 2.0**-20).at[:, 0].set(0.25)
    blocks = _Blocks.of(jnp.ones((4096, 1)), jnp.full((4096, 1), 0.25))
    data = np.asarray(_rounded(x, blocks, jnp.uint32(1))).view(ml_dtypes.float8_e4m3fn)
    assert np.isfinite(data.astype(np.float32)).all()


# -- What it takes --


def test_bytes_of_the_compiled_update():
    """At most 2.2 bytes of state per parameter of AdamW, and no moment in float32 when it starts."""
    params = {"w": jnp.ones((1024, 1024), jnp.bfloat16)}
    optimizer, size = quantized_state(optax.adamw(1e-3)), params["w"].size
    state = optimizer.init(params)
    update = jax.jit(optimizer.update, donate_argnums=1).lower(params, state, params).compile()
    memory = update.memory_analysis()
    of_state = memory.argument_size_in_bytes - 2 * params["w"].nbytes
    assert of_state <= 2.2 * size and memory.alias_size_in_bytes >= 2.1 * size
    start = jax.jit(optimizer.init).lower(params).compile().memory_analysis()
    assert start.output_size_in_bytes + start.temp_size_in_bytes <= 2.2 * size


def test_orbax_saves_and_restores_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    optimizer = quantized_state(optax.adamw(1e-3))
    _, state = jax.jit(optimizer.update)(jax.tree.map(jnp.sin, PARAMS), optimizer.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(optimizer.init, PARAMS))
    loaded, _ = load_into(optimizer.init(PARAMS), tmp_path / "state", strict=True)
    for other in (restored, loaded):
        jax.tree.map(np.testing.assert_array_equal, other, state)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: quantized_state(None), "optimizer=None of quantized_state is not an optimizer; use optax.adamw"),
        (
            lambda: quantized_state(optax.adam(1e-3), where=lambda path, x: None).init(PARAMS),
            "where of quantized_state returned None for 'odd'; it must return True",
        ),
        (
            lambda: quantized_state(store).update(PARAMS, store.init(PARAMS)),
            r"state is a TraceState, not a QuantizedState.*transfer_optimizer_state\(.*optimizer=optimizer",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        call()


def test_a_state_of_another_optimizer_is_refused():
    model = fp8_linear_layers(hnn.Linear.init(Embed, Mlp, key=jax.random.key(0)))
    state = optax.adam(1e-3).init(trainable(model))
    with pytest.raises(ValueError, match="opt_state does not belong to optimizer"):
        transfer_optimizer_state(state, model, model, optimizer=quantized_state(optax.lion(1e-3)))
