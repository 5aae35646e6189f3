"""The training step of Haliax's FP8 guide, line by line as the guide has it, with our package under its names.

Corrected are its slips: `opt.initial_state` is `opt.init`, and `init` of the module is a static method that builds it.
"""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from numpy_reference import amax

import haliax_fp8 as haxq
from haliax_fp8 import Fp8Config


In = hax.Axis("In", 32)
Mid = hax.Axis("Mid", 128)
Out = hax.Axis("Out", 16)
Batch = hax.Axis("Batch", 64)


class MyModule(eqx.Module):
    up_proj: hax.nn.Linear
    down_proj: hax.nn.Linear

    @staticmethod
    def init(*, key):
        k_up, k_down = jax.random.split(key)
        return MyModule(
            up_proj=hax.nn.Linear.init(In, Mid, key=k_up),
            down_proj=hax.nn.Linear.init(Mid, Out, key=k_down),
        )

    def __call__(self, x):
        x = self.up_proj(x)
        x = hax.nn.relu(x)
        x = self.down_proj(x)
        return x


@pytest.fixture
def module():
    return MyModule.init(key=jax.random.PRNGKey(0))


@pytest.fixture(scope="module")
def data():
    """Inputs, and the outputs of another module of the same kind: something that can be learned."""
    x = hax.random.normal(jax.random.PRNGKey(1), (Batch, In))
    return x, MyModule.init(key=jax.random.PRNGKey(2))(x)


def loss_fn(module, data):
    x, y = data
    return hax.mean((module(x) - y) ** 2).scalar()


def is_fp8(layer):
    return isinstance(layer.dot_general, haxq.Fp8DotGeneral)


@pytest.fixture(autouse=True)
def _promotion_for_optax():
    with jax.numpy_dtype_promotion("standard"):
        yield


# The guide gives the optimizer the whole module, `params=module`. What decays weights takes that; what looks at each
# parameter's shape or norm (Adafactor, LAMB, Muon) wants the trainable part, as `TrainStep` gives it.
SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-2)


@pytest.mark.more
@pytest.mark.parametrize(
    ("opt", "transform", "steps"),
    [(SGD, eqx.filter_jit, 20), (ADAMW, eqx.filter_jit, 20), (SGD, lambda f: f, 2)],
    ids=["sgd", "adamw", "sgd-eager"],
)
def test_the_guide_trains(module, data, opt, transform, steps):
    """The loss falls, and every layer's state describes the operands of the last step."""
    # setup
    module = haxq.fp8_linear_layers(module)

    # if using optax. This saves a tiny amount of memory so you can skip it if you want
    _, trainable_module = haxq.partition_for_grad_overwrite(module)
    opt_state = opt.init(trainable_module)

    @transform
    def train_step(module, opt_state, data):
        # train step
        grads = eqx.filter_grad(loss_fn)(module, data)
        overwrite, grads = haxq.partition_for_grad_overwrite(grads)
        updates, opt_state = opt.update(grads, opt_state, params=module)  # or however you update your optimizer
        module = haxq.apply_updates(module, updates, overwrite)
        return module, opt_state

    loss_before = loss_fn(module, data)
    for _ in range(steps):
        before = module
        module, opt_state = train_step(module, opt_state, data)

    assert loss_fn(module, data) < loss_before * (0.5 if steps == 20 else 1.0)
    np.testing.assert_array_equal(module.up_proj.dot_general.amax_history("input")[0], amax(data[0]))
    for name in ("up_proj", "down_proj"):
        newest = getattr(module, name).dot_general.amax_history("kernel")[0]
        np.testing.assert_array_equal(newest, amax(getattr(before, name).weight))


@pytest.mark.more
def test_the_guide_lets_skip_the_partition_of_the_module(module, data):
    """An optimizer that keeps nothing per parameter can be initialised with the whole module."""
    module = haxq.fp8_linear_layers(module)
    opt_state = SGD.init(module)
    grads = eqx.filter_grad(loss_fn)(module, data)
    overwrite, grads = haxq.partition_for_grad_overwrite(grads)
    updates, opt_state = SGD.update(grads, opt_state, params=module)
    updated = haxq.apply_updates(module, updates, overwrite)

    expected = np.asarray(module.up_proj.weight.array) - np.float32(0.1) * np.asarray(grads.up_proj.weight.array)
    np.testing.assert_allclose(updated.up_proj.weight.array, expected, rtol=1e-6)
    np.testing.assert_array_equal(updated.up_proj.dot_general.amax_history("input")[0], amax(data[0]))


@pytest.mark.smoke
def test_the_guide_converts_all_layers(module):
    module = haxq.fp8_linear_layers(module)
    assert is_fp8(module.up_proj)
    assert is_fp8(module.down_proj)


def test_the_guide_converts_a_specific_layer(module):
    config = Fp8Config(targets=["up_proj"])
    module = haxq.fp8_linear_layers(module, config)
    assert is_fp8(module.up_proj)
    assert not is_fp8(module.down_proj)


def test_the_guide_converts_twice(module):
    """Its second conversion comes after the first one, and changes nothing."""
    module = haxq.fp8_linear_layers(module)
    again = haxq.fp8_linear_layers(module, Fp8Config(targets=["up_proj"]))
    assert eqx.tree_equal(module, again)
