"""In a compiled step, histories are reduced and written once, although a gradient and the update both compute them."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from compiled_models import KINDS, SwiGLU, abstract, inputs, loss_of, on

import haliax_fp8 as fp8
from haliax_fp8.preflight import compilable_devices
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.program import entry_sites, launches, opened
from haliax_fp8.recipes import MaxOfHistory, RecoveringMax
from haliax_fp8.training import quantized_state


LENGTH = 1024
OPTIMIZER = optax.sgd(0.1)


def by_hand(call):
    """A step as in README, compiled as one program."""

    def step(model, x):
        gradients = fp8.filter_grad(lambda model: loss_of(call)((model, x)))(model)
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        params = fp8.trainable(model)
        updates, _ = OPTIMIZER.update(gradients, OPTIMIZER.init(params), params)
        return fp8.apply_updates(model, updates, overwrites)

    return step


def size(shapes, columns):
    """How many elements arrays with so many columns have together."""
    return sum(math.prod(dims) for dims in shapes if dims and dims[-1] == columns)


# The second one needs the smallest amax too.
@pytest.mark.parametrize(("rule", "count"), [(MaxOfHistory(), 1), (RecoveringMax(), 2)], ids=["max", "recovering"])
@pytest.mark.parametrize(("name", "device"), on(["unrolled", "scan"], ["h100"]))
def test_histories_are_reduced_and_written_once(name, device, rule, count, compiled):
    config = fp8.Fp8Config(recipe=fp8.DelayedScaling(LENGTH, amax_compute=rule), emulate=True)
    model = abstract(lambda: fp8.fp8_linear_layers(KINDS[name].make(SwiGLU), config))
    text, _ = compiled(by_hand(KINDS[name].call), model, inputs(), device=device)
    sites = list(launches(entry_sites(parse_hlo(text))))
    rows = size([leaf.shape for leaf in jax.tree.leaves(model)], LENGTH + 2) // (LENGTH + 2)
    assert rows == 3 * 3 * KINDS[name].blocks

    read = [
        site.operands[0].instruction.shape.dims
        for launch in sites
        for site in opened(launch)
        if site.instruction.opcode == "reduce"
    ]
    assert size(read, LENGTH - 1) == count * rows * (LENGTH - 1)
    written = [shape.dims for launch in sites if launch.instruction.is_fusion for shape in launch.results]
    # `apply_updates` reads a column of the gradients' histories, which tells a mean of gradients. Of a stack XLA then
    # writes these tables as well. `TrainStep` does not look: nothing can have averaged its gradients.
    times = 2 if name == "scan" else 1
    assert size(written, LENGTH + 2) == times * rows * (LENGTH + 2)


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs XLA's compiler for this device")
def test_an_update_reads_gradient_and_moments_twice_and_keeps_no_moment_in_float32(compiled):
    """With moments in FP8 and weights that are rounded stochastically."""
    optimizer, shape = quantized_state(optax.adamw(1e-4)), (4, 1024, 2048)
    in_float32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def step(params, grads, state, words):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(in_float32(grads), state, in_float32(params))
        return fp8.apply_updates(params, updates, {"w": None}, key=jax.random.wrap_key_data(words)), state

    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    state = jax.eval_shape(lambda: optimizer.init({"w": jnp.zeros(shape, jnp.bfloat16)}))
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    text, report = compiled(jax.jit(step, donate_argnums=(0, 2)), params, params, state, words, device="h100")
    # Numbers of blocks alone: not a byte for each element, so that new data are written where the old ones were.
    assert report.step.memory.temporaries < 0.5 * math.prod(shape)
    reads = {"grads": 0, "mu": 0, "nu": 0}
    for launch in launches(entry_sites(parse_hlo(text))):
        names = [site.instruction.name for site in launch.operands if site.instruction.shape.dims == shape]
        for array in reads:
            reads[array] += any(array in name for name in names)
        assert all(math.prod(x.dims) < math.prod(shape) for x in launch.results if x.dtype == "f32")
    assert reads == {"grads": 2, "mu": 2, "nu": 2}
