"""Kernels that quantize operands in blocks, in Pallas' interpreter, beside the library's own quantization."""

import contextlib
import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8
from haliax_fp8._numerics.rounding import Rounding
from haliax_fp8._product.blackwell.check import wrong_products
from haliax_fp8._product.blackwell.primitive import BlockUse, as_quantized, by_kernel, by_xla
from haliax_fp8._product.blackwell.swizzle import in_rows
from haliax_fp8.devices import Device
from haliax_fp8.formats import E2M1, E4M3, E5M2
from haliax_fp8.recipes import DelayedScaling, HadamardScaling, MXFP8Scaling, NVFP4Scaling


NEAREST, DRAWN = Rounding.TO_NEAREST, Rounding.STOCHASTIC
NV, SQUARE, ROTATED = NVFP4Scaling(), NVFP4Scaling(square=True), HadamardScaling(NVFP4Scaling())
DELAYED = NVFP4Scaling(delayed=DelayedScaling())
USES = {
    "mxfp8": [BlockUse(MXFP8Scaling(), E4M3, NEAREST, axes, 24) for axes in ((1,), (0,))],
    "mxfp8 in E5M2": [BlockUse(MXFP8Scaling(), E5M2, NEAREST, axes, 24) for axes in ((1,), (0,))],
    "nvfp4, input": [BlockUse(NV, E2M1, NEAREST, (1,), 1), BlockUse(ROTATED, E2M1, NEAREST, (0,), 1)],
    "nvfp4, kernel": [BlockUse(SQUARE, E2M1, NEAREST, (1,), 7), BlockUse(SQUARE, E2M1, NEAREST, (0,), 7)],
    "nvfp4, output_grad": [BlockUse(NV, E2M1, DRAWN, (1,), 24), BlockUse(ROTATED, E2M1, DRAWN, (0,), 24)],
    "nvfp4_delayed, input": [
        BlockUse(DELAYED, E2M1, NEAREST, (1,), 1),
        BlockUse(HadamardScaling(DELAYED), E2M1, DRAWN, (0,), 1),
    ],
}
# Below the amax of some data, above that of others.
STORED = jnp.float32(2.0**-4)
WORDS = [jax.random.key_data(jax.random.key(i, impl="threefry2x32")) for i in (3, 4)]


def data(kind, shape=(256, 384)):
    random = np.random.default_rng(0)
    x = random.normal(size=shape)
    # Above 2**-126 after a rotation: devices flush smaller sums to zero, or not, as they like.
    tiny = x * 1e-30 * 10.0 ** random.integers(-3, 3, shape)
    sparse = np.where(random.random(shape) < 0.5, 0.0, x)
    sparse[:40, :70] = 0.0
    return {
        "normal": x,
        "outliers": np.where(random.random(shape) < 0.01, 1e4 * x, x),
        "tiny": tiny,
        "subnormal": x * 1e-37 * 10.0 ** random.integers(-3, 3, shape),
        "huge": 1e37 * x,
        "not finite": np.where(random.random(shape) < 0.003, random.choice([np.inf, -np.inf, np.nan], shape), sparse),
    }[kind]


@functools.cache
def computations(name):
    """By the library; by kernels for both uses at once, and for each alone."""
    uses = USES[name]
    others = lambda uses: [
        *[word for use, word in zip(USES[name], WORDS, strict=True) if use in uses and use.rounding.needs_key],
        *[STORED for _ in uses[:1] if uses[0].is_delayed],
    ]

    def each(x):
        results = [by_kernel(x, *others([use]), uses=(use,), interpret=True) for use in uses]
        amaxes = [result.pop() for result in results if uses[0].is_delayed]
        return [y for result in results for y in result] + amaxes[:1]

    return (
        jax.jit(lambda x: by_xla(x, *others(uses), uses=tuple(uses))),
        jax.jit(lambda x: by_kernel(x, *others(uses), uses=tuple(uses), interpret=True)),
        jax.jit(each),
    )


def bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny", "subnormal", "huge", "not finite"])
@pytest.mark.parametrize("name", USES)
def test_kernels_give_the_librarys_bits(name, kind):
    """Codes, scales, scales in cuDNN's order, the scale of the tensor: of both uses together, and of each alone."""
    if kind == "subnormal" and any(isinstance(use.scaling, HadamardScaling) for use in USES[name]):
        kind = "tiny"
    x, uses = jnp.asarray(data(kind), jnp.bfloat16), USES[name]
    expected, found, alone = [compute(x) for compute in computations(name)]
    count = len(expected) // 2
    for results in (found, alone):
        for i, (a, b) in enumerate(zip(expected, results, strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if i % count or name.startswith("mxfp8") or i == 2 * count:
                assert (bits(a) == bits(b)).all()
                continue
            # E2M1 has no NaN: where the scale is NaN, any codes will do.
            size, axis = uses[0].blocks.size, uses[i // count].contracted[-1]
            has_value = np.repeat(np.asarray(expected[i + 1]) != 0x7F, size, axis)
            codes_a, codes_b = (np.asarray(y.astype(jnp.float32)).view(np.uint32) for y in (a, b))
            assert (codes_a == codes_b)[has_value].all() and has_value.any()


def test_cudnns_order_is_that_of_its_documentation():
    """The scale of row r and block k is at `(r % 32) * 16 + (r // 32) * 4 + k` of its 512 bytes."""
    x = jnp.asarray(np.exp2(np.arange(128)[:, None] // 2 - np.arange(128) // 32.0), jnp.bfloat16)
    _, scales, swizzled = by_kernel(x, uses=(USES["mxfp8"][0],), interpret=True)
    for row, block in np.ndindex(128, 4):
        assert swizzled[0, 0, row % 32 * 16 + row // 32 * 4 + block] == scales[row, block]
    assert len(np.unique(scales)) > 60


def _quantizer(change, known):
    def quantize(x, uses):
        if (key := (x.tobytes(), uses)) not in known:
            words = [WORDS[0] for use in uses if use.rounding.needs_key]
            known[key] = by_kernel(x, *words, uses=uses, interpret=True)
        return as_quantized([change(i, y) for i, y in enumerate(known[key])], uses)

    return quantize


def _multiplied(a, b, dimensions):
    """From data, scales in cuDNN's order and scales of tensors alone."""
    values = []
    for x, axis in ((a, dimensions.lhs_contract[0]), (b, dimensions.rhs_contract[0])):
        scales = in_rows(x.swizzled)
        kind = jnp.float8_e8m0fnu if x.tensor_scale is None else jnp.float8_e4m3fn
        scales = np.asarray(jax.lax.bitcast_convert_type(scales, kind).astype(jnp.float32), np.float64)
        scales = np.repeat(scales, x.block[axis], 1)
        one = 1.0 if x.tensor_scale is None else float(x.tensor_scale.reshape(()))
        values.append(np.asarray(x.data.astype(jnp.float32), np.float64) * (scales if axis else scales.T) * one)
    (a, b), dims = values, dimensions
    return jnp.asarray(np.tensordot(a, b, (dims.lhs_contract, dims.rhs_contract)), jnp.bfloat16)


def test_the_first_use_finds_what_is_wrong():
    """Right numbers pass; scales in another order, shifted codes and a wrong scale of the tensor do not."""
    known = {}
    assert not list(wrong_products(_quantizer(lambda i, y: y, known), _multiplied))

    wrong = {
        "order": lambda i, y: y.reshape(*y.shape[:2], 32, 4, 4).swapaxes(3, 4).reshape(y.shape) if i == 2 else y,
        "codes": lambda i, y: jnp.roll(y, 1, 0) if i == 0 else y,
        "unit": lambda i, y: 2 * y if i == 3 else y,
    }
    found = {name: list(wrong_products(_quantizer(change, known), _multiplied)) for name, change in wrong.items()}
    assert len(found["order"]) == len(found["codes"]) == 5
    assert found["unit"] == ["nvfp4 along rows", "nvfp4 in squares", "nvfp4, rotated"]


# --- What is traced for a B200, evaluated here by XLA -----------------------------------------------------------------


def _model(recipe, one_pass, bias=True):
    layer = eqx.nn.Linear(256, 384, use_bias=bias, key=jax.random.key(0))
    return fp8.fp8_linear_layers(layer, recipe=recipe, one_pass=one_pass, emulate=True)


def _traced(way, recipe, rows, *, one_pass, device="b200"):
    """Output and gradients of a layer, of a program made for a device."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 256)), jnp.bfloat16)

    def loss(layer, x):
        layer = fp8.with_rounding_keys(fp8.cast_params(layer, jnp.bfloat16), jax.random.key(5))
        out = way(layer, x)
        return (out.astype(jnp.float32) ** 2).mean(), out

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True))
    with contextlib.nullcontext() if device == "cpu" else Device.by_name(device).as_default():
        return gradients.trace(_model(recipe, one_pass), x)


def _computed(traced, recipe, rows, *, one_pass):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 256)), jnp.bfloat16)
    compiled = traced.lower(lowering_platforms=("cpu",)).compile()
    return jax.tree.leaves(compiled(_model(recipe, one_pass), x))


def _rows(layer, x):
    return jax.vmap(layer)(x)


def _in_scan(layer, x):
    return jax.lax.scan(lambda _, part: (None, _rows(layer, part)), None, x.reshape(2, -1, 256))[1]


WAYS = {
    "rows": (_rows, 256),
    "nested vmap": (lambda layer, x: jax.vmap(jax.vmap(layer))(x.reshape(2, -1, 256)), 256),
    "scan": (_in_scan, 256),
    "odd": (_rows, 200),
    "checkpoint": (lambda layer, x: jax.checkpoint(_rows)(layer, x), 256),
}


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_delayed"])
@pytest.mark.parametrize("way", WAYS)
def test_transformations_give_the_same_numbers(way, recipe):
    function, rows = WAYS[way]
    traced = [_traced(function, recipe, rows, one_pass=one_pass) for one_pass in (True, False)]
    assert "fp8_quantize_blocks" in str(traced[0].jaxpr)
    results = [_computed(x, recipe, rows, one_pass=i == 0) for i, x in enumerate(traced)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.more
def test_one_use_may_have_a_stored_scale_and_the_other_not():
    """Each is quantized by kernels of its own."""
    named = fp8.recipes.named
    recipe = dataclasses.replace(named["nvfp4_delayed"], input_for_wgrad=named["nvfp4"].input_for_wgrad)
    traced = [_traced(_rows, recipe, 256, one_pass=one_pass) for one_pass in (True, False)]
    assert "fp8_quantize_blocks" in str(traced[0].jaxpr)
    results = [_computed(x, recipe, 256, one_pass=i == 0) for i, x in enumerate(traced)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("device", ["b200", "h100", "cpu"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_delayed", "deepseek", "delayed"])
def test_which_programs_have_kernels(recipe, device):
    """Those of two recipes for a B200, where asked for."""
    traced = lambda one_pass: str(_traced(_rows, recipe, 256, one_pass=one_pass, device=device).jaxpr)
    has_kernel = device == "b200" and recipe in ("mxfp8", "nvfp4", "nvfp4_delayed")
    assert ("fp8_quantize_blocks" in traced(True)) == has_kernel and "fp8_quantize_blocks" not in traced(False)
