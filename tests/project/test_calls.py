"""How much of the package the gradient of linear layers runs through: what a reader has to follow, and what JAX's
tracing of each further layer costs."""

import collections
import gc
import os
import sys

import haliax as hax
import haliax.nn as hnn
import jax

import haliax_fp8 as fp8


# A few percent above what they were when this was written (395 calls of 205 functions in 42 files): a change may add a
# few.
MOST_CALLS, MOST_FUNCTIONS, MOST_FILES = 403, 209, 42

# Likewise for each further layer: one of a new size (335), and one of a size that another layer has (52; here with
# jaxtyping, which adds a few of its own).
MOST_CALLS_OF_A_NEW_SIZE, MOST_CALLS_OF_A_KNOWN_SIZE = 356, 66

PACKAGE = os.path.dirname(fp8.__file__) + os.sep


def loss(layers, x):
    for layer in layers:
        x = layer(x)
    return x.sum().scalar()


def calls_of(function, *args):
    """The calls of the package's functions, counted by file and name; those of generators and lambdas too."""
    counted = collections.Counter()

    def count(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counted[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return counted


def calls_of_gradient(*sizes):
    """Those of a gradient of layers between axes of these sizes, one after the other."""
    axes = [hax.Axis(f"axis{i}", size) for i, size in enumerate(sizes)]
    pairs = zip(axes, axes[1:], strict=False)
    layers = [fp8.fp8_linear_layers(hnn.Linear.init(In, Out, key=jax.random.key(0))) for In, Out in pairs]
    batch = lambda rows: hax.random.normal(jax.random.key(1), (hax.Axis("batch", rows), axes[0]))
    gradient = fp8.filter_grad(loss)
    gradient(layers, batch(16))  # What is imported and made once for a process.
    other = batch(48)
    jax.clear_caches()
    was_enabled = gc.isenabled()
    gc.disable()  # Finalizers of earlier tests would count.
    try:
        return calls_of(gradient, layers, other)
    finally:
        if was_enabled:
            gc.enable()


def test_a_gradient_of_a_linear_layer_makes_few_calls():
    counted = calls_of_gradient(32, 32)
    shown = "\n".join(f"{count:4d} {file}: {name}" for (file, name), count in counted.most_common(20))
    assert counted["training/gradients.py", "_value_and_grad.<locals>.take"] == 1
    files = {file for file, _ in counted}
    assert counted.total() <= MOST_CALLS and len(counted) <= MOST_FUNCTIONS and len(files) <= MOST_FILES, (
        f"{counted.total()} calls of {len(counted)} functions in {len(files)} files; most often\n{shown}"
    )


def test_further_layers_make_fewer():
    new = calls_of_gradient(32, 64, 96, 128).total() - calls_of_gradient(32, 64, 96).total()
    known = calls_of_gradient(32, 32, 32, 32).total() - calls_of_gradient(32, 32, 32).total()
    assert 0 < known <= MOST_CALLS_OF_A_KNOWN_SIZE, known
    assert 0 < new <= MOST_CALLS_OF_A_NEW_SIZE, new
