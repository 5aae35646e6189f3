"""Microbatches on several devices: every device keeps its rows, and numbers are those of one device."""

import functools
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8


DEVICES, PARTS, RATE = 4, 2, 0.1
Batch, Embed, Mlp = hax.make_axes(batch=32, embed=16, mlp=24)
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
WEIGHTS = Embed.size * Mlp.size


class TwoLayers(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0))
        linear = functools.partial(hnn.Linear.init, use_bias=False)
        return TwoLayers(linear(Embed, Mlp, key=keys[0]), linear(Mlp, Embed, key=keys[1]))

    def __call__(self, x):
        return self.down(hax.tanh(self.up(x)))


def loss_fn(model, x):
    return (model(x) ** 2).mean().scalar()


@functools.cache
def problem():
    """A model whose scales fit, and a batch whose largest row is in the second microbatch of the last device."""
    x = np.random.default_rng(0).normal(size=(Batch.size, Embed.size)).astype(np.float32)
    x[-1] *= 3.0
    x = hax.named(jnp.asarray(x), (Batch, Embed))
    model = fp8.fp8_linear_layers(TwoLayers.init(), amax_history_length=4)
    return fp8.TrainStep(loss_fn, optax.sgd(RATE), microbatches=PARTS).calibrate(model, x), x


def on_mesh(tree):
    """Kernels divided along the axis that FSDP divides, the batch along its rows, state on every device."""

    def put(node):
        names = node.axis_names if isinstance(node, hax.NamedArray) else ()
        axes = ["data" if name == ("batch" if "batch" in names else "embed") else None for name in names]
        return jax.device_put(node, NamedSharding(MESH, P(*axes)))

    return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))


@functools.cache
def trained(quantize, mapping=None):
    """What a step on the mesh returns, and its program."""
    step = fp8.TrainStep(loss_fn, optax.sgd(RATE), microbatches=PARTS, quantize_kernels=quantize)
    model, x = on_mesh(problem())
    arrays, rest = eqx.partition((model, step.init(model), x), eqx.is_array)

    def run(arrays):
        with hax.axis_mapping(dict(mapping or {})):
            return eqx.filter(step(*eqx.combine(arrays, rest)), eqx.is_array)

    with jax.set_mesh(MESH):
        compiled = jax.jit(run).lower(arrays).compile()
        return compiled(arrays), compiled.as_text()


@functools.cache
def expected():
    """By hand, on one device: the gradients of rows 0, 2, 4... and of rows 1, 3, 5..., added."""
    model, x = problem()
    gradient = eqx.filter_jit(fp8.filter_value_and_grad(loss_fn))
    total, losses = None, []
    for i in range(PARTS):
        loss, gradients = gradient(model, x["batch", i::PARTS])
        total = fp8.accumulate_gradients(total, gradients)
        losses.append(float(loss))
    overwrites, gradients = fp8.partition_for_grad_overwrite(total)
    updates = jax.tree.map(lambda g: -RATE * g / PARTS, gradients)
    return fp8.apply_updates(model, updates, overwrites), np.mean(losses)


def gathered(text):
    """How many elements of kernels devices get in each run of an instruction, and whether all are outside of loops."""
    computation, gathers = "", []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%\S+ \(.*\{$", line):
            computation = header[1]
        if shapes := re.search(r"= (.*) all-gather(-start)?\(", line):
            sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\w+\[([\d,]+)\]", shapes[1])]
            gathers += [(size, computation == "ENTRY ") for size in sizes if size >= WEIGHTS]
    return gathers


CHOICES = [
    ("in_each_microbatch", None),
    ("in_each_microbatch", (("batch", "data"),)),
    ("gathered_once", (("batch", "data"),)),
]


@pytest.mark.more
@pytest.mark.parametrize("quantize, mapping", CHOICES)
def test_devices_keep_their_rows(quantize, mapping):
    (model, _, metrics), text = trained(quantize, mapping)
    assert not re.search(r" (all-to-all|collective-permute)(-start)?\(", text)
    # No activation is gathered either: it would be larger than a kernel, or smaller.
    assert {size for size, _ in gathered(text)} == {WEIGHTS}
    by_hand, loss = expected()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    for name in ("up", "down"):
        one, ours = getattr(by_hand, name), getattr(model, name)
        for operand in ("input", "kernel", "output_grad"):
            histories = [layer.dot_general.amax_history(operand) for layer in (one, ours)]
            # Sums in another order differ in their last bits.
            np.testing.assert_allclose(histories[1], histories[0], rtol=4e-7)
        change = [layer.weight.array - getattr(problem()[0], name).weight.array for layer in (one, ours)]
        # Where a last bit decides, a value of E5M2 differs by a quarter, in a sum of 32 rows.
        assert jnp.linalg.norm(change[1] - change[0]) <= 5e-3 * jnp.linalg.norm(change[0])


@pytest.mark.more
def test_kernels_travel_once_per_step():
    """Both, before the loop; by default both in each microbatch."""
    _, text = trained("gathered_once", (("batch", "data"),))
    assert gathered(text) == [(WEIGHTS, True)] * 2
    _, text = trained("in_each_microbatch", None)
    assert len(gathered(text)) == 2 * PARTS


@pytest.mark.more
def test_kernels_quantized_once_travel_once_and_give_the_same_bits():
    """dgrad reads what was sent for fprop; its transposed copy is for programs of one device."""
    once, text = trained("once", (("batch", "data"),))
    assert [size for size, _ in gathered(text)] == [WEIGHTS] * 2 * PARTS
    each, _ = trained("in_each_microbatch", (("batch", "data"),))
    for ours, expected_leaf in zip(jax.tree.leaves(once), jax.tree.leaves(each), strict=True):
        np.testing.assert_array_equal(ours, expected_leaf)


@pytest.mark.more
def test_gathering_once_takes_a_mesh():
    model, x = problem()
    step = fp8.TrainStep(loss_fn, optax.sgd(RATE), microbatches=PARTS, quantize_kernels="gathered_once")
    with pytest.raises(ValueError, match=r"no mesh with automatic axes.*jax.set_mesh\(mesh\)"):
        step(model, step.init(model), x)
