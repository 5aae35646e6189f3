"""Wrong calls raise, with the argument or the remedy, whoever says it: Python, JAX, or a check after the exception.

What would run and compute something else has a check before, and a test where the rest of its subject is.
"""

import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import unchecked

import haliax_fp8 as fp8
from haliax_fp8 import memory, training


KEY = jax.random.key(0)
PLAIN = eqx.nn.MLP(8, 8, 8, 1, key=KEY)
MODEL = fp8.fp8_linear_layers(PLAIN, amax_history_length=4)
X, ADAM = jnp.ones((4, 8)), optax.adam(1e-3)


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def of_two(model, x, y):
    return loss(model, x + y)


def with_key(model, x, *, key):
    return loss(model, x)


def with_aux(model, x):
    return loss(model, x), {"a": 1}


def run(loss=loss, optimizer=ADAM, **choices):
    step = fp8.TrainStep(loss, optimizer, **choices)
    return step(MODEL, step.init(MODEL), X)


STEP = fp8.TrainStep(loss, ADAM)
STATE = STEP.init(MODEL)
OVERWRITES, REST = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(MODEL, X))
CALL = r"step\(model, opt_state, \*batch\)"
WRONG = {
    # What a step is made of.
    "loss and optimizer exchanged": (lambda: run(ADAM, loss), r"optimizer=<function loss .*TrainStep\(loss_fn, opt"),
    "no optimizer": (lambda: fp8.TrainStep(loss), "missing 1 required positional argument: 'optimizer'"),
    "None for it": (lambda: run(optimizer=None), r"optimizer=None .*optax\.adamw\(1e-3\)"),
    "a rate for it": (lambda: run(optimizer=1e-3), r"optimizer=0\.001 .*optax\.adamw\(1e-3\)"),
    "what makes one": (lambda: run(optimizer=optax.sgd), r"optimizer=<function sgd .*optax\.adamw\(1e-3\)"),
    "its class": (lambda: run(optimizer=optax.MultiSteps), r"MultiSteps'> .*optax\.adamw\(1e-3\)"),
    "a number as loss": (lambda: run(3.0), "'float' object is not callable"),
    "a model as loss": (lambda: run(MODEL), r"MLP.__call__\(\) takes 2 positional arguments but 3 were given"),
    **{
        f"{count!r} microbatches": (
            lambda count=count: run(microbatches=count),
            f"microbatches={count!r} (of .*integer|does not divide)",
        )
        for count in (0, -1, 1.5, "2", None)
    },
    "a name for a rounding": (lambda: run(parameter_rounding="up"), "parameter_rounding='up' .*Rounding.STOCHASTIC"),
    "a number as monitor": (lambda: run(monitor=100), r"monitor=100 .*every\(100\)"),
    "a name for a reduction": (lambda: run(reduce_gradients="data"), r'reduce_gradients=\'data\' .*ReduceOnce\(over="'),
    "how often": (lambda: run(quantize_kernels="twice"), "'twice' is not a valid KernelQuantization"),
    "no axis": (lambda: training.ReduceOnce(over=()), r"over=\(\) must be the name of a mesh axis"),
    "a number as axis": (lambda: training.ReduceOnce(over=3), "'int' object is not iterable"),
    # How it is called.
    "state and model exchanged": (lambda: STEP(STATE, MODEL, X), f"opt_state is a model, a MLP; .*{CALL}"),
    "no state": (lambda: STEP(MODEL, X), rf"opt_state is an array of shape \(4, 8\); .*{CALL}"),
    "the state last": (lambda: STEP(MODEL, X, STATE), f"opt_state is an array .*{CALL}"),
    "the batch first": (lambda: STEP(X, MODEL, STATE), f"model is an array .*{CALL}"),
    "None for the state": (
        lambda: STEP(MODEL, None, X),
        r"opt_state does not belong .*nothing at .*step\.init\(model\)",
    ),
    "no batch": (lambda: STEP(MODEL, STATE), r"loss\(\) missing 1 required positional argument: 'x'"),
    "no batch for calibrate": (lambda: STEP.calibrate(MODEL), r"loss\(\) missing 1 required positional argument: 'x'"),
    "two in one": (lambda: fp8.TrainStep(of_two, ADAM)(MODEL, STATE, (X, X)), "missing 1 .*argument: 'y'"),
    "one in one": (lambda: STEP(MODEL, STATE, (X, X)), rf"is a tuple; .*unpack it: {CALL}"),
    "too many": (lambda: STEP(MODEL, STATE, X, X), r"loss\(\) takes 2 positional arguments but 3 were given"),
    "no key": (lambda: run(with_key), "missing 1 required keyword-only argument: 'key'"),
    "a key of no use": (lambda: STEP(MODEL, STATE, X, loss_key=KEY), "unexpected keyword argument 'key'"),
    # What a loss returns.
    "aux": (lambda: run(with_aux), r"Gradient only defined for scalar-output functions\. Output was \(.*'a': 1"),
    "one for each example": (lambda: run(lambda model, x: jax.vmap(model)(x)[:, 0]), r"Output had shape: \(4,\)"),
    "named ones": (lambda: run(lambda model, x: hax.named(jax.vmap(model)(x), ("b", "o"))), "Output was NamedArray"),
    "no aux": (lambda: run(has_aux=True), "expected function with aux output to return a two-element tuple"),
    "aux to calibrate": (lambda: fp8.calibrate(MODEL, with_aux, [X]), "only defined for scalar-output functions"),
    # Functions of a loss.
    "None to differentiate": (lambda: fp8.filter_grad(None)(MODEL, X), "'NoneType' object is not callable"),
    "a model to differentiate": (lambda: fp8.filter_grad(MODEL)(loss, X), r"MLP.__call__\(\) takes 2 positional"),
    "a loss to calibrate": (lambda: fp8.calibrate(loss, MODEL, [X]), r"model is a function.*calibrate\(model, loss_fn"),
    "a list as batch": (lambda: fp8.calibrate(MODEL, of_two, [[X, X]]), "missing 1 .*argument: 'y'"),
    "a loss to measure": (lambda: fp8.quantization_statistics(loss, MODEL, X), "model is a function"),
    "a tuple to measure": (lambda: fp8.quantization_statistics(MODEL, of_two, (X, X)), "missing 1 .*argument: 'y'"),
    "an array as loss": (lambda: fp8.describe(MODEL, X, X), "loss_fn is of type .*, but must be a function"),
    "no metrics": (lambda: training.require_finite_step(X[0, 0]), "has no attribute 'items'"),
    # Trees that do not belong together.
    "a part to accumulate": (lambda: fp8.accumulate_gradients(OVERWRITES, REST), "OpState.* different type"),
    "gradients of the plain model": (
        lambda: fp8.accumulate_gradients(fp8.filter_grad(loss)(MODEL, X), eqx.filter_grad(loss)(PLAIN, X)),
        r"gradients do not have the structure of the model: they differ at '\.layers\[0\]\.dot_general\.state'",
    ),
    "no overwrites": (
        lambda: fp8.apply_updates(MODEL, REST, None),
        "overwrites do not have the structure of the model",
    ),
    "an average of another model": (
        lambda: training.incremental_update(MODEL, PLAIN, 0.1),
        "old do not have the structure of the model: they differ at",
    ),
    # Choices.
    "an option of others": (lambda: fp8.fp8_linear_layers(PLAIN, skip="0"), "unexpected keyword argument 'skip'"),
    "an option of a scaling": (lambda: fp8.DelayedScaling(history=4), "unexpected keyword argument 'history'"),
    "an option of Haliax": (
        lambda: fp8.Fp8DotGeneral.init(amax_history_length=4),
        "unexpected keyword argument 'amax_h",
    ),
    **{
        f"{type(config).__name__} as configuration": (
            lambda config=config: fp8.fp8_linear_layers(PLAIN, config),
            f"config={shown}.* is not an Fp8Config; use fp8_linear_layers\\(model, recipe=..., targets=",
        )
        for config, shown in (
            ("rowwise", "rowwise"),
            ({"recipe": "rowwise"}, "{'recipe': 'rowwise'}"),
            (["up"], r"\['up'\]"),
            (re.compile("up"), "re.compile"),
            (fp8.Fp8Config, "<class"),
            (fp8.recipes.named["current"], "CurrentScaling"),
            (PLAIN, "MLP"),
        )
    },
    "a device": (lambda: fp8.describe(MODEL, "h100"), r"loss_fn is of type str.*describe\(model, config="),
    "a list of overrides": (lambda: fp8.Fp8Config(overrides=["up"]), "'list' object has no attribute 'items'"),
    "a pattern of one argument": (
        lambda: fp8.fp8_linear_layers(PLAIN, targets=lambda path: True),
        "takes 1 positional argument but 2 were given",
    ),
    "a number as shape": (lambda: fp8.Fp8DotGeneral.init(kernel_shape=3), "'int' object is not iterable"),
    "a layer to join": (lambda: memory.join_linear(PLAIN.layers[0]), "'Linear' object is not iterable"),
    "a layer to split": (lambda: memory.split_linear(PLAIN.layers[0]), "'Linear' object has no attribute 'linear'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_this_wrong_call_raises(name):
    call, words = WRONG[name]
    with unchecked(), pytest.raises((ValueError, TypeError, AttributeError), match=f"(?s){words}"):
        call()


def test_what_is_right_is_not_explained():
    """An error of the user's own functions is theirs, whatever the arguments are; and is not hidden by a check's."""

    def fail(*_):
        raise RuntimeError("its own")

    for options in ({"loss": fail}, {"optimizer": optax.GradientTransformation(ADAM.init, fail)}):
        with pytest.raises(RuntimeError, match="^its own") as caught:
            run(**options)
        assert caught.value.__cause__ is None


def test_words_of_the_package_are_not_explained():
    """Not even if another argument is wrong too."""
    with pytest.raises(ValueError, match="key= is for recipes.*loss_key=") as caught:
        fp8.TrainStep(with_key, ADAM)(MODEL, None, X, key=KEY)
    assert caught.value.__cause__ is None


def test_an_explanation_has_its_cause():
    with pytest.raises(ValueError, match="microbatches=0") as caught:
        run(microbatches=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_sequences_are_as_good_as_tuples():
    """A list that stayed one would be equal to no shape, and the kernel would be taken for the input."""
    lists = fp8.Fp8DotGeneral.init(kernel_shape=[8], stack=[hax.Axis("layers", 2)])
    assert lists.kernel_shape == (8,) and lists.stack == (hax.Axis("layers", 2),)
