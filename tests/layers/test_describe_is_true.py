"""What `describe` says of a model is what its program does, whatever made it; and what is no model is refused."""

import dataclasses
import logging
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import dot_generals

from haliax_fp8 import (
    Fp8DotGeneral,
    Fp8Einsum,
    Recipe,
    TrainStep,
    calibrate,
    describe,
    filter_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    trainable,
    with_rounding_keys,
)
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.huggingface import export_model, import_model
from haliax_fp8.models import add_lora
from haliax_fp8.recipes import E4M3, E5M2, CurrentScaling, HighPrecision, Quantization, by_name
from haliax_fp8.serving import quantize_for_inference


KEY = jax.random.key(0)
NARROW = {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}
MATRICES = (((1,), (0,)), ((), ()))


def products_in_fp8(model, x):
    """How many products of a model and its gradients read both operands in FP8, as traced."""
    arrays, static = eqx.partition((model, x), eqx.is_array)
    gradients = filter_grad(lambda both: jnp.sum(both[0](both[1]) ** 2), recompute_in_scans=False)
    products = dot_generals(lambda arrays: eqx.filter(gradients(eqx.combine(arrays, static)), eqx.is_array), arrays)
    return sum({v.aval.dtype for v in product.invars[:2]} <= NARROW for product in products)


# --- Products ---------------------------------------------------------------------------------------------------------


HIGH = Quantization(E4M3, HighPrecision())
NVFP4 = by_name("nvfp4")
RECIPES = {
    "current": (by_name("current"), "FP8 FP8 FP8"),
    "rowwise_fprop": (by_name("rowwise_fprop"), "FP8 high high"),
    "rowwise_wgrad_bf16": (by_name("rowwise_wgrad_bf16"), "FP8 FP8 high"),
    "mxfp8_fprop": (by_name("mxfp8_fprop"), "FP8 high high"),
    "dgrad in high precision": (
        dataclasses.replace(
            Recipe.of(CurrentScaling()),
            output_grad=HIGH,
            kernel_for_dgrad=HIGH,
            output_grad_for_wgrad=Quantization(E5M2, CurrentScaling()),
        ),
        "FP8 high FP8",
    ),
    "nvfp4": (NVFP4, "FP4 FP4 FP4"),
    "nvfp4 backward": (
        dataclasses.replace(NVFP4, input=HIGH, kernel=HIGH, kernel_for_dgrad=NVFP4.kernel),
        "high FP4 FP4",
    ),
    "mxfp4_mxfp8": (by_name("mxfp4_mxfp8"), "FP4 FP4 FP8"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_product_runs_in_what_is_said(name):
    """Known by its error: none in high precision, 2 to 8 % in FP8, more in FP4."""
    recipe, expected = RECIPES[name]
    x, w, g = (np.asarray(jax.random.normal(k, (128, 128)), np.float64) for k in jax.random.split(KEY, 3))
    op = with_rounding_keys(Fp8DotGeneral.init(recipe), KEY) if recipe.needs_key else Fp8DotGeneral.init(recipe)
    out, pullback = jax.vjp(lambda x, w: op(x, w, MATRICES), *(jnp.asarray(a, jnp.float32) for a in (x, w)))
    results = (out, *pullback(jnp.asarray(g, jnp.float32)))
    errors = [
        np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(results, (x @ w, g @ w.T, x.T @ g), strict=True)
    ]
    measured = ["high" if e < 1e-5 else "FP8" if 0.02 < e < 0.08 else "FP4" if e > 0.1 else e for e in errors]
    described = describe({"dot": op})
    assert measured == expected.split()
    assert [p.partition(" ")[0] for p in described["dot"].products.values()] == measured
    header = str(described).splitlines()[0]
    if len({*measured}) == 1:
        assert header.startswith(f"1 of 1 linear layers in {measured[0]}: {type(recipe.input.scaling).__name__} E")
    else:
        counts = [(measured.count(p), p) for p in ("FP8", "FP4", "high") if p in measured]
        said = ", ".join(f"{n} {'products ' * (not i)}in {p}" for i, (n, p) in enumerate(counts))
        assert header.startswith(f"1 of 1 linear layers with {said}")
        assert described.summary.startswith(f"{counts[0][1]}: 1 of 1 linear layers with {said}")


def test_formats_by_product():
    """Only where an operand has two, or a product is in high precision; the second operand of dgrad is the kernel."""
    texts = {name: str(recipe) for name, (recipe, _) in RECIPES.items()}
    assert texts["current"] == "CurrentScaling E4M3/E4M3/E5M2"
    assert texts["rowwise_fprop"] == "fprop RowwiseScaling E4M3/E4M3, dgrad/wgrad in high precision"
    assert texts["dgrad in high precision"] == (
        "fprop CurrentScaling E4M3/E4M3, dgrad in high precision, wgrad CurrentScaling E4M3/E5M2"
    )
    assert texts["nvfp4 backward"].startswith("fprop in high precision, dgrad/wgrad NVFP4Scaling E2M1/E2M1, wgrad rot")
    assert texts["mxfp4_mxfp8"] == "fprop/dgrad MXFP8Scaling E4M3/E2M1, wgrad MXFP8Scaling E4M3/E4M3"


def test_a_layer_whose_products_differ():
    model = eqx.nn.MLP(16, 16, 16, 1, key=KEY)
    described = describe(fp8_linear_layers(model, overrides={"layers.1": "current_fprop"}))
    assert str(described).startswith("2 of 2 linear layers with 4 products in FP8, 2 in high precision\n")
    assert described["layers.1"].precision == "fprop in FP8, dgrad/wgrad in high precision"
    assert (described["layers.0"].precision, described.fp8_count, described.fp4_count) == ("FP8", 2, 0)


# --- Modules of one's own ---------------------------------------------------------------------------------------------


class Projection(eqx.Module):
    weight: jax.Array
    dot: Fp8DotGeneral

    @staticmethod
    def init(key):
        return Projection(jax.random.normal(key, (16, 16)), Fp8DotGeneral.init())

    def __call__(self, x):
        return self.dot(x, self.weight, MATRICES)


class Several(eqx.Module):
    weights: list[jax.Array]
    ops: list[Fp8DotGeneral]

    def __call__(self, x):
        for weight, op in zip(self.weights, self.ops, strict=True):
            x = op(x, weight, MATRICES)
        return x


class Scores(eqx.Module):
    inner: Projection
    scores: Fp8Einsum

    def __call__(self, x):
        return self.scores("qd,kd->qk", self.inner(x), x)


class Members(eqx.Module):
    members: Projection

    def __call__(self, x):
        return eqx.filter_vmap(lambda member: member(x))(self.members)


LAYERS = hax.Axis("layers", 3)


class Blocks(eqx.Module):
    blocks: hnn.Stacked

    def __call__(self, x):
        return self.blocks.fold(x)


USER_OPS = {
    "a field": (lambda: Projection.init(KEY), ["dot"], 1),
    "a list": (lambda: Several([jnp.eye(16)] * 2, [Fp8DotGeneral.init("rowwise")] * 2), ["ops.0", "ops.1"], 2),
    "an einsum": (lambda: Scores(Projection.init(KEY), Fp8Einsum.init("current")), ["inner.dot", "scores"], 2),
    "an ensemble": (lambda: Members(eqx.filter_vmap(Projection.init)(jax.random.split(KEY, 3))), ["members.dot"], 1),
    "a stack": (
        lambda: Blocks(hnn.Stacked.init(LAYERS, Projection)(jax.random.split(KEY, 3))),
        ["blocks.stacked.dot"],
        1,
    ),
}


@pytest.mark.parametrize("name", USER_OPS)
def test_a_row_for_each_op_of_ones_own(name, caplog):
    make, paths, products = USER_OPS[name]
    model, x = make(), jax.random.normal(KEY, (16, 16))
    described = describe(model)
    assert [row.path for row in described] == paths and all(row.precision == "FP8" for row in described)
    assert described.fp8_count == described.count == products and products_in_fp8(model, x) == 3 * products
    # The op multiplies the module's own arrays.
    assert described.arrays == ()
    step = TrainStep(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(1e-3))
    with caplog.at_level(logging.INFO, "haliax_fp8"):
        state = step.init(model)
    assert f"FP8: {products} of {products} linear layers" in caplog.text
    model, *_ = step(model, state, x)
    assert all(row.recorded in (True, None) for row in describe(model))


def test_an_op_of_ones_own_that_the_loss_never_calls():
    model = Several([jnp.eye(16)] * 2, [Fp8DotGeneral.init(), Fp8DotGeneral.init()])
    loss = lambda model, x: jnp.sum(model.ops[0](x, model.weights[0], MATRICES) @ model.weights[1])
    described = describe(model, loss, jnp.ones((4, 16)))
    assert (
        described["ops.0"].uncalled == ""
        and described["ops.1"].uncalled == "never called: the loss does not use this layer"
    )
    assert (described.fp8_count, described.count) == (1, 2)


# --- Data and scales in place of a weight -----------------------------------------------------------------------------


def test_frozen_adapted_and_served_layers(tmp_path):
    """Stored in E4M3 by all; multiplied in it where inputs are quantized too."""
    plain = {"up": eqx.nn.Linear(64, 32, key=KEY), "head": eqx.nn.Linear(32, 8, key=KEY)}
    export_model(plain, tmp_path / "out", "FP8_DYNAMIC")
    frozen = import_model(tmp_path / "out", plain, weights="frozen")
    call = lambda model: dot_generals(lambda x: model(x), jnp.ones(64))
    for model, up in (
        (frozen, "up"),
        (Container(frozen), "layers.up"),
        (add_lora(Container(frozen), rank=2, key=KEY), "adapted.layers.up.base"),
    ):
        described = describe(model)
        row = described[up]
        assert (row.reason, row.stored, row.shape) == ("stored in E4M3, frozen", "E4M3", "64 -> 32")
        assert not row.is_fp8 and described.fp8_count == 0 and described.count in (2, 4)
        header = (
            f"0 of {described.count} linear layers in FP8; 1 stored in E4M3 and multiplied by inputs in high precision"
        )
        assert " ".join(str(described).split()).startswith(header) and described.summary.startswith("FP8: none")
    (product,) = call(frozen["up"])
    assert {v.aval.dtype for v in product.invars[:2]} == {jnp.dtype(jnp.float32)}
    for layout, narrow in (("FP8_DYNAMIC", True), ("W8A16", False)):
        served = quantize_for_inference(plain, layout, targets="up")
        row = describe(served)["up"]
        # One product for GPUs, and one for other devices.
        dtypes = {v.aval.dtype for product in call(served["up"]) for v in product.invars[:2]}
        assert (dtypes <= NARROW) == narrow == row.is_fp8
        assert row.stored == "E4M3" and row.products == ({"fprop": "FP8"} if narrow else {})
    assert row.reason == "stored in E4M3, for inference: W8A16, scales computed"


class Container(eqx.Module):
    layers: dict[str, eqx.Module]


# --- What is no model -------------------------------------------------------------------------------------------------


CONVERTED = fp8_linear_layers(eqx.nn.MLP(4, 4, 4, 1, key=KEY))


def loss_fn(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


class Train(NamedTuple):
    model: eqx.Module
    optimizer: tuple


def gradients():
    return partition_for_grad_overwrite(filter_grad(loss_fn)(CONVERTED, jnp.ones((2, 4))))[1]


def with_integers():
    tree = {"layer": eqx.nn.Linear(4, 4, key=KEY), "step": jnp.asarray(1)}
    return jax.grad(lambda tree: jnp.sum(tree["layer"].weight), allow_int=True)(tree)


def loaded(folder):
    save(folder / "model.safetensors", CONVERTED)
    return load_into(CONVERTED, folder / "model.safetensors")


def state_of(optimizer):
    return optimizer.init(trainable(CONVERTED))


NO_MODELS = {
    "Adam's state": (lambda folder: state_of(optax.adam(1e-3)), "is or holds an optimizer's state, ScaleByAdamState"),
    "a state of several": (
        lambda folder: state_of(optax.MultiSteps(optax.sgd(1e-3, momentum=0.9), 2)),
        "is or holds an optimizer's state, MultiStepsState",
    ),
    "a state without moments": (
        lambda folder: state_of(optax.sgd(1e-3)),
        "is or holds an optimizer's state, EmptyState",
    ),
    "a model and a state": (
        lambda folder: Train(CONVERTED, state_of(optax.adam(1e-3))),
        "is or holds an optimizer's state, ScaleByAdamState",
    ),
    "gradients": (lambda folder: gradients(), "is the gradient of a model, or a part of one, without its FP8 state"),
    "gradients of whole numbers": (lambda folder: with_integers(), "is the gradient of a model, or a part of one"),
    "a model and a report": (loaded, "is a tuple with a LoadReport, and the model is its first item"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_model(name, tmp_path):
    make, message = NO_MODELS[name]
    tree = make(tmp_path)
    step = TrainStep(loss_fn, optax.sgd(1e-3))
    calls = {"describe(model)": describe, "fp8_linear_layers(module)": fp8_linear_layers, "step.init(model)": step.init}
    for call, function in calls.items():
        with pytest.raises(ValueError) as caught:
            function(tree)
        argument, _, said = str(caught.value).partition(" ")
        assert argument == call.partition("(")[2][:-1] and said.startswith(message) and said.endswith(call)


# --- Reasons after a compiled step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
def test_a_model_keeps_its_reasons_in_a_step_that_another_model_compiled(donate):
    """One program for both, and a tree map over both: reasons are not part of a model's structure."""
    mlp = eqx.nn.MLP(4, 4, 4, 2, key=KEY)
    options = {
        "excluded by 'layers.0'": {"exclude": "layers.0"},
        "not among the targets": {"targets": ["layers.1", "layers.2"]},
    }
    count, x = 0, jnp.ones((2, 4))

    def counting(model, x):
        nonlocal count
        count += 1
        return loss_fn(model, x)

    step, traced = TrainStep(counting, optax.sgd(1e-3, momentum=0.9), donate=donate), []
    for reason, option in options.items():
        model = fp8_linear_layers(jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, mlp), **option)
        state = step.init(model)
        for _ in range(2):
            structure = jax.tree.structure(model)
            model, state, _ = step(model, state, x)
            assert describe(model)["layers.0"].reason == reason and jax.tree.structure(model) == structure
        assert describe(calibrate(model, loss_fn, [x]))["layers.0"].reason == reason
        assert describe(step.calibrate(model, x))["layers.0"].reason == reason
        traced.append(count)
    # The second model's calibration calls the loss; no step of it does.
    assert traced[0] > 0 and traced[1] == traced[0]
