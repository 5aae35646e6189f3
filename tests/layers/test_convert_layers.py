"""fp8_linear_layers: what it finds, what it selects, what it refuses, and what the converted model still is."""

import dataclasses
import functools
import io
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.state_dict as state_dicts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import EPS, assert_same, float64, sqnr, unchecked
from jax.sharding import Mesh
from model_checks import is_state

import haliax_fp8
from haliax_fp8 import (
    DelayedScaling,
    Fp8Config,
    Fp8DotGeneral,
    Recipe,
    apply_updates,
    describe,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    restore_linear_layers,
)
from haliax_fp8.recipes import E4M3


Batch, In, Out, Hidden = hax.make_axes(batch=4, input=8, output=6, hidden=10)
Layers, Groups = hax.make_axes(layers=3, groups=2)
OPERANDS = ("input", "kernel", "output_grad")
SHORT = Fp8Config(amax_history_length=4)


def made(init, seed: int = 0):
    """What `init(key)` gives, with arrays drawn by NumPy: initialisers take seconds to compile."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape).astype(x.dtype))
    return jax.tree.map(draw, eqx.filter_eval_shape(init, jax.random.key(0)))


def linear(seed: int = 0, In=In, Out=Out, **kwargs) -> hnn.Linear:
    return made(lambda key: hnn.Linear.init(In, Out, key=key, **kwargs), seed)


def inputs(seed: int = 100, axes=(Batch, In)) -> hax.NamedArray:
    return hax.random.normal(jax.random.key(seed), axes)


class Block(state_dicts.ModuleWithStateDictSerialization):
    """Two layers with a residual, the way blocks of transformers have them."""

    up: hnn.Linear
    down: hnn.Linear
    scale: hax.NamedArray

    @staticmethod
    def init(*, key) -> "Block":
        up, down = jax.random.split(key)
        return Block(
            hnn.Linear.init(In, Hidden, key=up), hnn.Linear.init(Hidden, In, key=down, use_bias=False), hax.ones(In)
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        return x + self.scale * self.down(hnn.gelu(self.up(x)))


class Attention(eqx.Module):
    """Self-attention with several axes in its projections."""

    q: hnn.Linear
    k: hnn.Linear
    v: hnn.Linear
    o: hnn.Linear

    Position, Heads, HeadSize = hax.make_axes(position=5, heads=2, head_size=4)

    @staticmethod
    def init(*, key) -> "Attention":
        keys = jax.random.split(key, 4)
        heads = Attention.Heads, Attention.HeadSize
        projections = (hnn.Linear.init(In, heads, key=k, use_bias=False) for k in keys[:3])
        return Attention(*projections, hnn.Linear.init(heads, In, key=keys[3]))

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        q, k, v = self.q(x), self.k(x), self.v(x)
        KeyPosition = self.Position.alias("key_position")
        k, v = (a.rename({"position": "key_position"}) for a in (k, v))
        return self.o(hnn.attention.dot_product_attention(KeyPosition, self.HeadSize, q, k, v))


@functools.cache
def blocks(seed: int = 0, Block=Block, Axis=Layers, container=hnn.Stacked):
    return made(lambda key: container.init(Axis, Block)(key=jax.random.split(key, Axis.size)), seed)


def paths(model) -> set[str]:
    """Where a model has FP8 layers."""
    return {row.path for row in describe(model) if row.is_fp8}


def trained(model, *args, loss=None, steps: int = 2, rate: float = 0.01):
    """The model after plain gradient steps."""
    for _ in range(steps):
        model = descend(model, args, loss or squared_output, rate)
    return model


@eqx.filter_jit
def descend(model, args, loss, rate: float):
    overwrites, grads = partition_for_grad_overwrite(eqx.filter_grad(loss)(model, *args))
    return apply_updates(model, jax.tree.map(lambda g: -rate * g, grads), overwrites)


def squared_output(model, *args):
    return (model(*args) ** 2).sum().scalar()


def with_other_state(model):
    """The model as after some training, for tests that do not care which."""
    other = lambda node: node.with_scale(node.scale + 0.5) if is_state(node) else node
    return jax.tree.map(other, model, is_leaf=is_state)


def differs(a, b) -> bool:
    return not bool(eqx.tree_equal(a, b, typematch=True))


# --- Where layers are found -------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_layers_are_found_in_every_container():
    tree = {
        "block": made(lambda key: Block.init(key=key)),
        "list": [linear(1), linear(2)],
        "tuple": (linear(3), (linear(4),)),
        "dict": {"a": linear(5), "b": {"c": linear(6)}},
        "seq": blocks(7, container=hnn.BlockSeq),
        "stack": blocks(8),
        "mlp": made(lambda key: hnn.MLP.init(In, Out, 5, 1, key=key)),
        "other": (None, jnp.ones(3), hax.ones(In), jax.nn.relu, "text", 1.5, hnn.LayerNorm.init(In)),
    }
    fp8 = fp8_linear_layers(tree)
    expected = {"block.up", "block.down", "list.0", "list.1", "tuple.0", "tuple.1.0", "dict.a", "dict.b.c"}
    expected |= {f"seq.blocks.{i}.{name}" for i in range(3) for name in ("up", "down")}
    expected |= {"stack.stacked.up", "stack.stacked.down", "mlp.layers.0", "mlp.layers.1"}
    assert paths(fp8) == expected and paths(tree) == set()
    assert all(isinstance(fp8["dict"][key], type(tree["dict"][key])) for key in ("a", "b"))
    leaves = [jax.tree.leaves(restore_linear_layers(t)) for t in (tree, fp8)]
    assert all(a is b for a, b in zip(*leaves, strict=True)), "nothing is copied, and nothing else is touched"


def test_a_layer_by_itself():
    layer = fp8_linear_layers(linear())
    assert paths(layer) == {""}
    assert isinstance(layer, hnn.Linear) and isinstance(layer.dot_general, Fp8DotGeneral)
    assert layer(inputs()).axes == (Batch, Out)
    assert str(describe(layer)).count("(the module itself)") == 1


class RawWeights(eqx.Module):
    """Multiplies by an array of its own."""

    weight: jax.Array


@pytest.mark.parametrize(
    "module, named",
    [
        (None, "module is None, and has no layers"),
        (3, "module is of type int, and has no layers"),
        (
            {"norm": hnn.LayerNorm.init(In), "x": jnp.ones(2)},
            "dict contains no layer.*equinox.nn.Linear",
        ),
        (RawWeights(jnp.ones((4, 4))), "RawWeights contains.*LayerRule"),
        (eqx.nn.MLP, "module is the class MLP, but must be an instance"),
        (
            [eqx.nn.Conv1d(2, 2, 3, key=jax.random.key(0))],
            "contains no layer.*convolutions",
        ),
    ],
    ids=["None", "3", "norm", "raw", "class", "conv"],
)
def test_a_model_without_layers_is_an_error(module, named):
    with pytest.raises(ValueError, match=named):
        fp8_linear_layers(module)


def test_a_model_without_layers_can_be_described_and_restored():
    tree = {"norm": hnn.LayerNorm.init(In), "x": jnp.ones(2)}
    assert len(describe(tree)) == 0 and "0 of 0" in str(describe(tree))
    assert_same(restore_linear_layers(tree), tree)


# --- Stacks and ensembles ---------------------------------------------------------------------------------------------


class Inner(eqx.Module):
    """A stack in a stack."""

    inner: hnn.Stacked

    @staticmethod
    def init(*, key) -> "Inner":
        return Inner(hnn.Stacked.init(Layers, Block)(key=jax.random.split(key, Layers.size)))

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        return self.inner.fold(x)


class InnerSeq(eqx.Module):
    """A `BlockSeq` in a stack."""

    inner: hnn.BlockSeq

    @staticmethod
    def init(*, key) -> "InnerSeq":
        return InnerSeq(hnn.BlockSeq.init(Layers, Block)(key=jax.random.split(key, Layers.size)))

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        return self.inner.fold(x)


STACKS = {
    "Stacked": (lambda: blocks(), (Layers,), "stacked.up"),
    "Stacked of Stacked": (lambda: blocks(Block=Inner, Axis=Groups), (Groups, Layers), "stacked.inner.stacked.up"),
    "Stacked of BlockSeq": (lambda: blocks(Block=InnerSeq, Axis=Groups), (Groups,), "stacked.inner.blocks.1.up"),
    "BlockSeq of Stacked": (
        lambda: blocks(Block=Inner, Axis=Groups, container=hnn.BlockSeq),
        (Layers,),
        "blocks.1.inner.stacked.up",
    ),
}


@pytest.mark.parametrize("kind", list(STACKS))
def test_state_has_the_axes_of_the_stacks(kind):
    build, stack, path = STACKS[kind]
    model = fp8_linear_layers(build(), SHORT)
    row = describe(model)[path]
    assert row.stacked == " × ".join(f"{axis.name} {axis.size}" for axis in stack)
    op = layer_at(model, path).dot_general
    assert op.state.table.axes[: len(stack)] == stack
    assert op.scale("input").shape == tuple(axis.size for axis in stack)
    assert op.amax_history("input").shape == (*op.scale("input").shape, 4)


def layer_at(model, path: str):
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def unrolled(model) -> list:
    """The blocks of a stack at any depth, in the order in which they run."""
    match model:
        case hnn.Stacked():
            return [block for part in model.unstacked() for block in unrolled(part)]
        case hnn.BlockSeq():
            return [block for part in model.blocks for block in unrolled(part)]
        case Inner() | InnerSeq():
            return unrolled(model.inner)
    return [model]


@pytest.mark.more
@pytest.mark.parametrize("kind", ["Stacked", "Stacked of Stacked", "Stacked of BlockSeq"])
def test_stacked_layers_run_and_learn_as_unrolled_ones(kind):
    """Every layer in a stack has state of its own, that of the same layer outside the stack."""
    plain = STACKS[kind][0]()
    loop = lambda layers, x: (jax.tree.reduce(lambda x, layer: layer(x), layers, x, is_leaf=is_block) ** 2).sum()
    is_block = lambda node: isinstance(node, Block)
    stacked = trained(fp8_linear_layers(plain, SHORT), inputs(), loss=lambda m, x: (m.fold(x) ** 2).sum().scalar())
    listed = trained(fp8_linear_layers(unrolled(plain), SHORT), inputs(), loss=lambda m, x: loop(m, x).scalar())
    state = lambda block, name, operand: getattr(block, name).dot_general.amax_history(operand)
    expected = {
        (name, operand): jnp.stack([state(block, name, operand) for block in listed])
        for name in ("up", "down")
        for operand in OPERANDS
    }
    assert len(np.unique(expected["up", "input"][:, 0])) == len(listed)
    for (name, operand), histories in expected.items():
        actual = jnp.concatenate([jnp.atleast_2d(state(b, name, operand)) for b in stacked_blocks(stacked)])
        # A scan's body and unrolled code are fused differently: the last bits of what reaches a layer may differ.
        np.testing.assert_allclose(actual, histories, rtol=16 * EPS)


def stacked_blocks(model) -> list:
    """The blocks of a model with stacks, their state reshaped to one leading axis."""
    match model:
        case hnn.BlockSeq():
            return [block for part in model.blocks for block in stacked_blocks(part)]
        case Inner() | InnerSeq():
            return stacked_blocks(model.inner)
        case hnn.Stacked() if isinstance(model.stacked, InnerSeq):
            # Groups first, then the layers of each.
            parts = stacked_blocks(model.stacked)
            return [jax.tree.map(lambda x: x[i], part) for i in range(Groups.size) for part in parts]  # noqa: B023
        case hnn.Stacked():
            return [jax.tree.map(flatten_stack(model.stacked), block) for block in stacked_blocks(model.stacked)]
    return [model]


def flatten_stack(inner):
    """Two stack axes to one; one stays."""
    return (lambda x: x.reshape(-1, *x.shape[2:])) if isinstance(inner, Inner) else (lambda x: x)


class EquinoxModel(eqx.Module):
    """Equinox style: one example at a time, mapped over the batch."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first, self.second = eqx.nn.Linear(8, 5, key=keys[0]), eqx.nn.Linear(5, 6, use_bias=False, key=keys[1])

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def test_equinox_layers():
    model = made(EquinoxModel)
    fp8 = fp8_linear_layers(model, SHORT)
    assert paths(fp8) == {"first", "second"} and isinstance(fp8.first, eqx.nn.Linear)
    x = jax.random.normal(jax.random.key(1), (16, 8))
    fp8 = trained(fp8, x, loss=lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2), rate=0.0)
    assert sqnr(jax.vmap(model)(x), jax.vmap(fp8)(x)) > 20
    assert fp8.first.dot_general.amax_history("input")[0] == jnp.max(jnp.abs(x))
    assert_same(restore_linear_layers(fp8), model)


MEMBERS = 3


def members_of(make):
    """An ensemble, as `eqx.filter_vmap` makes it."""
    return made(lambda key: eqx.filter_vmap(make)(jax.random.split(key, MEMBERS)))


@pytest.mark.more
@pytest.mark.parametrize("make", [lambda key: linear_of(key), EquinoxModel], ids=["haliax", "equinox"])
def test_ensembles_of_filter_vmap(make):
    """Members run, and have state of their own: that of the same member alone."""
    plain = members_of(make)
    ensemble = fp8_linear_layers(plain, SHORT)
    assert_same(eqx.filter_vmap(lambda member: fp8_linear_layers(member, SHORT))(plain), ensemble)
    x = jax.random.normal(jax.random.key(1), (MEMBERS, 4, 8)) * jnp.array([1.0, 10.0, 0.1])[:, None, None]

    @eqx.filter_jit
    def apply(member, x):
        return member(hax.named(x, (Batch, In))).array if isinstance(member, hnn.Linear) else jax.vmap(member)(x)

    loss = lambda member, x: jnp.sum(apply(member, x) ** 2)
    together = trained(ensemble, x, loss=lambda ensemble, x: eqx.filter_vmap(loss)(ensemble, x).sum())
    out = eqx.filter_jit(eqx.filter_vmap(apply))(together, x)
    for i in range(MEMBERS):
        member = jax.tree.map(lambda x: x[i], plain)  # noqa: B023
        alone = trained(fp8_linear_layers(member, SHORT), x[i], loss=loss)
        states = [ops(tree) for tree in (together, alone)]
        for ours, theirs in zip(*states, strict=True):
            assert ours.scale("input").shape == (MEMBERS,)
            for operand in OPERANDS:
                np.testing.assert_allclose(ours.scale(operand)[i], theirs.scale(operand), rtol=1e-5)
                np.testing.assert_allclose(ours.amax_history(operand)[i], theirs.amax_history(operand), rtol=1e-5)
        assert sqnr(apply(alone, x[i]), out[i]) > 80


def linear_of(key) -> hnn.Linear:
    return hnn.Linear.init(In, Out, key=key)


def ops(tree) -> list[Fp8DotGeneral]:
    is_op = lambda node: isinstance(node, Fp8DotGeneral)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_op) if is_op(node)]


@pytest.mark.more
def test_ensembles_of_stacks():
    make = lambda key: hnn.Stacked.init(Layers, Block)(key=jax.random.split(key, Layers.size))
    ensemble = fp8_linear_layers(members_of(make), SHORT)
    assert ensemble.stacked.up.dot_general.scale("input").shape == (MEMBERS, Layers.size)
    x = jnp.ones((MEMBERS, 4, 8))
    run = eqx.filter_jit(eqx.filter_vmap(lambda member, x: member.fold(hax.named(x, (Batch, In))).array))
    # Scales of 1 suit operands of magnitude 1.
    assert sqnr(run(restore_linear_layers(ensemble), x), run(ensemble, x)) > 20


def test_layers_mapped_by_haliax():
    """`hax.vmap` names the axis of the members; one state serves them all, as one product computes them."""
    Members = hax.Axis("members", MEMBERS)
    layer = made(lambda key: hax.vmap(linear_of, Members)(key=jax.random.split(key, MEMBERS)))
    layer = fp8_linear_layers(layer, SHORT)
    x = inputs(axes=(Members, Batch, In))
    call = lambda layer, x: hax.vmap(lambda layer, x: layer(x), Members)(layer, x)
    new = trained(layer, x, loss=lambda layer, x: call(layer, x).sum().scalar(), rate=0.0, steps=1)
    assert call(new, x).resolve_axis("members") == Members
    assert new.dot_general.amax_history("input")[0] == np.max(np.abs(x.array))
    assert new.dot_general.amax_history("kernel")[0] == np.max(np.abs(layer.weight.array))


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    "build, axes, depth",
    [
        (lambda key: hnn.MLP.init(In, Out, 32, 2, key=key), (Batch, In), 3),
        (lambda key: Attention.init(key=key), (Batch, Attention.Position, In), 2),
    ],
    ids=["MLP", "attention"],
)
def test_outputs_are_close_to_high_precision(build, axes, depth):
    model, x = made(build), inputs(axes=axes)
    fp8 = fp8_linear_layers(model)
    assert len(paths(fp8)) == len(describe(model)) > 2
    warm = trained(fp8, x, rate=0.0)
    assert_same(restore_linear_layers(warm), model)
    # 28 dB for one product (each operand rounds by 1/16 at most, 31.5 dB); errors of products in a row at worst add up.
    run = eqx.filter_jit(lambda model, x: model(x))
    exact, out = run(model, x), run(warm, x)
    assert out.axes == exact.axes and out.dtype == exact.dtype
    assert sqnr(exact, out) >= 28 - 20 * np.log10(depth)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(jnp.float16)], ids=str)
def test_compute_dtype(dtype):
    """Haliax asks for the dtype that operands promote to; before that the product is rounded to the compute dtype."""
    layer = fp8_linear_layers(linear(use_bias=False), Fp8Config(compute_dtype=dtype))
    out = layer(inputs())
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out.array, out.array.astype(dtype).astype(jnp.float32))
    assert np.any(fp8_linear_layers(linear(use_bias=False))(inputs()).array != out.array)
    grads = eqx.filter_grad(lambda layer: layer(inputs()).sum().scalar())(layer)
    assert grads.weight.dtype == jnp.float32
    np.testing.assert_array_equal(grads.weight.array, grads.weight.array.astype(dtype).astype(jnp.float32))
    again = fp8_linear_layers(layer, Fp8Config(compute_dtype=jnp.dtype(dtype)))
    assert again.dot_general is layer.dot_general


# --- Under JAX's transformations --------------------------------------------------------------------------------------


def test_conversion_under_jit_and_on_shapes():
    init_blocks = lambda: hnn.Stacked.init(Layers, Block)(key=jax.random.split(jax.random.key(0), Layers.size))
    convert = lambda model: fp8_linear_layers(model, SHORT)
    plain_shapes = eqx.filter_eval_shape(lambda: {"head": linear_of(jax.random.key(0)), "stack": init_blocks()})
    model = {"head": linear(1), "stack": blocks()}
    expected = convert(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected)
    assert_same(jax.jit(convert)(model), expected)
    assert_same(eqx.filter_jit(convert)(model), expected)
    for abstract in (
        jax.eval_shape(convert, model),
        eqx.filter_eval_shape(lambda: convert({"head": linear_of(jax.random.key(0)), "stack": init_blocks()})),
        eqx.filter_eval_shape(convert, plain_shapes),
        convert(plain_shapes),
    ):
        assert jax.tree.structure(abstract) == jax.tree.structure(shapes)
        assert jax.tree.leaves(abstract) == jax.tree.leaves(shapes)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(convert(plain_shapes)))
    # A model without numbers has no amaxes to wait for.
    lines = [line for line in str(describe(expected)).splitlines() if NO_AMAX not in line]
    assert str(describe(convert(plain_shapes))).splitlines() == lines
    assert jax.tree.leaves(restore_linear_layers(convert(plain_shapes))) == jax.tree.leaves(plain_shapes)


# --- Targets ----------------------------------------------------------------------------------------------------------

Vocab = hax.Axis("vocab", 12)


@functools.cache
def selectable():
    """Twelve layers in a list, so that some numbers begin with others."""
    return {"layers": [linear(i) for i in range(12)], "stack": blocks(), "head": linear(99, Out=Vocab)}


LAYERS = {f"layers.{i}" for i in range(12)}
STACK = {"stack.stacked.up", "stack.stacked.down"}


def repr_without_addresses(value):
    """Processes that share the tests have to name them alike: sets in one order, functions without addresses."""
    return str(sorted(value)) if isinstance(value, set) else re.sub(r" at 0x\w+", "", str(value))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "targets, expected",
    [
        (["head", "layers.11", re.compile(".*up")], {"head", "layers.11", "stack.stacked.up"}),
        ("up", {"stack.stacked.up"}),
        (None, LAYERS | STACK | {"head"}),
        ("stack.stacked.up", {"stack.stacked.up"}),
        ("head", {"head"}),
        ("layers.1", {"layers.1"}),
        ("1", {"layers.1"}),
        ("layers.*", LAYERS),
        ("layers.[0-2]", {"layers.0", "layers.1", "layers.2"}),
        ("layers.1?", {"layers.10", "layers.11", "layers.1"}),  # a glob of ten and eleven, and a regex of one
        (r"layers\.(1|2)", {"layers.1", "layers.2"}),
        (r".*\.(up|down)", STACK),
        (re.compile(r"layers\.\d\d"), {"layers.10", "layers.11"}),
        (re.compile("layers"), None),
        (lambda path, layer: layer.Out == Vocab, {"head"}),
        (("up", lambda path, layer: path == "layers.3"), {"stack.stacked.up", "layers.3"}),
        ("*", LAYERS | STACK | {"head"}),
    ],
    ids=repr_without_addresses,
)
def test_targets(targets, expected):
    model = selectable()
    if expected is None:
        with pytest.raises(ValueError, match="selects no layer"):
            fp8_linear_layers(model, Fp8Config(targets=targets))
        return
    assert paths(fp8_linear_layers(model, Fp8Config(targets=targets))) == expected
    everything = LAYERS | STACK | {"head"}
    if targets is not None and expected != everything:
        assert paths(fp8_linear_layers(model, Fp8Config(exclude=targets))) == everything - expected


def test_a_class_selects_its_layers():
    model = {"haliax": linear(), "equinox": eqx.nn.Linear(8, 8, key=jax.random.key(0))}
    assert paths(fp8_linear_layers(model, targets=eqx.nn.Linear)) == {"equinox"}
    assert paths(fp8_linear_layers(model, exclude=(eqx.nn.Linear,))) == {"haliax"}
    with pytest.raises(ValueError, match="targets=.*MLP.* selects no layer; the nearest are: "):
        fp8_linear_layers(model, targets=eqx.nn.MLP)


def test_exclude_wins_over_targets_and_overrides():
    config = Fp8Config(targets="layers.*", exclude=["layers.1", "2"], overrides={"layers.2": DelayedScaling(8)})
    assert paths(fp8_linear_layers(selectable(), config)) == LAYERS - {"layers.1", "layers.2"}


def test_overrides():
    e4m3 = Recipe.of(DelayedScaling(amax_history_length=7), backward=E4M3)
    config = Fp8Config(
        targets="layers.*",
        recipe=DelayedScaling(amax_history_length=5),
        overrides={"layers.1": None, "layers.1?": DelayedScaling(amax_history_length=6), "head": e4m3, "up": None},
    )
    model = fp8_linear_layers(selectable(), config)
    # The first that fits wins: layers.1 is left alone, though the second pattern fits it too.
    assert paths(model) == (LAYERS - {"layers.1"}) | {"head"}
    length = lambda layer: layer.dot_general.recipe.input.scaling.amax_history_length
    assert [length(model["layers"][i]) for i in (0, 2, 9, 10, 11)] == [5, 5, 5, 6, 6]
    assert model["head"].dot_general.recipe == e4m3
    assert model["head"].dot_general.amax_history("kernel").shape == (7,)
    reasons = describe(model, config=config)
    assert reasons["layers.1"].reason == "left alone by the override 'layers.1'"
    assert reasons["stack.stacked.down"].reason == "not among the targets"


def test_recipes_by_name():
    config = Fp8Config(recipe="delayed", overrides={"head": "DelayedScaling"})
    expected = fp8_linear_layers(selectable(), Fp8Config(recipe=Recipe.of(DelayedScaling())))
    assert_same(fp8_linear_layers(selectable(), config), expected)


def test_history_length_of_the_configuration_holds_for_every_recipe():
    config = Fp8Config(amax_history_length=3, overrides={"head": DelayedScaling(amax_history_length=9, margin=1)})
    model = fp8_linear_layers({"head": linear(), "body": linear(1)}, config)
    assert [op.amax_history("input").shape for op in ops(model)] == [(3,), (3,)]
    assert model["head"].dot_general.recipe.input.scaling.margin == 1
    assert ops(fp8_linear_layers(linear()))[0].amax_history("input").shape == (1024,)


def test_fields_of_the_configuration_as_keywords():
    model = selectable()
    options = dict(recipe="rowwise", exclude="head", overrides={"up": "current"}, compute_dtype=jnp.bfloat16)
    by_keywords, by_config = fp8_linear_layers(model, **options), fp8_linear_layers(model, Fp8Config(**options))
    assert str(describe(by_keywords)) == str(describe(by_config)) and "RowwiseScaling" in str(describe(by_keywords))
    assert_same(by_keywords, by_config)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"exclude": eqx.nn.Linear(8, 8, key=jax.random.key(0))},
            "exclude holds a layer of class Linear; give its path",
        ),
        ({"targets": [eqx.nn.Linear(8, 8, key=jax.random.key(0))]}, "targets holds a layer of class Linear; give its"),
        (
            {"config": SHORT, "exclude": "head"},
            r"config was given together with.*dataclasses.replace\(config",
        ),
    ],
    ids=["layer", "layers", "both"],
)
def test_keywords_that_hold_layers_or_come_with_a_configuration(options, message):
    with pytest.raises(ValueError, match=message):
        fp8_linear_layers(linear(), **options)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "static", "mxfp8"])
def test_a_history_length_without_a_history_is_an_error(recipe):
    with pytest.raises(ValueError, match="amax_history_length=16 has no.*recipe='delayed'"):
        Fp8Config(recipe=recipe, amax_history_length=16)
    mixed = Fp8Config(recipe=recipe, amax_history_length=16, overrides={"head": "delayed"})
    assert mixed.resolve("delayed").input.scaling.amax_history_length == 16


def test_layers_of_flax_are_named_with_what_fits_them():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"this flax\.nnx\.Linear contains.*nnx\.Linear\(dot_general=Fp8DotGeneral"):
        fp8_linear_layers(layer)
    op = haliax_fp8.Fp8DotGeneral.init("current")
    fp8 = nnx.Linear(8, 8, rngs=nnx.Rngs(0), dot_general=op)
    x = jax.random.normal(jax.random.key(0), (4, 8))
    np.testing.assert_array_equal(fp8(x), op(x, layer.kernel[...], (((1,), (0,)), ((), ()))))


@pytest.mark.parametrize("argument", ["targets", "exclude", "overrides"])
@pytest.mark.parametrize(
    "pattern, named",
    [
        ("hed", "head"),
        ("layer.3", r"layers\.3"),
        ("stack.up", r"stack\.stacked\.up"),
        ("upp", r"stack\.stacked\.up"),
        ("transformer.h.0", r"layers\.0.*15 in all"),
        (re.compile("head."), r"layers\.0|head"),
        (lambda path, layer: False, r"layers\.0|head"),
    ],
    ids=["hed", "layer.3", "stack.up", "upp", "far", "regex", "predicate"],
)
def test_a_pattern_that_selects_nothing_names_the_nearest(argument, pattern, named):
    model = selectable()
    before = jax.tree.leaves(model)
    patterns = {pattern: None} if argument == "overrides" else ["head", pattern]
    with pytest.raises(ValueError, match=f"{argument}=.*({named})"):
        fp8_linear_layers(model, Fp8Config(**{argument: patterns}))
    assert all(a is b for a, b in zip(before, jax.tree.leaves(model), strict=True)) and not paths(model)


def test_a_pattern_that_names_a_branch_is_told_how_to_select_what_is_beneath():
    with pytest.raises(ValueError, match=r"targets='layers' selects no.*; 'layers\.\*' selects"):
        fp8_linear_layers(selectable(), targets=["layers"])


def test_a_target_in_a_model_without_layers():
    with pytest.raises(ValueError, match="targets='up' selects nothing: the model has no layer"):
        fp8_linear_layers({"x": jnp.ones(2)}, Fp8Config(targets="up"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"recipe": "delayd"}, "recipe='delayd' is unknown; the nearest are .*'delayed'"),
        ({"recipe": 8}, "recipe=8 is not a recipe; use a name such as 'delayed'"),
        ({"recipe": None}, "recipe=None is not a recipe"),
        ({"recipe": DelayedScaling}, "recipe is the class DelayedScaling; call it"),
        ({"overrides": {"head": 8}}, r"overrides\['head'\]=8 is not a recipe"),
        ({"overrides": {"head": "delayd"}}, "recipe='delayd' is unknown"),
        ({"amax_history_length": 0}, "amax_history_length=0 must be at least 1"),
        ({"amax_history_length": -3}, "amax_history_length=-3 must be at least 1"),
        ({"amax_history_length": True}, "amax_history_length=True .*must be an integer"),
        ({"amax_history_length": 1.5}, "amax_history_length=1.5 .*must be an integer"),
        ({"compute_dtype": jnp.int8}, "compute_dtype=.*int8.* is not a floating dtype"),
        ({"compute_dtype": "float17"}, "compute_dtype=float17 is not a floating dtype"),
        ({"compute_dtype": jnp.float8_e4m3fn}, "compute_dtype=.*float8_e4m3fn.* is not a floating dtype"),
        ({"targets": 3}, "targets=3|targets holds 3"),
        ({"targets": ["head", 3]}, "targets holds 3; give the last part of a path"),
        ({"exclude": [None]}, "exclude holds None"),
        ({"overrides": {3: None}}, "overrides holds 3"),
        ({"targets": ""}, "targets holds an empty string"),
        ({"emulate": "yes"}, "emulate='yes' of Fp8Config must be True or False"),
        ({"rules": (eqx.nn.Linear,)}, "rules=.* must be a tuple of LayerRule instances"),
        ({"rules": (haliax_fp8.layers.EquinoxLinear,)}, "rules=.* must be a tuple of LayerRule instances"),
        ({"rules": haliax_fp8.layers.EquinoxLinear()}, "rules=.* must be a tuple of LayerRule instances"),
        ({"kernel_residual": "keep"}, "kernel_residual='keep' is not a"),
        ({"exclude": haliax_fp8.layers.FasterOn("h100", tokens=1)}, "exclude holds FasterOn"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind(arguments, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        Fp8Config(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"amax_history_length": 0},
        {"amax_history_length": 2.0},
        {"margin": 0.5},
        {"margin": 18},
        {"margin": 100},
        {"margin": -18},
        {"margin": -200},
        {"power_of_two": "yes"},
    ],
)
def test_arguments_of_delayed_scaling(arguments):
    (name,) = arguments
    with unchecked(), pytest.raises(ValueError, match=f"{name}="):
        DelayedScaling(**arguments)


def integer_weights():
    layer = linear()
    return dataclasses.replace(layer, weight=layer.weight.astype(jnp.int8))


@pytest.mark.smoke
def test_layers_that_cannot_be_converted():
    """Asked for by name, an error; otherwise a line in the table."""
    model = {"good": linear(), "bad": integer_weights()}
    for config in (
        Fp8Config(targets=["bad", "good"]),
        Fp8Config(targets="*"),
        Fp8Config(overrides={"bad": SHORT.recipe}),
    ):
        with pytest.raises(ValueError, match="bad, which cannot be converted: its weight has dtype int8"):
            fp8_linear_layers(model, config)
    fp8 = fp8_linear_layers(model)
    assert paths(fp8) == {"good"} and fp8["bad"] is model["bad"]
    assert describe(fp8)["bad"].reason == "its weight has dtype int8, which is not floating-point"
    assert paths(fp8_linear_layers(model, Fp8Config(targets="good"))) == {"good"}


def test_a_dot_general_of_ones_own_is_not_replaced():
    class Mine(eqx.Module):
        def __call__(self, *args, **kwargs):
            return jax.lax.dot_general(*args, **kwargs)

    model = {"mine": linear(dot_general=Mine()), "plain": linear()}
    fp8 = fp8_linear_layers(model)
    assert paths(fp8) == {"plain"} and fp8["mine"] is model["mine"]
    assert describe(fp8)["mine"].reason == "its dot_general is already a Mine"


# --- Twice, and back --------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_converting_twice_keeps_the_state():
    first = fp8_linear_layers({"stack": blocks(), "head": linear()}, SHORT)
    model = trained(first, inputs(), loss=stack_loss)
    assert differs([op.state for op in ops(model)], [op.state for op in ops(first)])
    again = fp8_linear_layers(model, SHORT)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True))
    assert jax.tree.structure(again) == jax.tree.structure(model)


@pytest.mark.parametrize(
    "config",
    [
        Fp8Config(amax_history_length=5),
        Fp8Config(amax_history_length=4, recipe=DelayedScaling(margin=1)),
        Fp8Config(amax_history_length=4, recipe=Recipe.of(DelayedScaling(), backward=E4M3)),
        Fp8Config(amax_history_length=4, compute_dtype=jnp.float16),
    ],
    ids=["length", "margin", "format", "compute dtype"],
)
def test_another_recipe_starts_anew(config):
    model = with_other_state(fp8_linear_layers(linear(), SHORT))
    again = fp8_linear_layers(model, config)
    assert_same(again, fp8_linear_layers(restore_linear_layers(model), config))
    assert again.weight is model.weight
    assert np.all(again.dot_general.scale("input") == 1) and not np.any(again.dot_general.amax_history("input"))


def test_converting_more_layers_keeps_the_first_ones():
    model = {"a": linear(), "b": linear(1)}
    first = with_other_state(fp8_linear_layers(model, Fp8Config(targets="a")))
    second = fp8_linear_layers(first, Fp8Config(targets="b"))
    described = describe(second)
    assert all(row.recipe for row in described) and second["a"].dot_general is first["a"].dot_general
    # Until its first step, the new one is not told from a layer that no loss calls.
    assert paths(second) == {"a"} and described.summary.endswith("1 without an amax yet")


@pytest.mark.parametrize(
    "build",
    [
        lambda: linear(),
        lambda: {"stack": blocks(), "seq": blocks(container=hnn.BlockSeq), "mlp": made(EquinoxModel)},
        lambda: members_of(lambda key: hnn.MLP.init(In, Out, 5, 1, key=key)),
        lambda: [integer_weights(), linear(Out=()), linear(In=(In, Hidden), Out=(Out, Layers), out_first=False)],
    ],
    ids=["layer", "stacks", "ensemble", "shapes"],
)
def test_restoring_is_the_inverse(build):
    model = build()
    fp8 = fp8_linear_layers(model)
    assert paths(fp8) and differs(fp8, model)
    assert_same(restore_linear_layers(fp8), model)
    assert_same(restore_linear_layers(model), model)
    assert jax.tree.structure(restore_linear_layers(fp8)) == jax.tree.structure(model)


# --- Sharing ----------------------------------------------------------------------------------------------------------


class Tied(eqx.Module):
    """An embedding matrix that is the kernel of a layer too."""

    embedding: hax.NamedArray
    head: hnn.Linear

    @staticmethod
    def init(seed: int) -> "Tied":
        return Tied(hax.random.normal(jax.random.key(seed), (Out, In)), linear(seed, use_bias=False))


@pytest.mark.parametrize(
    "where, get",
    [
        (lambda m: m.head.weight, lambda m: m.embedding),
        (lambda m: m.head.weight.array, lambda m: m.embedding.array),
    ],
    ids=["named array", "array"],
)
def test_a_weight_tied_to_an_array(where, get):
    shared = eqx.nn.Shared(Tied.init(0), where, get)
    fp8 = fp8_linear_layers(shared, SHORT)
    assert paths(fp8) == {"pytree.head"}
    assert_same(restore_linear_layers(fp8), shared)
    new = trained(fp8, inputs(), loss=lambda shared, x: shared().head(x).sum().scalar(), steps=1, rate=0.0)
    op = new().head.dot_general
    assert op.amax_history("kernel")[0] == np.max(np.abs(shared.pytree.embedding.array))
    assert op.amax_history("input")[0] == np.max(np.abs(inputs().array))
    np.testing.assert_allclose(new().head(inputs()).array, shared().head(inputs()).array, atol=0.2)


@pytest.mark.more
def test_a_layer_tied_to_a_layer():
    """One layer, one state: a gradient with exact maxima sees both uses."""
    shared = eqx.nn.Shared((linear(Out=In.alias("mid")), linear(Out=In.alias("mid"))), lambda m: m[1], lambda m: m[0])
    fp8 = fp8_linear_layers(shared, SHORT)
    assert paths(fp8) == {"pytree.0"} and len(ops(fp8)) == 1
    first, second = (jax.tree.leaves(layer) for layer in fp8())
    assert all(a is b for a, b in zip(first, second, strict=True))

    def loss(shared, x):
        first, second = shared()
        return (first(x) + second(3.0 * x)).sum().scalar()

    grads = haliax_fp8.filter_grad(loss)(fp8, inputs())
    np.testing.assert_allclose(ops(grads)[0].amax_history("input")[0], 3 * np.max(np.abs(inputs().array)), rtol=2 * EPS)


def test_kernels_of_two_layers_tied():
    """One kernel, two layers: each has state of its own, as each has inputs of its own."""
    tied = eqx.nn.Shared((linear(0), linear(1)), lambda m: m[1].weight, lambda m: m[0].weight)
    fp8 = fp8_linear_layers(tied, SHORT)
    assert paths(fp8) == {"pytree.0", "pytree.1"}
    loss = lambda shared, x: (shared()[0](x) + shared()[1](5.0 * x)).sum().scalar()
    new = trained(fp8, inputs(), loss=loss, steps=1, rate=0.0)
    first, second = (op.amax_history("input")[0] for op in ops(new))
    np.testing.assert_allclose(second, 5 * first, rtol=2 * EPS)
    assert len({float(op.amax_history("kernel")[0]) for op in ops(new)}) == 1


def test_the_same_object_at_two_paths_stays_one():
    layer = linear()
    fp8 = fp8_linear_layers([layer, {"again": layer}, linear()])
    assert fp8[0] is fp8[1]["again"] and fp8[0] is not fp8[2]


def test_the_same_object_with_two_recipes():
    layer = linear()
    config = Fp8Config(overrides={"b": DelayedScaling(amax_history_length=4)}, exclude="c")
    fp8 = fp8_linear_layers({"a": layer, "b": layer, "c": layer}, config)
    assert [op.recipe.input.scaling.amax_history_length for op in ops(fp8)] == [1024, 4]
    assert fp8["c"] is layer


# --- describe ---------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_describe():
    model = {"stack": blocks(), "head": linear(Out=(Out, Hidden)), "bad": integer_weights(), "mlp": [linear()]}
    config = Fp8Config(exclude="mlp.0", overrides={"down": Recipe.of(DelayedScaling(8), backward=E4M3)})
    table = describe(fp8_linear_layers(model, config), config=config)
    rows = {row.path: (row.shape, row.stacked, row.recipe, row.reason, row.is_fp8) for row in table}
    assert rows == {
        "bad": ("input 8 -> output 6", "", None, "its weight has dtype int8, which is not floating-point", False),
        "head": ("input 8 -> output 6 × hidden 10", "", "DelayedScaling E4M3/E4M3/E5M2", "", True),
        "mlp.0": ("input 8 -> output 6", "", None, "excluded by 'mlp.0'", False),
        "stack.stacked.down": ("hidden 10 -> input 8", "layers 3", "DelayedScaling E4M3/E4M3/E4M3", "", True),
        "stack.stacked.up": ("input 8 -> hidden 10", "layers 3", "DelayedScaling E4M3/E4M3/E5M2", "", True),
    }
    assert (len(table), table.fp8_count, table["head"].path) == (5, 3, "head")
    with pytest.raises(KeyError, match="no linear layer at 'tail'.*head"):
        table["tail"]
    text = str(table)
    assert text.startswith("3 of 5 linear layers in FP8")
    assert (
        table["head"].scales in " ".join(text.split()) and "the kernel's to 7 significant bits" in table["head"].scales
    )
    assert table["bad"].scales == "" == describe({"a": fp8_linear_layers(linear(), recipe="rowwise")})["a"].scales
    # What layers of one stack have in common is said once.
    assert "stack.stacked" in text and text.count("layers 3") == 1
    for path, (shape, _, recipe, reason, _) in rows.items():
        name = path.removeprefix("stack.stacked.")
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        words = (recipe or f"high precision: {reason}").split()
        assert shape.split(" -> ")[0] in line and words[0] in line  # what is longer is wrapped
    assert max(map(len, text.splitlines())) <= 80


NO_AMAX = "No amax recorded yet"


def test_scales_that_no_step_has_written_are_a_line_below_the_table():
    """Of delayed scaling before calibration, or after steps that kept the state of the first; of no other recipe."""
    x = jnp.ones((4, 8))
    loss = lambda model, x: jnp.mean(jax.vmap(model["up"])(x) ** 2)
    plain = {name: eqx.nn.Linear(8, 8, key=jax.random.key(0)) for name in ("up", "unused")}
    model = fp8_linear_layers(plain, amax_history_length=4)
    (line,) = [line for line in str(describe(model)).splitlines() if NO_AMAX in line]
    assert line == f"{NO_AMAX}: calibrate, or write the state back with apply_updates" and len(line) <= 80
    assert NO_AMAX not in str(describe(eqx.filter_eval_shape(lambda: model)))
    for recipe in ("current", "rowwise", "mxfp8", "static"):
        assert NO_AMAX not in str(describe(fp8_linear_layers(plain, recipe=recipe)))
    calibrated = haliax_fp8.calibrate(model, loss, [x])
    described = describe(calibrated)
    assert described.fp8_count == 1 and f"{NO_AMAX} in unused: describe(" in str(described)
    assert described["up"].uncalled is None and described["unused"].uncalled.startswith("no amax yet")
    only = fp8_linear_layers(plain, amax_history_length=4, exclude="unused")
    assert NO_AMAX in str(describe(only))
    overwrites, gradients = haliax_fp8.partition_for_grad_overwrite(haliax_fp8.filter_grad(loss)(only, x))
    forgotten = eqx.apply_updates(only, gradients)
    assert NO_AMAX in str(describe(forgotten))
    assert NO_AMAX not in str(describe(haliax_fp8.apply_updates(only, gradients, overwrites)))


def test_the_table_says_what_layers_have_in_common_once(monkeypatch):
    """Siblings that differ in name and shape alone share a row, and so do those of a list; other kinds do not count."""
    conv = eqx.nn.Conv1d(2, 2, 1, key=jax.random.key(0))
    attention = {name: linear() for name in ("query", "key", "value")}
    model = fp8_linear_layers({"conv": conv, "attention": attention, "list": [linear() for _ in range(3)]})
    table = describe(model)
    assert (len(table), table.count, table.fp8_count) == (7, 7, 6)
    monkeypatch.setenv("COLUMNS", "120")
    lines = [line.split("  ")[1].strip() for line in str(table).splitlines() if "->" in line]
    assert lines == ["attention: key, query, value", "list.0-2"]
    assert "6 of 7 linear layers in FP8: DelayedScaling E4M3/E4M3/E5M2" in str(table).splitlines()[0]


def test_layers_of_equal_blocks_share_rows(monkeypatch):
    """Of blocks in a list, whatever lies between; one that differs has a row of its own. The data has every layer."""
    monkeypatch.setenv("COLUMNS", "80")
    attention = lambda: {name: linear() for name in ("query", "key", "value")}
    # Between the layers of a block there is a stack.
    model = [{"attention": attention(), "experts": blocks(), "up": linear()} for _ in range(12)]
    table = describe(fp8_linear_layers({"blocks": model}, exclude=["blocks.3.attention.*", "blocks.11.up"]))
    assert len(table) == 12 * 6 and table["blocks.7.up"].is_fp8 and not table["blocks.11.up"].is_fp8
    assert re.findall(r"^  (blocks\.[^ :\n]*)", str(table), re.MULTILINE) == [
        "blocks.0-2,4-11.attention",
        "blocks.0-11.experts.stacked",
        "blocks.0-10.up",
        "blocks.3.attention",
        "blocks.11.up",
    ]


def test_describe_before_conversion_says_what_would_become_of_each_layer():
    model = {"a": linear(), "b": linear()}
    assert {row.reason for row in describe(model)} == {"not converted"}
    assert describe(model, config=Fp8Config(targets="a"))["b"].reason == "not among the targets"


# --- What the converted model still is --------------------------------------------------------------------------------


def test_serialisation_of_leaves():
    model = with_other_state(fp8_linear_layers({"stack": blocks(), "head": linear()}, SHORT))
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, model)
    buffer.seek(0)
    template = fp8_linear_layers({"stack": blocks(5), "head": linear(6)}, SHORT)
    assert differs(template, model)
    assert_same(eqx.tree_deserialise_leaves(buffer, template), model)


def stack_loss(model, x):
    return (model["head"](model["stack"].fold(x)) ** 2).sum().scalar()


@pytest.mark.parametrize("torch_style", [False, True])
def test_state_dicts_are_those_of_the_plain_model(torch_style):
    """Checkpoints do not know of FP8: the same keys, and each model loads what the other saved."""
    to = state_dicts.to_torch_compatible_state_dict if torch_style else state_dicts.to_state_dict
    load = state_dicts.from_torch_compatible_state_dict if torch_style else state_dicts.from_state_dict
    build = lambda seed: {"stack": blocks(seed), "seq": blocks(seed, container=hnn.BlockSeq), "head": linear(seed)}
    plain, other = build(0), build(1)
    fp8 = with_other_state(fp8_linear_layers(other, SHORT))
    saved = to(plain)
    assert set(to(fp8)) == set(saved)
    for key, value in to(fp8).items():
        np.testing.assert_array_equal(value, to(other)[key])
    # Arrays of JAX: Haliax shards those of NumPy over a mesh, and there is none.
    loaded = load(fp8, jax.tree.map(jnp.asarray, saved))
    assert_same(restore_linear_layers(loaded), plain)
    assert_same([op.state for op in ops(loaded)], [op.state for op in ops(fp8)])
    assert_same(load(plain, jax.tree.map(jnp.asarray, to(fp8))), other)


def test_the_layers_are_still_haliaxs():
    layer = fp8_linear_layers(linear(), SHORT)
    assert isinstance(layer, hnn.Linear) and type(layer) is hnn.Linear
    assert (layer.In, layer.Out) == (In, Out)
    for text in (repr(layer), eqx.tree_pformat(layer)):
        assert "Fp8DotGeneral(DelayedScaling E4M3/E4M3/E5M2)" in text and len(text) < 1000
    other = eqx.tree_at(lambda layer: layer.weight, layer, 2 * layer.weight)
    np.testing.assert_array_equal(other.weight.array, 2 * layer.weight.array)
    assert all(map(np.array_equal, jax.tree.leaves(other.dot_general), jax.tree.leaves(layer.dot_general)))
    (state,) = [x for x in jax.tree.leaves(layer, is_leaf=is_state) if is_state(x)]
    fresh = eqx.tree_at(lambda layer: layer.dot_general.state, with_other_state(layer), state)
    assert np.all(fresh.dot_general.scale("kernel") == 1)


def test_a_model_on_a_mesh():
    """Sharded by Haliax's rules: state is small and replicated, and a step gives the numbers of one device."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    model = fp8_linear_layers(linear(), SHORT)
    expected = trained(model, inputs())
    with hax.axis_mapping({"batch": "data"}), jax.set_mesh(mesh):
        actual = trained(hax.shard(model), hax.shard(inputs()))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(float64(a), float64(e), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("targets", [[], ()])
def test_targets_that_select_nothing_by_being_empty_are_refused(targets):
    with pytest.raises(ValueError, match="selects no layer; None converts every layer"):
        Fp8Config(targets=targets)


# --- Weights that are not arrays --------------------------------------------------------------------------------------


class Masked(eqx.Module):
    """A node that computes a weight, as FlowJAX's masked layers have it: what is trained, and what is multiplied."""

    weight: jax.Array
    mask: jax.Array

    def unwrap(self) -> jax.Array:
        return self.weight * self.mask


def unwrapped(model):
    is_masked = lambda node: isinstance(node, Masked)
    return jax.tree.map(lambda node: node.unwrap() if is_masked(node) else node, model, is_leaf=is_masked)


def masked_layers(count: int, **kwargs):
    make = lambda key: eqx.nn.Linear(4, 4, key=key, **kwargs)
    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), count))
    mask = jnp.tril(jnp.ones((4, 4)))
    return eqx.tree_at(lambda layer: layer.weight, layers, Masked(layers.weight, jnp.broadcast_to(mask, (count, 4, 4))))


@pytest.mark.more
def test_stacked_weights_behind_a_wrapper_have_a_state_each():
    """Converted while wrapped, and scanned: what the same weights as arrays give, state and gradients too."""
    x = jax.random.normal(jax.random.key(1), (8, 4))

    def loss(layers):
        arrays, static = eqx.partition(layers, eqx.is_array)
        out, _ = jax.lax.scan(lambda h, layer: (jax.vmap(eqx.combine(layer, static))(h), None), x, arrays)
        return jnp.mean(out**2)

    wrapped = fp8_linear_layers(masked_layers(3), SHORT)
    plain = fp8_linear_layers(unwrapped(masked_layers(3)), SHORT)
    expected, gradient = haliax_fp8.filter_grad(loss)(plain), haliax_fp8.filter_grad(loss)(unwrapped(wrapped))
    assert_same(gradient, expected)
    assert gradient.dot_general.amax_history("input").shape == (3, 4)
    of_wrapped = haliax_fp8.filter_grad(lambda layers: loss(unwrapped(layers)))(wrapped)
    assert_same(of_wrapped.dot_general, expected.dot_general)
    np.testing.assert_array_equal(of_wrapped.weight.weight, expected.weight * masked_layers(3).weight.mask)


def test_wrapped_weights_of_unknown_shape_are_refused_by_name():
    layers = {"masked": masked_layers(3, use_bias=False), "other": eqx.nn.Linear(4, 4, key=jax.random.key(0))}
    assert "weight is a Masked that holds stacked arrays" in describe(fp8_linear_layers(layers))["masked"].reason
    with pytest.raises(ValueError, match="masked, which cannot be.*is an array"):
        fp8_linear_layers(layers, targets="masked")
    single = eqx.tree_at(lambda layer: layer.weight, layers["other"], Masked(jnp.ones((4, 4)), jnp.ones((4, 4))))
    assert fp8_linear_layers(single, SHORT).dot_general.amax_history("input").shape == (4,)


def test_a_model_remembers_why_layers_were_left_alone():
    model = eqx.nn.MLP(8, 8, 16, 3, key=jax.random.key(0))
    reasons = lambda model: {row.path: row.reason for row in describe(model) if row.reason}
    excluded, targeted = fp8_linear_layers(model, exclude="layers.3"), fp8_linear_layers(model, targets="layers.[012]")
    assert reasons(excluded) == {"layers.3": "excluded by 'layers.3'"}
    assert reasons(targeted) == {"layers.3": "not among the targets"}
    assert reasons(fp8_linear_layers(targeted, exclude="layers.[03]"))["layers.3"] == "excluded by 'layers.[03]'"
    # What it remembers makes no other program of it, and nothing that does not fit together.
    assert jax.tree.structure(excluded) == jax.tree.structure(targeted)
    assert reasons(restore_linear_layers(excluded)) == {f"layers.{i}": "not converted" for i in range(4)}
