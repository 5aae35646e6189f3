"""Experts divided over devices: values, gradients and state are those of one device."""

import dataclasses
import functools
import re
import zlib

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_parallel import exchange
from helpers import assert_same
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._numerics.quantized_array import QuantizedArray
from haliax_fp8._product.grouped.divided import divided_over_devices
from haliax_fp8._product.grouped.one_device import OneDevice
from haliax_fp8.devices.grouped import GroupedImplementation
from haliax_fp8.recipes import E5M2
from haliax_fp8.sharding import send_rows


DEVICES, EXPERTS, INPUTS, OUTPUTS, CAPACITY = 4, 8, 16, 24, 5
# Each device sends as many rows to each other one.
ROWS = DEVICES * DEVICES * CAPACITY
MESH = jax.make_mesh((DEVICES,), ("experts",), axis_types=(AxisType.Auto,))
# Of each device's experts, those that have rows on it: one has none, another device does not fill its rows.
SIZES = jnp.array([20, 0, 3, 17, 10, 10, 6, 8], jnp.int32)
BY_EXPERT = P("experts")


@functools.cache
def problem(dtype=jnp.float32):
    """An op that has a scale, which the new rows exceed; rows, kernels, and what the output is multiplied by."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows, kernels, c = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys, ((ROWS, INPUTS), (EXPERTS, INPUTS, OUTPUTS), (ROWS, OUTPUTS)), strict=True)
    )
    op = fp8.Fp8DotGeneral.init(fp8.DelayedScaling(amax_history_length=4))
    first = eqx.filter_jit(fp8.filter_grad(lambda op: op.ragged_dot(rows / 3, kernels, SIZES).sum()))(op)
    return (fp8.apply_updates(op, jax.tree.map(jnp.zeros_like, op), first), kernels, rows), c


def on_devices(loss, *, check_vma=True, outside=False):
    """The gradients of op, kernels and rows; op and kernels are shared, or each device's own."""
    specs = (P(), BY_EXPERT, BY_EXPERT), BY_EXPERT, BY_EXPERT
    if outside:
        total = lambda *args: lax.psum(loss(*args), "experts")
        mapped = jax.shard_map(total, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return eqx.filter_jit(fp8.filter_grad(mapped))
    return eqx.filter_jit(
        jax.shard_map(fp8.filter_grad(loss), mesh=MESH, in_specs=specs, out_specs=specs[0], check_vma=check_vma)
    )


def of_rows(rows):
    """Rows without what lies beyond those of a device's experts, which one device alone does not have in between."""
    of_experts = [np.asarray(rows[i * ROWS // DEVICES :][: SIZES[2 * i : 2 * i + 2].sum()]) for i in range(DEVICES)]
    return np.concatenate(of_experts)


@pytest.mark.more
@pytest.mark.parametrize(("check_vma", "outside"), [(True, True), (True, False), (False, False)])
def test_under_shard_map(check_vma, outside):
    """An expert without rows among them."""
    (op, kernels, rows), c = problem()
    loss = lambda params, sizes, c: (params[0].ragged_dot(params[2], params[1], sizes) * c).sum()
    got = on_devices(loss, check_vma=check_vma, outside=outside)((op, kernels, rows), SIZES, c)
    # Amaxes count rows that no expert has, so one device has them too, after the others.
    beyond = np.setdiff1d(np.asarray(rows), of_rows(rows)).reshape(-1, INPUTS)
    alone = jnp.concatenate([of_rows(rows), np.zeros_like(beyond)])
    alone = alone.at[len(alone) - len(beyond) :].set(jnp.abs(rows).max())
    beyond_c = jnp.full((len(beyond), OUTPUTS), jnp.abs(c).max())
    expected = eqx.filter_jit(fp8.filter_grad(loss))(
        (op, kernels, alone), SIZES, jnp.concatenate([of_rows(c), beyond_c])
    )
    assert_same(got[:2], expected[:2])
    np.testing.assert_array_equal(of_rows(got[2]), expected[2][: -len(beyond)])
    assert not np.any(got[1][1]) and np.any(got[1][0])


# --- Automatic axes ---------------------------------------------------------------------------------------------------

HOW = [(P(), BY_EXPERT), (BY_EXPERT, BY_EXPERT), (P(None, "experts"), P(None, None, "experts"))]


@pytest.mark.parametrize("specs", HOW, ids=["rows on all devices", "rows divided", "features divided"])
def test_under_automatic_axes(specs):
    """Groups of all rows, whatever is where."""
    (op, kernels, rows), c = problem()
    rows_at, kernels_at = (NamedSharding(MESH, spec) for spec in specs)
    gradients = eqx.filter_jit(fp8.filter_grad(lambda params: (params[0].ragged_dot(*params[1:], SIZES) * c).sum()))
    expected = gradients((op, rows, kernels))
    got = gradients((op, jax.device_put(rows, rows_at), jax.device_put(kernels, kernels_at)))
    assert_same(got[0], expected[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got[1:], expected[1:])


# Shapes of data, and of scales: one for all, for each row or column of the product, for blocks of 8. Those that do not
# fit have a shorter last one.
OPERANDS = {
    "fprop": ((32, 16), (5, 16, 24)),
    "dgrad": ((32, 24), (5, 16, 24)),
    "wgrad": ((32, 16), (32, 24)),
}
SCALES = {
    "one": {name: ((1,) * len(a), (1,) * len(b)) for name, (a, b) in OPERANDS.items()},
    "rows": {"fprop": ((32, 1), (5, 1, 24)), "dgrad": ((32, 1), (5, 16, 1)), "wgrad": ((1, 16), (1, 24))},
    "blocks": {"fprop": ((32, 2), (5, 2, 3)), "dgrad": ((32, 3), (5, 2, 3)), "wgrad": ((4, 16), (4, 24))},
    "blocks that do not fit": {"fprop": ((2, 2), (5, 2, 1)), "dgrad": ((32, 2), (5, 1, 2)), "wgrad": ((2, 1), (1, 2))},
}
AXES = (None, "data", "model", ("data", "model"))


def quantized(shape, scales, seed, uneven):
    rng = np.random.default_rng(seed)
    block = [size // count for size, count in zip(shape, scales, strict=True)]
    if uneven:
        # 20 and 12 of 32 rows, 10 and 6 of 16 inputs, 16 and 8 of 24 outputs.
        block = [
            {32: 20, 16: 10, 24: 16}[n] if count == 2 else b for n, count, b in zip(shape, scales, block, strict=True)
        ]
    data = jnp.asarray(rng.normal(size=shape), jnp.float8_e4m3fn)
    return QuantizedArray(data, jnp.asarray(np.exp2(rng.integers(-2, 3, size=scales)), jnp.float32), tuple(block))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("product", OPERANDS)
def test_divided_products_are_whole_ones(product, scales):
    """Whatever divides the operands and the result, with members or a scale for each group; blocks of uneven sizes."""
    operands = [
        quantized(shape, count, seed, "not" in scales)
        for seed, (shape, count) in enumerate(zip(OPERANDS[product], SCALES[scales][product], strict=True))
    ]
    sizes, rng = jnp.array([7, 0, 12, 1, 9], jnp.int32), np.random.default_rng(zlib.crc32((product + scales).encode()))
    work = OneDevice(product, GroupedImplementation.XLA, 0, False, lax.Precision.HIGHEST, np.dtype(np.float32))
    expected = work(*operands, sizes, None)
    for _ in range(4):
        at = [drawn_spec(x.data.shape, rng) for x in operands]
        of_result = NamedSharding(DATA_AND_MODEL, drawn_spec(expected.shape, rng))
        data = [
            jax.device_put(x.data, NamedSharding(DATA_AND_MODEL, spec)) for x, spec in zip(operands, at, strict=True)
        ]
        multiply = lambda a, b: divided_over_devices(
            work, dataclasses.replace(operands[0], data=a), dataclasses.replace(operands[1], data=b), sizes, None
        )
        got = jax.jit(multiply, out_shardings=of_result)(*data)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4, err_msg=f"{at} {of_result.spec}")


def drawn_spec(shape, rng):
    """Mesh axes for some axes of an array, each of which they divide."""
    spec, left = [], {"data", "model"}
    for size in shape:
        axes = AXES[rng.integers(len(AXES))]
        names = set() if axes is None else {axes} if isinstance(axes, str) else set(axes)
        fits = names <= left and size % 2 ** len(names) == 0
        spec.append(axes if fits else None)
        left -= names if fits else set()
    return P(*spec)


def test_each_device_multiplies_its_share_of_the_rows():
    """Even where all devices have all rows. Gradients of kernels are added up to where the kernels are."""
    (op, kernels, rows), _ = problem(jnp.bfloat16)
    everywhere, by_expert = NamedSharding(MESH, P()), NamedSharding(MESH, BY_EXPERT)
    loss = lambda params: params[0].ragged_dot(params[1], params[2], SIZES).sum()
    gradients = jax.jit(
        lambda op, kernels, rows: fp8.filter_grad(loss)((op, rows, kernels)),
        in_shardings=(everywhere, by_expert, everywhere),
        out_shardings=(everywhere, everywhere, by_expert),
    )
    text = gradients.lower(op, kernels, rows).compile().as_text()
    products = re.findall(r"= f32\[([0-9,]+)\]\S* dot\((.*?)\)", text)
    shapes = dict(re.findall(r"^\s*(?:ROOT )?(%\S+) = \w+\[([0-9,]+)\]", text, re.MULTILINE))
    of_products = [shape for out, names in products for shape in (out, *map(shapes.get, names.split(", ")))]
    axes = {size for shape in of_products for size in shape.split(",")}
    assert str(ROWS // DEVICES) in axes and str(ROWS) not in axes
    assert re.search(r" reduce-scatter\(", text)


# --- Rows sent to the devices of their experts ------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_sent_in_fp8_give_the_same(dtype):
    """Products, gradients and state, bit for bit, although a row exceeds the scale; FP8 is what travels.

    That row goes to another device, which has to know the amax of all.
    """
    (op, kernels, rows), c = problem(dtype)
    params = op, kernels, (rows / 4).at[CAPACITY].multiply(64)

    def gradients(send):
        loss = lambda params, sizes, c: (params[0].ragged_dot(send(params[2], params[0]), params[1], sizes) * c).sum()
        return on_devices(loss, outside=True)

    sent = gradients(lambda rows, op: send_rows(rows, op, exchange))
    assert_same(sent(params, SIZES, c), gradients(lambda rows, op: exchange(rows))(params, SIZES, c))
    text = sent.lower(params, SIZES, c).as_text()
    sends = [line for line in text.splitlines() if "stablehlo.all_to_all" in line]
    assert sum("f8E4M3FN" in line for line in sends) == 1 and len(sends) == 2


def test_gradients_sent_in_fp8():
    """Each element is off by half a step of E5M2 at most: 1/8 of itself, or of the smallest normal number.

    A row is so small that amax / max would be flushed to zero.
    """
    (_, _, rows), c = problem()
    op = problem()[0][0]

    def back(gradient_format):
        loss = lambda rows, c: (send_rows(rows, op, exchange, gradient_format=gradient_format) * c).sum()
        return jax.jit(jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=(BY_EXPERT, BY_EXPERT), out_specs=BY_EXPERT))

    c = c[:, :INPUTS].at[0].multiply(1e-36).at[0, 0].set(0)
    exact, rounded = back(None)(rows, c), back(E5M2)(rows, c)
    scale = np.maximum(np.abs(exact).max(-1, keepdims=True) / E5M2.max, 2.0**-126)
    assert exact.any(-1).all()
    assert np.all(np.abs(rounded - exact) <= np.maximum(np.abs(exact), 2.0**-14 * scale) / 8 * (1 + 1e-5))
    assert np.any(rounded != exact)


def test_what_cannot_be_sent():
    with pytest.raises(ValueError, match="recipe='delayed'"):
        send_rows(jnp.ones((4, 8)), fp8.Fp8DotGeneral.init("current"), lambda x: x)


# --- haliax.nn.MoELinear with use_gmm: each device multiplies its rows ------------------------------------------------

Experts, In, Out, Rows = hax.make_axes(experts=4, embed=8, mlp=16, rows=24)
DATA_AND_MODEL = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
OF_ALL = (10, 0, 9, 5)


def sizes_of(sizes):
    return hax.named(jnp.array(sizes, jnp.int32), Experts)


def gmm_problem():
    keys = jax.random.split(jax.random.key(0), 3)
    layer = hnn.MoELinear.init(Experts, In, Out, key=keys[0], use_gmm=True)
    return layer, hax.random.normal(keys[1], (Rows, In)), hax.random.normal(keys[2], (Rows, Out))


def gmm_gradients(layer, x, c, sizes, mapping=None):
    loss = lambda args, sizes: hax.sum(args[0](args[1], sizes) * c).scalar()
    gradients = eqx.filter_jit(fp8.filter_grad(loss))
    if mapping is None:
        return gradients((layer, x), sizes_of(sizes))
    with jax.set_mesh(DATA_AND_MODEL), hax.axis_mapping(mapping):
        return gradients((layer, x), sizes_of(sizes))


@pytest.mark.more
@pytest.mark.parametrize(
    "mapping", [{"mlp": "model"}, {"embed": "model"}, {"mlp": "model", "embed": "data"}, {"experts": "model"}], ids=str
)
def test_use_gmm_with_whole_rows(mapping):
    """Outputs, inputs (whose parts are summed) or experts are divided; rows are not. Sums of parts round otherwise."""
    layer, x, c = gmm_problem()
    converted = fp8.fp8_linear_layers(layer, amax_history_length=4)
    got = gmm_gradients(converted, x, c, OF_ALL, mapping)
    expected = gmm_gradients(converted, x, c, OF_ALL)
    assert_same(got[0].dot_general, expected[0].dot_general)
    for actual, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)
    assert got[0].use_gmm and fp8.restore_linear_layers(converted) == layer


@pytest.mark.more
@pytest.mark.parametrize(
    ("mapping", "sizes", "of_devices"),
    [
        ({"rows": "data"}, (5, 0, 4, 3), [(5, 0, 4, 3)] * 2),
        # Rows have been sent to the devices of their experts.
        ({"rows": "data", "experts": "data"}, (5, 7, 0, 11), [(5, 7, 0, 0), (0, 0, 0, 11)]),
    ],
    ids=["the same experts", "experts of their own"],
)
@pytest.mark.parametrize("scale_per_expert", [False, True])
def test_use_gmm_with_rows_of_each_device(mapping, sizes, of_devices, scale_per_expert):
    layer, x, c = gmm_problem()
    layer = fp8.fp8_linear_layers(layer, amax_history_length=4, scale_per_expert=scale_per_expert)

    def one_after_the_other(args):
        layer, x = args
        halves = [hax.dslice(first, Rows.size // 2) for first in (0, Rows.size // 2)]
        outs = [layer(x["rows", half], sizes_of(s)) for half, s in zip(halves, of_devices, strict=True)]
        return sum(hax.sum(out * c["rows", half]).scalar() for out, half in zip(outs, halves, strict=True))

    expected = eqx.filter_jit(fp8.filter_grad(one_after_the_other))((layer, x))
    got = gmm_gradients(layer, x, c, sizes, mapping)
    assert_same(got[0].dot_general, expected[0].dot_general)
    for actual, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)
