"""Compares what this machine's accelerator computes with what its CPU computes, which the other tests check.

    uv run tests/hardware/compare_with_cpu.py [WORD ...]    # needs a GPU or TPU, and JAX for it

Runs casts, the three products of every recipe (of matrices, of vectors, and of matrices too small for the units),
layers of experts, attention, models for inference and training steps; those with state for two steps. Prints the
relative difference of every result and of the next state, `=` where all bits are equal, and ends with 1 if one is
larger than its format explains. With words, only the cases whose names have one of them.

A sum of FP8 products is not the same to the last bit: a GPU adds in another order, Hopper's units keep about 14 bits of
each addend in fprop, Triton in all three products, and a bfloat16 product may be rounded twice. XLA's programs for GPUs
divide with an error of up to two units in the last place, so scales may differ in the last bit, and values halfway
between two neighbors may be rounded to the other one. In FP4 many are halfway.
"""

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any


os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import equinox as eqx  # noqa: E402
import haliax as hax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.dtypes import float0  # noqa: E402

import haliax_fp8 as fp8  # noqa: E402
from haliax_fp8 import Fp8DotGeneral, models, recipes  # noqa: E402
from haliax_fp8.experimental.attention import Fp8Attention  # noqa: E402
from haliax_fp8.serving import quantize_for_inference  # noqa: E402


MATRIX = (((1,), (0,)), ((), ()))
SHAPES = {
    "matrices": (512, 256, 768),
    "odd sizes": (509, 251, 773),
    "one row": (1, 256, 768),
    "one term": (8, 1, 8),
    "4 x 4": (4, 4, 4),
    "a small vector": (1, 8, 4),
}
# Twice the error of rounding to bfloat16 twice; what is left of 14 bits; some FP4 values in another place.
TWO_ROUNDINGS, FOURTEEN_BITS, FLIPPED = 2.0**-7, 2.0**-10, 2.0**-5
# Of numbers that sum up thousands of such differences.
TRAINING = 2.0**-4

type Case = tuple[str, Callable[[jax.Device], Any], float]


def random(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Numbers that are the same on every device."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def casts(dtype: Any) -> Any:
    """Every bfloat16 number, and numbers around every tie, as they are cast."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    ties = np.arange(-464, 464.25, 0.25, dtype=np.float32)
    x = np.concatenate([every, ties, np.nextafter(ties, np.float32(np.inf))])
    format = next(f for f in (recipes.E4M3, recipes.E5M2, recipes.E4M3FNUZ, recipes.E5M2FNUZ) if f.dtype == dtype)
    return jax.jit(lambda x: recipes.saturating_cast(x, format))(x)


def fake_quantized() -> Any:
    """Quantize-dequantize in one program."""
    return jax.jit(lambda x: fp8.ops.qdq(x, jnp.float8_e4m3fn, jnp.float32(2.0), jnp.float32))(random(0, 256, 64))


def products(recipe: str, shape: tuple[int, int, int], dtype: Any, *, one_pass: bool = False) -> Any:
    """Output, gradients and state of two steps."""
    m, k, n = shape
    x, w, g = (random(i, *sizes, dtype=dtype) for i, sizes in enumerate(((m, k), (k, n), (m, n))))
    op = fp8.with_rounding_keys(Fp8DotGeneral.init(recipe), jax.random.key(0))
    op = op if recipe != "static" else Fp8DotGeneral.init(recipes.StaticScaling(scale=2.0**-6))
    op = dataclasses.replace(op, one_pass=one_pass)

    @eqx.filter_jit
    def step(op: Any, x: jax.Array, w: jax.Array) -> Any:
        out, pullback = eqx.filter_vjp(lambda op, x, w: op(x, w, MATRIX), op, x, w)
        of_op, of_x, of_w = pullback(g)
        overwrites, rest = fp8.partition_for_grad_overwrite(of_op)
        nothing = jax.tree.map(lambda _: None, rest)
        return (out, of_x, of_w), fp8.apply_updates(op, nothing, overwrites)

    _, op = step(op, x, w)
    results, op = step(op, x, w)
    return results, eqx.filter(op, eqx.is_inexact_array)


def experts(recipe: str, inputs: int = 256) -> Any:
    """Rows of four experts, whose numbers no tile divides: output and gradients of the second step."""
    x, w = random(0, 500, inputs, dtype=jnp.bfloat16), random(1, 4, inputs, 128, dtype=jnp.bfloat16)
    sizes, op = jnp.array([100, 0, 250, 130], jnp.int32), Fp8DotGeneral.init(recipe)

    @eqx.filter_jit
    def step(op: Any, x: jax.Array, w: jax.Array) -> Any:
        def loss(args: Any) -> Any:
            op, x, w = args
            out = op.ragged_dot(x, w, sizes)
            return jnp.sum(jnp.square(out.astype(jnp.float32))), out

        (of_op, *gradients), out = fp8.filter_grad(loss, has_aux=True)((op, x, w))
        overwrites, rest = fp8.partition_for_grad_overwrite(of_op)
        return (out, gradients), fp8.apply_updates(op, jax.tree.map(lambda _: None, rest), overwrites)

    _, op = step(op, x, w)
    return step(op, x, w)[0]


def attention(device: jax.Device) -> Any:
    """Causal attention of grouped queries: output and gradients of the second step."""
    op = Fp8Attention.init(emulate=device.platform == "cpu")
    heads = (4, 2, 2)
    arrays = [random(i, 2, 256, count, 128, dtype=jnp.bfloat16) for i, count in enumerate(heads)]

    @eqx.filter_jit
    def step(op: Any, arrays: Any) -> Any:
        def loss(args: Any) -> Any:
            op, arrays = args
            out = op(*arrays, is_causal=True)
            return jnp.sum(jnp.square(out.astype(jnp.float32))), out

        (of_op, gradients), out = fp8.filter_grad(loss, has_aux=True)((op, arrays))
        overwrites, rest = fp8.partition_for_grad_overwrite(of_op)
        return (out, gradients), fp8.apply_updates(op, jax.tree.map(lambda _: None, rest), overwrites)

    _, op = step(op, arrays)
    return step(op, arrays)[0]


def served(layout: str, rows: int) -> Any:
    """A calibrated layer for inference."""
    layer = eqx.nn.Linear(256, 768, use_bias=False, key=jax.random.key(0))
    layer = eqx.tree_at(lambda l: l.weight, layer, random(0, 768, 256, dtype=jnp.bfloat16))
    loss = lambda layer, x: jnp.mean(jnp.square(jax.vmap(layer)(x).astype(jnp.float32)))
    layer = fp8.calibrate(fp8.fp8_linear_layers(layer), loss, [random(1, 64, 256, dtype=jnp.bfloat16)])
    return eqx.filter_jit(eqx.filter_vmap(quantize_for_inference(layer, layout)))(
        random(2, rows, 256, dtype=jnp.bfloat16)
    )


def trained(
    recipe: str,
    config: dict[str, Any] | None = None,
    layers: dict[str, Any] | None = None,
    change: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> Any:
    """The loss and the gradients' norm in two steps of a small Llama, and how far its first gradients are from bf16's.

    The gradients themselves cannot be compared: a difference of one in a million in the weights changes them by a
    tenth, because some values are then rounded to other neighbors, and others after them.
    """
    sizes = models.TransformerConfig(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, mlp=512, **(config or {}))
    axes = hax.Axis("batch", 4), hax.Axis("position", 128)
    tokens = hax.named(np.random.default_rng(0).integers(0, 256, (4, 128), np.int32), axes)
    step = fp8.TrainStep(_loss, optax.sgd(0.1), **options)

    def first_step(model: Any) -> tuple[Any, Any, np.ndarray]:
        new, *_, metrics = step(model, step.init(model), tokens)
        pairs = zip(*(jax.tree.leaves(fp8.trainable(each)) for each in (model, new)), strict=True)
        return new, metrics, np.concatenate([np.ravel(old - new) for old, new in pairs])

    plain = models.Transformer.init(sizes, key=jax.random.key(0))
    model = change(fp8.fp8_linear_layers(plain, recipe=recipe, **(layers or {})))
    model, first, of_fp8 = first_step(fp8.calibrate(model, _loss, [tokens]))
    *_, of_bf16 = first_step(plain)
    *_, second = step(model, step.init(model), tokens)
    apart = jnp.asarray(np.linalg.norm(of_fp8 - of_bf16) / np.linalg.norm(of_bf16))
    return first["loss"], first["grad_norm"], apart, second["loss"], second["grad_norm"]


def _loss(model: Any, tokens: hax.NamedArray) -> jax.Array:
    logits = fp8.cast_params(model, jnp.bfloat16)(tokens).array.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens.array[:, 1:]).mean()


TRAINED: dict[str, dict[str, Any]] = {
    "a scan": {},
    "blocks in a row": {"config": {"stacked": False}},
    "recomputed blocks": {"config": {"checkpointing": True}},
    "microbatches": {"microbatches": 2},
    "kernels quantized once": {
        "microbatches": 2,
        "quantize_kernels": "once",
        "layers": {"compute_dtype": jnp.bfloat16},
    },
    "norms and activations recomputed": {"config": {"stacked": False, "between": fp8.memory.rematerialized}},
    "compressed activations": {"config": {"stacked": False, "activation": fp8.memory.compressed(models.swiglu)}},
    "shared scales": {"change": fp8.memory.share_input_scales},
}
"""What is trained, and how."""


def cases() -> Iterator[Case]:
    """Each: its name, what a device computes, and how large a difference its format explains."""
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz):
        yield f"casts to {np.dtype(dtype)}", lambda _, dtype=dtype: casts(dtype), 0.0
    yield "quantize-dequantize in jit", lambda _: fake_quantized(), 0.0
    for recipe in recipes.named:
        for name, shape in SHAPES.items():
            for dtype, allowed in ((jnp.float32, FOURTEEN_BITS), (jnp.bfloat16, TWO_ROUNDINGS)):
                allowed = FLIPPED if recipe == "nvfp4" else allowed
                named = f"products, {recipe}, {name}, {np.dtype(dtype)}"
                yield named, lambda _, args=(recipe, shape, dtype): products(*args), allowed
    # On a B200 the first of them multiplies known numbers too.
    for recipe, allowed in (("mxfp8", TWO_ROUNDINGS), ("nvfp4", FLIPPED)):
        args = recipe, (256, 384, 512), jnp.bfloat16
        yield f"products, {recipe}, one pass", lambda _, args=args: products(*args, one_pass=True), allowed
    for recipe in ("delayed", "current", "rowwise", "deepseek"):
        yield f"experts, {recipe}", lambda _, recipe=recipe: experts(recipe), TWO_ROUNDINGS
    # More pieces than the memory of a block holds at once.
    yield "experts, delayed, deep", lambda _: experts("delayed", 4096), TWO_ROUNDINGS
    # cuDNN rounds probabilities before it has the largest score of a row: other values, with as large an error.
    yield "attention", attention, 2.0**-4
    for layout in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A16", "MXFP8"):
        for rows in (1, 64):
            yield f"served, {layout}, {rows} rows", lambda _, args=(layout, rows): served(*args), TWO_ROUNDINGS
    for recipe in ("delayed", "rowwise"):
        for how, options in TRAINED.items() if recipe == "delayed" else (("a scan", {}),):
            named = f"training, {recipe}, {how}"
            yield named, lambda _, recipe=recipe, options=options: trained(recipe, **options), TRAINING


def difference(found: Any, expected: Any) -> float:
    """The norm of the difference over that of the expected; 0 if bits are equal, infinite where one is not finite."""
    found, expected = np.asarray(found), np.asarray(expected)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if found.tobytes() == expected.tobytes():
        return 0.0
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)) or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    a, b = (np.where(np.isfinite(x), x, 0.0) for x in (a, b))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))


def computed_on(device: jax.Device, compute: Callable[[jax.Device], Any]) -> list[np.ndarray]:
    """The arrays of a result."""
    with jax.default_device(device), fp8.devices.Device.of_jax(device).as_default():
        leaves = jax.tree.leaves(compute(device))
        return [np.asarray(x) for x in leaves if eqx.is_array(x) and x.dtype != float0]


def compared(chosen: Iterator[Case], accelerator: jax.Device) -> Iterator[tuple[str, bool, str]]:
    """For each case its name, whether it differs by more than is allowed or failed, and by how much, or why."""
    for name, compute, allowed in chosen:
        try:
            pairs = zip(*(computed_on(d, compute) for d in (accelerator, jax.devices("cpu")[0])), strict=True)
            found = [difference(*pair) for pair in pairs]
            yield name, max(found) > allowed, " ".join("=" if x == 0.0 else f"{x:.1e}" for x in found)
        except Exception as error:  # The others are compared nevertheless.
            at = traceback.extract_tb(error.__traceback__)[-1]
            yield name, True, f"{type(error).__name__} at {at.filename}:{at.lineno}: {str(error)[:500]}"


def compare(chosen: Iterator[Case], accelerator: jax.Device) -> int:
    """Prints a line for each case; returns how many differ by more than is allowed, or failed."""
    wrong = 0
    for name, is_wrong, said in compared(chosen, accelerator):
        wrong += is_wrong
        print(f"{'WRONG' if is_wrong else 'right'}  {name:50s} {said}", flush=True)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Compares, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("word", nargs="*", help="only cases whose names have one of these")
    words = parser.parse_args(arguments).word
    chosen = (case for case in cases() if not words or any(word in case[0] for word in words))
    wrong = compare(chosen, jax.devices()[0])
    print(f"{wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
