"""`describe` and `quantization_statistics` say what runs: layers that are never called, arrays, heads, FP4."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import unchecked

from haliax_fp8 import (
    Fp8Config,
    Fp8DotGeneral,
    Fp8Einsum,
    TrainStep,
    apply_updates,
    calibrate,
    describe,
    filter_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    quantization_statistics,
)


KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[7], (8, 16))
READS, UNUSED = "never called: the model multiplies by its weight itself; exclude it", "never called: the loss does not"


class Model(eqx.Module):
    """Calls `up`, reads the weight of `down` and leaves `spare` alone."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    spare: eqx.nn.Linear

    def __init__(self):
        sizes = (16, 32), (32, 16), (16, 16)
        self.up, self.down, self.spare = (eqx.nn.Linear(*s, key=key) for s, key in zip(sizes, KEYS[:3], strict=True))

    def __call__(self, x):
        return self.down.weight @ jax.nn.gelu(self.up(x))


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def trained(microbatches=1):
    step = TrainStep(loss, optax.sgd(0.1), microbatches=microbatches)
    model = fp8_linear_layers(Model())
    state = step.init(model)
    for _ in range(2):
        model, state, _ = step(model, state, X)
    return model


def by_hand():
    model = fp8_linear_layers(Model())
    overwrites, grads = partition_for_grad_overwrite(eqx.filter_jit(filter_grad(loss))(model, X))
    return apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads), overwrites)


# A history does not tell why a layer is not called, nor do recipes without state have one: a traced loss does.
BY_HISTORY = {
    "steps": trained,
    "microbatches": lambda: trained(microbatches=2),
    "a loop by hand": by_hand,
    "calibrate": lambda: calibrate(fp8_linear_layers(Model()), loss, [X]),
    "step.calibrate": lambda: TrainStep(loss, optax.sgd(0.1)).calibrate(fp8_linear_layers(Model()), X),
    "a file": lambda: jax.tree.unflatten(jax.tree.structure(fp8_linear_layers(Model())), jax.tree.leaves(trained())),
}
BY_LOSS = {
    "a loss and a batch": lambda: describe(fp8_linear_layers(Model()), loss, X),
    "a loss and shapes": lambda: describe(
        eqx.filter_eval_shape(lambda: fp8_linear_layers(Model())),
        loss,
        eqx.filter_eval_shape(lambda: X),
    ),
    "a recipe without state": lambda: describe(fp8_linear_layers(Model(), recipe="rowwise"), loss, X),
    "random rounding": lambda: describe(fp8_linear_layers(Model(), recipe="nvfp4"), loss, X),
}


@pytest.mark.parametrize("name", BY_HISTORY)
def test_layers_without_an_amax(name):
    model = BY_HISTORY[name]()
    described = describe(model)
    assert [row.is_fp8 for row in described] == [True, False, False] and described["up"].uncalled is None
    assert described.summary.startswith("FP8: 1 of 3 linear") and described.summary.endswith("2 without an amax yet")
    text = " ".join(str(described).split())
    assert "down 32 -> 16 no amax yet: not called, or with zeros alone" in text
    assert "No amax recorded yet in down, spare: describe(model, loss_fn, *batch) shows whether" in text
    # Asked with the loss, it says why.
    reasons = [row.uncalled for row in describe(model, loss, X)]
    assert reasons[:2] == ["", READS] and reasons[2].startswith(UNUSED)


@pytest.mark.parametrize("name", BY_LOSS)
def test_layers_that_the_loss_never_calls(name):
    described = BY_LOSS[name]()
    assert described["up"].uncalled == "" and described["up"].is_fp8
    assert described["down"].uncalled == READS and described["spare"].uncalled.startswith(UNUSED)
    assert (described.fp8_count, described.count) == (1, 3) and not described["down"].is_fp8
    assert str(described).startswith("1 of 3 linear layers in FP") and described.summary[5:].startswith("1 of 3 linear")
    text = " ".join(str(described).split())
    assert "down 32 -> 16 never called: the model multiplies by its weight itself; exclude it" in text
    if name != "a loss and a batch":
        assert "No amax" not in text
    assert "never called" in " ".join(str(described["down"]).split())


def test_one_layer_of_a_stack_that_is_called():
    """The layer has run in FP8; that another of its stack has not is another row than one that was never called."""
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(KEYS[:3])
    first = lambda model, x: jnp.mean(jax.vmap(jax.tree.map(lambda w: jnp.unstack(w)[0], model["stack"]))(x) ** 2)
    model = fp8_linear_layers({"stack": stack, "spare": eqx.nn.Linear(16, 16, key=KEYS[3])})
    step = TrainStep(first, optax.sgd(0.1))
    described = describe(step(model, step.init(model), X)[0])
    assert described["stack"].is_fp8 and described["stack"].unrecorded == ("input", "kernel")
    assert "no amax of input and kernel yet" in " ".join(str(described).split())
    assert not described["spare"].is_fp8 and "1 without an amax yet" in described.summary


def test_a_layer_of_haliax_whose_weight_the_model_reads():
    In, Out = hax.make_axes(In=16, Out=32)
    layers = {name: hnn.Linear.init(In, Out, key=KEYS[0]) for name in ("called", "read")}
    layers["stack"] = hnn.Stacked.init(hax.Axis("layers", 2), hnn.Linear)(
        In, In.alias("Mid"), key=jax.random.split(KEYS[1], 2)
    )

    def of_named(model, x):
        return (model["called"](x) + hax.dot(x, model["read"].weight, axis=In)).sum().scalar()

    x = hax.named(X, ("batch", "In"))
    described = describe(fp8_linear_layers(layers), of_named, x)
    reasons = {row.path: row.uncalled for row in described}
    assert reasons["called"] == "" and reasons["read"] == READS and reasons["stack.stacked"].startswith(UNUSED)
    back = lambda layer, x: layer(x).rename({"Mid": "In"})
    folded = lambda model, x: model["stack"].fold_via(back)(x).sum().scalar()
    assert describe(fp8_linear_layers(layers), folded, x)["stack.stacked"].uncalled == ""


@pytest.mark.parametrize("masked", [lambda x: 0.0 * x, lambda x: jnp.where(jnp.arange(16) < 0, x, 0.0)])
def test_a_layer_that_is_called_with_zeros_is_another_row(masked):
    step = TrainStep(lambda model, x: loss(model, masked(x)), optax.sgd(0.1))
    model = fp8_linear_layers(Model(), exclude="spare")
    model, *_ = step(model, step.init(model), X)
    described = describe(model)
    assert described["up"].is_fp8 and described["up"].unrecorded == ("input",)
    assert "up 16 -> 32 FP8; no amax of input yet: zero, masked or not finite" in " ".join(str(described).split())
    assert described.fp8_count == 1


def test_a_layer_that_another_loss_calls_runs():
    other = lambda model, x: jnp.mean(jax.vmap(model.spare)(x) ** 2)
    model = calibrate(trained(), other, [X])
    assert {row.path: row.is_fp8 for row in describe(model)} == {"up": True, "down": False, "spare": True}
    assert {row.path: row.is_fp8 for row in describe(model, other, X)}["up"] is False


def test_statistics_name_the_layers_that_are_never_called():
    for recipe in ("delayed", "rowwise"):
        model = fp8_linear_layers(Model(), recipe=recipe)
        for measure in (quantization_statistics, eqx.filter_jit(quantization_statistics)):
            text = " ".join(str(measure(model, loss, X)).split())
            assert "down, spare: never called; describe(model, loss_fn, *batch) says why" in text
            assert "nan" not in text


BAD = {
    "a model": ((Model(), X), "loss_fn is of type Model, but must be a function"),
    "an array": ((X,), "loss_fn is of type .*, but must be a function"),
    "a configuration": ((Fp8Config(),), r"loss_fn is of type Fp8Config, .* describe\(model, config=\.\.\., device="),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments(name):
    arguments, message = BAD[name]
    with unchecked(), pytest.raises(ValueError, match=message):
        describe(fp8_linear_layers(Model()), *arguments)


# --- What is in no layer ----------------------------------------------------------------------------------------------


class Attention(eqx.Module):
    in_proj: jax.Array
    scale: jax.Array
    mask: jax.Array
    out_proj: eqx.nn.Linear

    def __init__(self, key):
        self.in_proj, self.scale, self.mask = jnp.ones((96, 32)), jnp.ones(32), jnp.ones((4, 4), bool)
        self.out_proj = eqx.nn.Linear(32, 32, key=key)


class Multiplies(eqx.Module):
    weight: jax.Array
    op: Fp8DotGeneral | Fp8Einsum


ARRAYS = "{} to no known layer; products with {} stay in high precision: {}"


def test_arrays_that_belong_to_no_layer_are_one_line():
    blocks = [{"attn": Attention(key), "fc": eqx.nn.Linear(32, 8, key=key)} for key in KEYS[:2]]
    model = {"blocks": blocks, "words": eqx.nn.Embedding(8, 32, key=KEYS[0]), "positions": jnp.ones((4, 32))}
    text = " ".join(str(describe(fp8_linear_layers(model))).split())
    assert ARRAYS.format("3 arrays belong", "them", "blocks.0-1.attn.in_proj, positions") in text
    text = " ".join(str(describe(fp8_linear_layers(model | {"blocks": blocks[:1], "positions": jnp.ones(4)}))).split())
    assert ARRAYS.format("1 array belongs", "it", "blocks.0.attn.in_proj") in text


def test_axes_of_stacks_and_ensembles_do_not_count():
    """Nor what Equinox's and Haliax's own classes hold, or a module with an op for it."""
    assert describe(eqx.filter_vmap(Attention)(KEYS)).arrays == ("in_proj",)
    In, Layers = hax.make_axes(In=16, layers=3)

    class Block(eqx.Module):
        linear: hnn.Linear
        scale: hax.NamedArray
        table: hax.NamedArray

        @staticmethod
        def init(*, key):
            return Block(hnn.Linear.init(In, In.alias("Out"), key=key), hax.ones(In), hax.ones((In, In.alias("Out"))))

    stack = hnn.Stacked.init(Layers, Block)(key=jax.random.split(KEYS[0], 3))
    assert describe(fp8_linear_layers(stack)).arrays == ("stacked.table",)
    others = {
        "multiplies": Multiplies(jnp.ones((16, 16)), Fp8DotGeneral.init("current")),
        "einsum": Multiplies(jnp.ones((16, 16)), Fp8Einsum.init()),
        "norm": eqx.nn.LayerNorm((4, 16)),
        "linear": eqx.nn.Linear(16, 16, key=KEYS[0]),
    }
    assert describe(fp8_linear_layers(others)).arrays == ()


# --- Heads and formats ------------------------------------------------------------------------------------------------


HEAD = "The loss seems to read the output of {0}: such a layer is usually left in high precision, exclude={0!r}"


def linears(*names):
    return {name: eqx.nn.Linear(16, 16, key=KEYS[0]) for name in names}


HEADS = {
    "by name": (linears("body", "lm_head"), "lm_head"),
    "by name, not last": (linears("head", "layer"), "head"),
    "the last of an MLP": (eqx.nn.MLP(16, 16, 16, 2, key=KEYS[0]), "layers.2"),
    "the last of a list inside": ({"mlp": eqx.nn.MLP(16, 16, 16, 2, key=KEYS[0])}, ""),
    "the last block of a list": ([linears("up", "x_down"), linears("up", "x_down")], ""),
    "a layer alone": (linears("up"), ""),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_converted_head_is_remarked_on(name):
    model, head = HEADS[name]
    described = describe(fp8_linear_layers(model))
    assert described.head == head
    text = " ".join(str(described).split())
    assert HEAD.format(head) in text if head else "seems to read" not in text
    if head:
        assert describe(fp8_linear_layers(model, exclude=head)).head == ""
    assert describe(model).head == ""


def test_kernels_in_four_bits_are_fp4():
    model = linears("a", "b", "c", "d")
    every = describe(fp8_linear_layers(model, recipe="nvfp4"))
    assert str(every).startswith("4 of 4 linear layers in FP4: NVFP4Scaling") and every.summary.startswith(
        "FP4: 4 of 4"
    )
    some = describe(fp8_linear_layers(model, exclude="d", overrides={"a": "nvfp4"}))
    assert str(some).splitlines()[0] == "2 of 4 linear layers in FP8, 1 in FP4"
    assert some.summary.startswith("FP8: 2 of 4 linear layers, FP4: 1 of 4 linear layers, ")
    assert (some.fp8_count, some.fp4_count) == (3, 1) and some["a"].precision == "FP4"


def test_a_common_prefix_is_said_once_and_names_break_at_dots(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    block = lambda: {"self_attention": {"out_projection": linears("x")["x"]}, "feed_forward": linears("up", "x_down")}
    model = {"transformer": {"resblocks": [block(), block()]}, "head": linears("x")["x"]}
    text = str(describe(fp8_linear_layers(model)))
    assert text.count("transformer.resblocks.0-1") == 1
    lines = [line.split("  ")[1:] for line in text.splitlines()]
    assert ["", "feed_forward.up"] in [line[:2] for line in lines]
    monkeypatch.setenv("COLUMNS", "34")
    names = [line.strip().split(" ")[0] for line in str(describe(fp8_linear_layers(model))).splitlines()]
    assert "feed_forward" in names and ".up" in names
