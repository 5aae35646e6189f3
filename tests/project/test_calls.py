"""How much of the package one gradient of one linear layer runs through: what a reader has to follow."""

import collections
import gc
import os
import sys

import haliax as hax
import haliax.nn as hnn
import jax

import haliax_fp8 as fp8


# A few percent above what they were when this was written (528 calls of 218 functions): a change may add a few.
MOST_CALLS, MOST_FUNCTIONS = 560, 225

PACKAGE = os.path.dirname(fp8.__file__) + os.sep
In, Out = hax.make_axes(embed=32, mlp=32)


def loss(layer, x):
    return layer(x).sum().scalar()


def batch(rows):
    return hax.random.normal(jax.random.key(1), (hax.Axis("batch", rows), In))


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


def test_a_gradient_of_a_linear_layer_makes_few_calls():
    layer = fp8.fp8_linear_layers(hnn.Linear.init(In, Out, key=jax.random.key(0)))
    gradient = fp8.filter_grad(loss)
    gradient(layer, batch(16))  # What is imported and made once for a process.
    other = batch(48)
    jax.clear_caches()
    was_enabled = gc.isenabled()
    gc.disable()  # Finalizers of earlier tests would count.
    try:
        counted = calls_of(gradient, layer, other)
    finally:
        if was_enabled:
            gc.enable()
    shown = "\n".join(f"{count:4d} {file}: {name}" for (file, name), count in counted.most_common(20))
    assert counted["training/gradients.py", "filter_value_and_grad.<locals>.take"] == 1
    assert counted.total() <= MOST_CALLS and len(counted) <= MOST_FUNCTIONS, (
        f"{counted.total()} calls of {len(counted)} functions; most often\n{shown}"
    )
