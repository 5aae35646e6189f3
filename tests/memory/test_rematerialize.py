"""`rematerialize`: the same values, state and trees; inputs alone are kept; without a change to the model's code."""

import pickle

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.state_dict as state_dicts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, unchecked

import haliax_fp8 as fp8
from haliax_fp8.memory import (
    BetweenLayers,
    WholeCall,
    default_rematerialization,
    rematerialize,
    rematerialized,
    restore_rematerialized,
)


Batch, Embed, Inner, Blocks = hax.make_axes(batch=4, embed=32, inner=64, blocks=2)


class GLU(eqx.Module):
    """A gated feed-forward layer that no registry knows."""

    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        gate, up = (hnn.Linear.init(Embed, Inner, key=key, use_bias=False) for key in keys[:2])
        return GLU(gate, up, hnn.Linear.init(Inner, Embed, key=keys[2], use_bias=True))

    def __call__(self, x):
        return self.down(hnn.silu(self.gate(x)) * self.up(x))


class Block(eqx.Module):
    norm: hnn.RmsNorm
    mlp: GLU

    @staticmethod
    def init(*, key):
        return Block(hnn.RmsNorm.init(Embed, use_bias=False), GLU.init(key=key))

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


class BlockInCode(eqx.Module):
    """The same with `rematerialized` in its code."""

    norm: hnn.RmsNorm
    mlp: GLU

    def __call__(self, x):
        swiglu = rematerialized(lambda gate, up: hnn.silu(gate) * up)
        h = rematerialized(self.norm)(x)
        return x + self.mlp.down(swiglu(self.mlp.gate(h), self.mlp.up(h)))


RULES = (BetweenLayers((GLU,), before=("gate", "up"), after=("down",), gated=True), *default_rematerialization)
X = hax.random.normal(jax.random.key(1), (Batch, Embed))


def stacked(checkpointing=False):
    return hnn.Stacked.init(Blocks, Block, gradient_checkpointing=checkpointing)(
        key=jax.random.split(jax.random.key(0), Blocks.size)
    )


def fold(model, x):
    return (model.fold(x) ** 2).mean().scalar()


def call(model, x):
    return (model(x) ** 2).mean().scalar()


def over_examples(model, x):
    """As Equinox's models are called, one example at a time."""
    return jax.vmap(lambda row: (model(hax.named(row, (Embed,))) ** 2).mean().scalar())(x.array).mean()


CASES = {
    "one block": (lambda: Block.init(key=jax.random.key(0)), call),
    "vmap": (lambda: Block.init(key=jax.random.key(0)), over_examples),
    "scan": (stacked, fold),
    "scan with checkpointing": (lambda: stacked(True), fold),
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "gradient"),
    [*((name, fp8.filter_value_and_grad) for name in CASES), ("one block", eqx.filter_value_and_grad)],
    ids=[*CASES, "one block, eqx.filter_grad"],
)
def test_values_gradients_and_state_are_the_same(name, gradient):
    make, loss = CASES[name]
    model = fp8.fp8_linear_layers(make())
    changed = rematerialize(model, rules=RULES)
    expected, got = (gradient(loss)(m, X) for m in (model, changed))
    # Operation by operation; the programs of two scans may round differently, where XLA fuses differently.
    exact = not name.startswith("scan")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)


@pytest.mark.parametrize("convert", [fp8.fp8_linear_layers, lambda m: fp8.fp8_linear_layers(m, recipe="current")])
def test_compiled_bfloat16_is_the_same_where_xla_rounds_as_written(convert):
    """By default XLA omits a rounding of `silu` in one of the two programs, so FP8 data and gradients differ."""
    mlp = eqx.nn.MLP(32, 32, 64, 2, jax.nn.silu, key=jax.random.key(0))
    model = convert(jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, mlp))
    x = X.array.astype(jnp.bfloat16)

    def compiled(model):
        arrays, static = eqx.partition(model, eqx.is_array)
        loss = lambda model: (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean()
        step = lambda arrays: eqx.filter(fp8.filter_value_and_grad(loss)(eqx.combine(arrays, static)), eqx.is_array)
        return jax.tree.leaves(jax.jit(step, compiler_options={"xla_allow_excess_precision": False})(arrays))

    for a, b in zip(compiled(rematerialize(model)), compiled(model), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def jaxpr_of(loss, model, x):
    arrays, static = eqx.partition((model, x), eqx.is_array)
    step = lambda arrays: eqx.filter(fp8.filter_grad(loss)(*eqx.combine(arrays, static)), eqx.is_array)
    return jax.make_jaxpr(step)(arrays)


def stacked_by_scan(model):
    """What the first scan of a gradient hands to the second, by dtype and shape."""
    (forward, *_) = [e for e in jaxpr_of(fold, model, X).eqns if e.primitive.name == "scan"]
    return sorted((v.aval.dtype.name, v.aval.shape) for v in forward.outvars if v.aval.ndim > 2)


@pytest.mark.more
@pytest.mark.parametrize("convert", [lambda model: model, fp8.fp8_linear_layers], ids=["plain", "converted"])
def test_a_scan_keeps_what_it_keeps_with_rematerialized_in_the_code(convert):
    model = convert(stacked())
    in_code = lambda block: BlockInCode(block.norm, block.mlp)
    is_block = lambda node: isinstance(node, Block)
    by_hand = jax.tree.map(lambda node: in_code(node) if is_block(node) else node, model, is_leaf=is_block)
    expected = stacked_by_scan(by_hand)
    assert stacked_by_scan(rematerialize(model, rules=RULES)) == expected
    assert len(stacked_by_scan(model)) > len(expected)


def test_gated_activations_in_float32_round_once():
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), GLU.init(key=jax.random.key(0)))
    x = X.astype(jnp.bfloat16)
    changed = rematerialize(model, rules=RULES, in_float32=True)
    gate, up = model.gate(x), model.up(x)
    once = (hnn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(jnp.bfloat16)
    out = changed(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(out.array), np.float32(model.down(once).array))
    assert (np.float32(out.array) != np.float32(model(x).array)).any()


@pytest.mark.parametrize(("device", "dtype"), [("h100", "float32"), ("h200", None), ("b200", None), ("cpu", None)])
def test_the_device_decides_on_float32(device, dtype):
    found = fp8.describe(rematerialize(stacked(), device=device, rules=RULES)).rematerialized
    assert found == {"stacked.norm": "RmsNorm", "stacked.mlp": f"GLU in {dtype}" if dtype else "GLU"}


# --- Trees ------------------------------------------------------------------------------------------------------------


def test_modules_are_what_they_were_to_everybody_else():
    model = stacked()
    changed = rematerialize(model, rules=RULES)
    assert isinstance(changed.stacked.norm, hnn.RmsNorm) and isinstance(changed.stacked.mlp, GLU)
    assert changed.stacked.norm.axis == Embed and changed.stacked.norm.weight.array is model.stacked.norm.weight.array
    paths = [
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(m)] for m in (model, changed)
    ]
    assert paths[0] == paths[1]
    # Another call makes the same tree, so that nothing is compiled again.
    assert jax.tree.structure(changed) == jax.tree.structure(rematerialize(model, rules=RULES))


def test_it_is_reversible_and_changes_nothing_twice():
    model = fp8.fp8_linear_layers(stacked())
    changed = rematerialize(model, rules=RULES)
    assert_same(restore_rematerialized(changed), model)
    assert_same(rematerialize(changed, rules=RULES), changed)
    # The order of both conversions does not matter.
    assert_same(fp8.fp8_linear_layers(rematerialize(stacked(), rules=RULES)), changed)
    in_float32 = rematerialize(changed, rules=RULES, in_float32=True)
    assert "GLU in float32" in fp8.describe(in_float32).rematerialized.values()
    assert_same(restore_rematerialized(model), model)


def test_state_dicts_and_files_stay_the_same(tmp_path):
    model = stacked()
    changed = rematerialize(model, rules=RULES)
    dicts = [state_dicts.to_state_dict(m) for m in (model, changed)]
    assert dicts[0].keys() == dicts[1].keys()
    other = jax.tree.map(lambda x: x + 1, changed)
    loaded = state_dicts.from_state_dict(other, dicts[0])
    assert_same(loaded, changed)
    eqx.tree_serialise_leaves(tmp_path / "plain.eqx", model)
    assert_same(eqx.tree_deserialise_leaves(tmp_path / "plain.eqx", other), changed)
    assert_same(pickle.loads(pickle.dumps(changed)), changed)


@pytest.mark.more
def test_an_optimizers_state_carries_over():
    model = fp8.fp8_linear_layers(stacked())
    step = fp8.TrainStep(fold, optax.adam(1e-3))
    opt_state, changed = step.init(model), rematerialize(model, rules=RULES)
    carried = fp8.transfer_optimizer_state(opt_state, model, changed)
    assert jax.tree.structure(carried) == jax.tree.structure(step.init(changed))
    with jax.numpy_dtype_promotion("standard"):  # For optax.
        after, _, metrics = step(changed, carried, X)
    assert np.isfinite(metrics["loss"]) and isinstance(after.stacked.norm, type(changed.stacked.norm))


# --- Other modules ----------------------------------------------------------------------------------------------------


def equinox_mlp():
    return eqx.nn.MLP(32, 32, 64, 2, jax.nn.gelu, key=jax.random.key(0))


def haliax_mlp():
    return hnn.MLP.init(Embed, Embed, Inner.alias("mlp"), 2, hnn.gelu, key=jax.random.key(0))


NORMS = {
    "LayerNorm": lambda: eqx.nn.LayerNorm(32),
    "RMSNorm": lambda: eqx.nn.RMSNorm(32),
    "GroupNorm": lambda: eqx.nn.GroupNorm(4, 32),
    "Haliax LayerNorm": lambda: hnn.LayerNorm.init(Embed),
    "Haliax RmsNorm": lambda: hnn.RmsNorm.init(Embed),
    "MLP": equinox_mlp,
    "Haliax MLP": haliax_mlp,
}


@pytest.mark.parametrize("name", NORMS)
def test_every_class_computes_what_it_did(name):
    module = NORMS[name]()
    x = X["batch", 0] if name.startswith("Haliax") else X["batch", 0].array

    def out(module, x):
        y = module(x)
        return y.array if isinstance(y, hax.NamedArray) else y

    def gradients(module):
        return eqx.filter_grad(lambda args: (out(*args) ** 3).sum())((module, x))

    changed = rematerialize(module)
    np.testing.assert_array_equal(out(changed, x), out(module, x))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(gradients(changed)), jax.tree.leaves(gradients(module)))

    def kept(module):
        arrays, static = eqx.partition(module, eqx.is_array)
        pullback = jax.vjp(lambda arrays, x: out(eqx.combine(arrays, static), x), arrays, x)[1]
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert kept(changed) < kept(module)


def test_layers_that_are_called_several_times():
    """What is between them keeps its inputs each time."""

    class Twice(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(jnp.tanh(self.inner(jnp.sin(self.inner(x)))))

    module, x = Twice(eqx.nn.Linear(8, 8, key=jax.random.key(0))), jnp.arange(8.0)
    changed = rematerialize(module, rules=(BetweenLayers((Twice,), before=("inner",), after=("inner",)),))
    gradients = [eqx.filter_grad(lambda m: (m(x) ** 2).sum())(m) for m in (changed, module)]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, gradients))


def test_modules_in_modules():
    class Outer(eqx.Module):
        norm: hnn.RmsNorm
        glu: GLU

        def __call__(self, x):
            return self.glu(self.norm(x))

    rules = (WholeCall((Outer,)), *RULES)
    model = rematerialize(Outer(hnn.RmsNorm.init(Embed), GLU.init(key=jax.random.key(0))), rules=rules)
    assert fp8.describe(model).rematerialized == {"": "Outer", "norm": "RmsNorm", "glu": "GLU"}
    assert "Rematerialized: 1 Outer, 1 RmsNorm, 1 GLU" in str(fp8.describe(model))
    assert fp8.describe(restore_rematerialized(model)).rematerialized == {}


# --- What is refused --------------------------------------------------------------------------------------------------


class MapsItsLayers(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def maps_its_layers():
    layers = [eqx.nn.Linear(8, 8, key=jax.random.key(0)) for _ in range(2)]
    rules = (BetweenLayers((MapsItsLayers,), before=("up",), after=("down",)),)
    return rematerialize(MapsItsLayers(*layers), rules=rules)(jnp.ones((2, 8)))


REFUSED = {
    "nothing to change": (lambda: rematerialize(eqx.nn.Linear(2, 2, key=jax.random.key(0))), "no module that rules"),
    "a class without the layers": (
        lambda: rematerialize(stacked(), rules=(BetweenLayers((GLU,), before=("fc",), after=("down",)),)),
        "stacked.mlp, a GLU, which cannot be changed: it has no attribute fc",
    ),
    "one name instead of a tuple": (lambda: BetweenLayers((GLU,), before="gate", after=("down",)), "before='gate' of"),
    "no layers": (lambda: BetweenLayers((GLU,), before=("gate",), after=()), r"after=\(\) of BetweenLayers"),
    "a class for a rule": (lambda: rematerialize(stacked(), rules=(GLU,)), "rules=.*of rematerialize is not a"),
    "a device that is none": (lambda: rematerialize(stacked(), device="h1000"), "device='h1000' is unknown"),
    "a dtype for a choice": (lambda: rematerialize(stacked(), in_float32=jnp.float32), "in_float32=.* must be True or"),
    "layers mapped one by one": (maps_its_layers, "MapsItsLayers maps its layers one by one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name):
    refused, message = REFUSED[name]
    with unchecked(), pytest.raises(ValueError, match=message):
        refused()
