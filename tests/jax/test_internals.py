"""Which private names of JAX are used, and what the error says where one is missing."""

import ast
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib

import jax
import pytest
from packaging.version import Version

from haliax_fp8 import _jax
from haliax_fp8._jax.private import LOWEST, NEWEST, needs


FOLDER = pathlib.Path(inspect.getfile(_jax)).parent

# Without them `import haliax_fp8` fails. Each comment says where the names below it are under test.
ESSENTIAL = {
    # `tests/jax/test_max_grad.py`.
    "jax._src.dtypes.ExtendedDType",
    # `tests/sharding/test_blocks.py`, and with XLA's compiler in `tests/programs/test_several_devices.py`.
    "jax._src.sharding_impls.SPMDAxisContext",
    "jax._src.sharding_impls.ShardingContext",
}

# Without them what needs them fails where it is used, or does without.
OPTIONAL = {
    # `tests/jax/test_linearization.py`.
    "jax._src.interpreters.ad",
    # `tests/jax/test_errors.py`.
    "jax._src.traceback_util.api_boundary",
    "jax._src.traceback_util.register_exclusion",
    # `tests/programs/test_compiled_grouped.py`: off inside Pallas kernels.
    "jax._src.config",
    # `tests/jax/test_cudnn_attention.py`, and with XLA's compiler in `tests/programs/test_compiled_attention.py`.
    "jax._src.cudnn.fused_attention_stablehlo",
    "jax._src.xla_bridge",
    # `tests/sharding/test_blocks.py`; the last also in `tests/programs/test_compiled_blocks.py`.
    "jax._src.dispatch",
    "jax._src.custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME",
    "jax._src.custom_partitioning._ShardingCallbackInfo",
    "jax._src.custom_partitioning._sharding_callbacks",
    "jax._src.interpreters.mlir.custom_call",
}


def imported_by(path):
    """The private names of JAX that a file imports, anywhere in it and as it is loaded."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    of = lambda node: {f"{node.module}.{alias.name}" for alias in node.names}
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and "jax._src" in (n.module or "")]
    anywhere, at_once = set(), set()
    for node in nodes:
        anywhere |= of(node)
        at_once |= of(node) if id(node) not in inside else set()
    return anywhere, at_once


def test_internals_are_the_ones_under_test():
    found = [imported_by(path) for path in FOLDER.parent.rglob("*.py")]
    anywhere, at_once = (set().union(*names) for names in zip(*found, strict=True))
    assert at_once == ESSENTIAL
    assert anywhere == ESSENTIAL | OPTIONAL


def test_the_tested_versions():
    """If the second line fails, and no other test does: raise `NEWEST`."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    assert f"jax>={LOWEST}" in project["dependencies"]
    assert Version(LOWEST) <= Version(jax.__version__) <= Version(NEWEST)


SENTENCE = (
    rf"haliax_fp8 {re.escape(importlib.metadata.version('haliax-fp8'))} was tested with JAX {re.escape(LOWEST)} to "
    rf"{re.escape(NEWEST)}; JAX {re.escape(jax.__version__)} is installed, which lacks a private name that .* needs "
    r"\(.*{name}.*\). Install a tested version: pip install"
)


WITHOUT = """\
import dataclasses, importlib, sys, types
import equinox, haliax, jax, jax._src, optax

def without(module):
    # One of that name that is empty; JAX itself keeps the one that it has.
    parent, _, name = module.rpartition(".")
    sys.modules[module] = empty = types.ModuleType(module)
    setattr(sys.modules[parent], name, empty)

"""


def run(code):
    """Runs a program in a process of its own, where JAX can lose names; returns what it printed."""
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", sorted(ESSENTIAL))
def test_without_an_essential_name_the_import_says_which_versions_were_tested(name):
    module, _, name = name.rpartition(".")
    # The others are there: each is missed by itself.
    code = f"""
        before = sys.modules["{module}"]
        without("{module}")
        vars(sys.modules["{module}"]).update({{k: v for k, v in vars(before).items() if k != "{name}"}})
        from haliax_fp8 import fp8_linear_layers
    """
    found = run(textwrap.dedent(code))
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert re.match("ImportError: " + SENTENCE.replace("{name}", name), last), found.stderr


WITHOUT_OPTIONAL = """\
import jax.experimental.custom_partitioning, jax.experimental.pallas, jax.numpy as jnp, numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jnp.ones(3) @ jnp.ones(3)
# JAX's own modules have all that they need now.
modules = set()
for name in OPTIONAL:
    try:
        modules.add(importlib.import_module(name).__name__)
    except ImportError:
        modules.add(name.rpartition(".")[0])
for module in modules:
    without(module)

import haliax_fp8 as fp8
from haliax_fp8 import layers, memory, models, ops, preflight, recipes, serving, sharding, statistics, training
from haliax_fp8._jax import cudnn_attention, late_plugin
from haliax_fp8._jax.opaque import on_one_device
from haliax_fp8._product.blocks import native_product
from haliax_fp8._product.dimensions import DotDimensions
from jax.sharding import NamedSharding, PartitionSpec as P

def gradient(recipe):
    layer = fp8.fp8_linear_layers(equinox.nn.Linear(64, 64, key=jax.random.key(0)), fp8.Fp8Config(recipe=recipe))
    loss = lambda layer, x: (jax.vmap(layer)(x) ** 2).mean()
    return equinox.filter_jit(fp8.filter_grad(loss))(layer, jax.random.normal(jax.random.key(1), (64, 64))).weight

for recipe in ("delayed", "mxfp8"):
    assert np.abs(gradient(recipe)).max() > 0
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jnp.ones((64, 64), recipes.E4M3.dtype, device=NamedSharding(mesh, P("x")))

def blocks(data):
    use = recipes.OperandUse(recipes.E4M3, contracted=(1,))
    quantized = dataclasses.replace(recipes.MXFP8Scaling().quantize(jnp.ones(data.shape), use), data=data)
    numbers = DotDimensions.of((((1,), (1,)), ((), ())), data.shape, data.shape)
    return native_product(quantized, quantized, numbers, np.dtype(np.float32))

x = jnp.ones((1, 4, 1, 64), jnp.bfloat16)
uses = (
    lambda: jax.jit(blocks)(rows),
    lambda: jax.jit(jax.shard_map(blocks, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(rows),
    lambda: cudnn_attention.attention(x, x, x, scale=1.0, is_causal=True),
    lambda: late_plugin.complete_plugin("cuda"),
    lambda: on_one_device(jnp.sin, x),
)
for use in uses:
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_without_optional_names_all_else_works_and_each_use_says_which_versions_were_tested():
    """A gradient on one device with state, one in blocks; then blocks on several devices, attention, the preflight."""
    found = run(f"OPTIONAL = {sorted(OPTIONAL)}\n{WITHOUT_OPTIONAL}")
    assert found.returncode == 0, found.stderr
    said = found.stdout.strip().splitlines()
    assert len(said) == 5, found.stdout + found.stderr
    for line, name in zip(
        said, ("dispatch", "_CUSTOM_PARTITIONING_CALL_NAME", "cudnn", "xla_bridge", "config"), strict=True
    ):
        assert re.match(SENTENCE.replace("{name}", name), line), line


def test_other_errors_are_not_about_versions():
    with pytest.raises(ValueError, match="^something else$"), needs("nothing"):
        raise ValueError("something else")
