"""Every example in the package's docstrings runs and prints what it says."""

import ast
import doctest
import functools
import importlib
import pathlib

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haliax_fp8


PACKAGE = pathlib.Path(haliax_fp8.__file__).parent
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def docstrings_in(node, name):
    """Every docstring of a syntax tree that holds an example: the name of what it documents, its line and its text.

    From the source and not from the objects: decorators hide some of them.
    """
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node)
        if text is not None and ">>>" in text:
            yield name, node.body[0].lineno, text
    # Statements alone: expressions have no docstrings, and are most of a tree.
    for child in (x for block in ("body", "orelse") for x in getattr(node, block, ())):
        yield from docstrings_in(child, f"{name}.{child.name}" if hasattr(child, "name") else name)


@functools.cache
def examples():
    """A case for each docstring with an example."""
    return tuple(_examples())


def _examples():
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("haliax_fp8", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for name, line, text in docstrings_in(ast.parse(path.read_text()), module):
            yield pytest.param(module, path, line, text, id=name)


@functools.cache
def small_model():
    """Made once: nothing that an example does changes it."""
    In, Out = hax.make_axes(In=16, Out=8)
    model = hnn.MLP.init(In, Out, width=32, depth=1, key=jax.random.key(0))

    def loss_fn(model, x):
        return hax.mean(hax.square(model(x))).scalar()

    return {
        "model": model,
        "layer": haliax_fp8.fp8_linear_layers(model.layers[0]),
        "loss_fn": loss_fn,
        "x": hax.random.normal(jax.random.key(1), (hax.Axis("batch", 4), In)),
    }


def namespace_of(module):
    """What examples may use: the usual imports, the public names, those of their own file, and a small model."""
    usual = {"eqx": eqx, "hax": hax, "hnn": hnn, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    subjects = ("devices", "recipes", "layers", "training", "statistics", "memory", "serving", "plots")
    modules = [importlib.import_module(f"haliax_fp8.{name}") for name in subjects]
    public = {k: v for part in modules for k, v in vars(part).items() if not k.startswith("_")}
    public |= {name: getattr(haliax_fp8, name) for name in haliax_fp8.__all__}
    return {**usual, **public, **vars(importlib.import_module(module)), **small_model()}


@pytest.mark.parametrize("module, path, line, text", examples())
def test_example(module, path, line, text):
    test = doctest.DocTestParser().get_doctest(text, namespace_of(module), path.name, str(path), line)
    report = []
    # As in a user's session: optax's Adam does not run under strict promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert result.attempted and not result.failed, "".join(report)


def test_public_functions_have_examples():
    with_example = {param.id for param in examples()}
    assert {"haliax_fp8.layers.convert.fp8_linear_layers", "haliax_fp8.training.step.TrainStep"} <= with_example
