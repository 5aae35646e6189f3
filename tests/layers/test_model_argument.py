"""What is not a model, in place of one: an error that names the argument, what it is, and the call."""

import inspect
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unchecked

import haliax_fp8 as fp8
from haliax_fp8 import checkpoints, huggingface, memory, serving, statistics, training


MODEL = fp8.fp8_linear_layers(eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0)), recipe="current")
X = jnp.ones((2, 4))


def loss_fn(model, x):
    return (jax.vmap(model)(x) ** 2).mean()


STEP = fp8.TrainStep(loss_fn, optax.adam(1e-3))
STATE = STEP.init(MODEL)
DIAGNOSIS = statistics.Diagnosis(())

# Of a model alone: an op or an array is none.
OF_LAYERS = {
    "export_model(model, directory)": lambda model: huggingface.export_model(model, "folder"),
    "serving_tensors(model, layout)": huggingface.serving_tensors,
    "import_model(directory, model)": lambda model: huggingface.import_model("folder", model),
    "fp8_config_of(directory, model)": lambda model: huggingface.fp8_config_of("folder", model),
    "with_folder_scales(directory, model)": lambda model: huggingface.with_folder_scales("folder", model),
    "fp8_linear_layers(module)": fp8.fp8_linear_layers,
    "restore_linear_layers(model)": fp8.restore_linear_layers,
    "describe(model)": fp8.describe,
    "share_input_scales(model)": memory.share_input_scales,
    "quantize_for_inference(model, layout)": serving.quantize_for_inference,
    "compare(plain, converted, function, *batch)": lambda model: statistics.compare(MODEL, model, loss_fn, X),
    "apply_remedies(model, diagnosis, remedies)": lambda model: statistics.apply_remedies(model, DIAGNOSIS, []),
    "transfer_optimizer_state(opt_state, old_model, new_model)": lambda model: fp8.transfer_optimizer_state(
        STATE, MODEL, model
    ),
}
# Of any tree, but for an optimizer's state beside the model.
OF_TREES = {
    "quantize_kernels(model)": fp8.quantize_kernels,
    "separate_input_scales(model)": memory.separate_input_scales,
    "dequantize(model)": serving.dequantize,
    "freeze(model)": serving.freeze,
    "serving_mismatch(train_model, served, batch)": lambda model: serving.serving_mismatch(MODEL, model, X),
    "diagnose(model, statistics)": lambda model: statistics.diagnose(model, None),
    "where_not_finite(model, loss_fn, *batch)": lambda model: statistics.where_not_finite(model, loss_fn, X),
    "quantization_statistics(model, loss_fn, *batch)": lambda model: fp8.quantization_statistics(model, loss_fn, X),
    "calibrate(model, loss_fn, batches)": lambda model: fp8.calibrate(model, loss_fn, [X]),
    "cast_params(model, dtype)": lambda model: fp8.cast_params(model, jnp.bfloat16),
    "with_rounding_keys(model, key)": lambda model: fp8.with_rounding_keys(model, jax.random.key(0)),
    "muon_dimensions(model)": training.muon_dimensions,
    "apply_updates(module, updates, overwrites)": lambda model: fp8.apply_updates(model, None, None),
    "trainable(model)": fp8.trainable,
    "step.init(model)": STEP.init,
    "step(model, opt_state, *batch)": lambda model: STEP(model, STATE, X),
}
# Of a model, with or without an optimizer's state.
OF_ALL = {
    "save(path, model)": lambda tree: checkpoints.save("file.safetensors", tree),
    "load_into(model, path)": lambda tree: checkpoints.load_into(tree, {"weight": np.ones(3)}),
}
# They take any tree, and say nothing of one without state or stacks. `export_adapter` takes a model with adapters.
OTHERS = {
    "hugging_face_config",
    "export_adapter",
    "fp8_states",
    "partition_for_grad_overwrite",
    "check_not_modified",
    "with_max_gradients",
    "unstacked",
}

MISTAKES = {
    "None": (None, "is None, and has no layers"),
    "a class": (eqx.nn.MLP, "is the class MLP, but must be an instance, with weights"),
    "a function": (loss_fn, "is a function, and has no layers"),
    "a text": ("model", "is of type str, and has no layers"),
    "a configuration": (fp8.Fp8Config(), "is an Fp8Config, and has no layers"),
    "a model and its state": ((MODEL, STATE), "is a tuple with an optimizer's state, and the model is its first item"),
    "a state and its model": ((3, STATE, MODEL), "is a tuple with an optimizer's state, and the model is its third"),
    "a model and a report": ((MODEL, DIAGNOSIS), "is a tuple with a Diagnosis, and the model is its first item"),
    "an op": (MODEL.layers[0].dot_general, "is an Fp8DotGeneral, the product of a layer"),
    "an array": (X, "is of type ArrayImpl, and has no layers"),
}
OF_TUPLES = ("a model and its state", "a state and its model", "a model and a report")
ALONE = ("an op", "an array")


def message_of(function, mistake):
    """The error for a mistake, without the name of the parameter; and that name."""
    with unchecked(), pytest.raises(ValueError) as caught:
        function(MISTAKES[mistake][0])
    name, _, message = str(caught.value).partition(" ")
    return name, message


def without_remedy(functions, mistake):
    """The calls whose error does not name a parameter, what was given, and the call."""
    messages = {call: message_of(function, mistake) for call, function in functions.items()}
    names = {"module", "model", "tree", "converted", "new_model", "served"}
    said = MISTAKES[mistake][1]
    return {
        call: (name, message)
        for call, (name, message) in messages.items()
        if name not in names or not message.startswith(said) or call not in message
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_functions_of_layers(mistake):
    assert without_remedy(OF_LAYERS, mistake) == {}


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name not in ALONE])
def test_functions_of_trees(mistake):
    swapped = mistake == "a function"
    functions = {call: function for call, function in OF_TREES.items() if not (swapped and "loss_fn" in call)}
    assert without_remedy(functions, mistake) == {}


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name not in (*ALONE, *OF_TUPLES)])
def test_functions_that_save_and_load(mistake):
    assert without_remedy(OF_ALL, mistake) == {}


def test_trees_that_are_models():
    """Lists, dicts and tuples of layers, with arrays, functions or nothing beside them; parts of a model; an op."""
    layer = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    for tree, count in (
        ((layer, X), 1),
        ([layer, None], 1),
        ({"up": layer, "act": jax.nn.relu}, 1),
        ((layer, layer), 2),
    ):
        assert len(fp8.describe(fp8.fp8_linear_layers(tree))) == count
    arrays, rest = eqx.partition(MODEL, eqx.is_array)
    assert len(fp8.describe((arrays, rest))) == 4
    assert isinstance(fp8.trainable(MODEL.layers[0].dot_general), fp8.Fp8DotGeneral)
    assert fp8.cast_params(X, jnp.bfloat16).dtype == jnp.bfloat16
    # An optimizer's state alone has the structure of its model.
    assert jax.tree.structure(memory.separate_input_scales(STATE)) == jax.tree.structure(STATE)


class Carry(NamedTuple):
    hidden: Any
    cell: Any


class LSTMState(NamedTuple):
    hidden: Any


@pytest.mark.parametrize(
    "beside",
    [Carry(X, X), LSTMState(X), Carry(MODEL, MODEL), optax.LookaheadParams(MODEL, MODEL), [Carry(1.0, None)]],
)
def test_named_tuples_beside_a_model_need_not_be_of_an_optimizer(beside):
    """What a recurrent layer carries; other models."""
    count = len(fp8.describe(MODEL)) + (len(fp8.describe(beside)) if isinstance(beside[0], eqx.Module) else 0)
    for tree in ((MODEL, beside), (beside, MODEL)):
        assert len(fp8.describe(tree)) == count
        assert jax.tree.structure(fp8.cast_params(tree, jnp.float32)) == jax.tree.structure(tree)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(1e-3), optax.sgd(lambda _: 1e-3, momentum=0.9), optax.MultiSteps(optax.adam(1e-3), 2)]
)
def test_states_of_other_optimizers(optimizer):
    with pytest.raises(ValueError, match="model is a tuple with an optimizer's state"):
        fp8.describe((MODEL, fp8.TrainStep(loss_fn, optimizer).init(MODEL)))


def test_every_public_function_of_a_model_is_here():
    tested = {call.partition("(")[0] for call in (*OF_LAYERS, *OF_TREES, *OF_ALL)}
    names = {"model", "module", "tree", "plain", "converted", "train_model", "old_model"}
    for room in (fp8, checkpoints, huggingface, memory, serving, statistics, training):
        for name, function in vars(room).items():
            if inspect.isfunction(function) and names & set(inspect.signature(function).parameters):
                assert name in tested | OTHERS, name
