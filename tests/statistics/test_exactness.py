"""Statistics of the recipe `current` equal NumPy's in float64 under every transformation, and on eight devices.

Run as a program, on as many devices as XLA's flags say, it prints what eight devices measure as JSON.
"""

import json
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import matrix_product
import numpy as np
import optax
import pytest
import recipe_reference as reference
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix_product import MATRIX, loss

import haliax_fp8 as fp8
from haliax_fp8.statistics import every


ROWS, IN, OUT = 24, 160, 32
FIELDS = (
    "amax",
    "scale",
    "saturation",
    "underflow",
    "last_bin",
    "error",
    "rms_error",
    "norm",
    "dynamic_range",
    "kurtosis",
    "wide_rows",
    "nonfinite",
)


def tensors():
    """Wide distributions, so that each format flushes something to zero; the rows of a device differ from the next.

    Every third row and every fourth column is small.
    """
    rng = np.random.default_rng(0)
    shapes = (ROWS, IN), (IN, OUT), (ROWS, OUT)
    arrays = tuple((rng.standard_normal(s) * np.exp2(rng.integers(-20, 4, s))).astype(np.float32) for s in shapes)
    for x in arrays:
        x[::3] /= 64
        x[:, ::4] /= 64
    return arrays


def share_of_wide_rows(x, contracted):
    """How many of the rows that are not zero reach an eighth of the largest."""
    amaxes = np.abs(x).max(contracted)
    return (amaxes >= amaxes.max() / 8).sum() / (amaxes > 0).sum()


def expected(x, format, contracted):
    """Every statistic in float64."""
    data, scale = reference.current(x, format)
    codes, scale = data.astype(np.float64), float(np.asarray(scale).reshape(()))
    x, values = x.astype(np.float64), codes * scale
    centered = x - x.mean()
    largest = {"E4M3": 448.0, "E5M2": 57344.0}[format]
    return {
        "amax": np.abs(x).max(),
        "scale": scale,
        "saturation": 0.0,
        "underflow": ((values == 0) & (x != 0)).mean(),
        "last_bin": (np.abs(codes) == largest).mean(),
        "error": ((x - values) ** 2).sum() / (x**2).sum(),
        "rms_error": np.sqrt(((x - values) ** 2).mean()),
        "norm": np.sqrt((x**2).sum()),
        "dynamic_range": np.log2(np.abs(x).max() / np.abs(x)[x != 0].min()),
        "kurtosis": (centered**4).mean() / (centered**2).mean() ** 2,
        "wide_rows": share_of_wide_rows(x, contracted),
        "nonfinite": 0.0,
    }


def of_all(arrays):
    """Of input, kernel and output gradient, with the axis that fprop or dgrad sums over."""
    return [expected(x, *how) for x, how in zip(arrays, (("E4M3", 1), ("E4M3", 0), ("E5M2", 1)), strict=True)]


def assert_equal(measured, rows):
    """`measured` has three numbers for each field, `rows` one dictionary for each operand."""
    for field in FIELDS:
        # Sums of squares in float32.
        wanted = [row[field] for row in rows]
        np.testing.assert_allclose(measured[field], wanted, rtol=1e-4, atol=1e-12, err_msg=field)


def measure(loss_fn, *arrays):
    """Each field of the only op."""
    op = fp8.Fp8DotGeneral.init("current")
    (got,) = eqx.filter_jit(lambda op, *a: fp8.quantization_statistics(op, loss_fn, *a))(op, *arrays).of_ops
    return {field: np.asarray(getattr(got, field)).tolist() for field in FIELDS}


# --- Transformations --------------------------------------------------------------------------------------------------


def checkpointed(op, x, w, c):
    return eqx.filter_checkpoint(loss)(op, x, w, c)


def mapped_over_rows(op, x, w, c):
    return jax.vmap(lambda row, g: (g * op(row[None], w, MATRIX)[0]).sum())(x, c).sum()


def mapped_twice(op, x, w, c):
    in_two = lambda a: a.reshape(2, -1, a.shape[-1])
    rows = lambda x, c: jax.vmap(lambda row, g: (g * op(row[None], w, MATRIX)[0]).sum())(x, c).sum()
    return jax.vmap(rows)(in_two(x), in_two(c)).sum()


def scanned_once(op, x, w, c):
    """A scan of one step, in which the loss is computed."""
    return lax.scan(lambda total, a: (total + loss(op, a[0], w, a[1]), None), jnp.float32(0.0), (x[None], c[None]))[0]


WHOLE = {"jit": loss, "checkpoint": checkpointed, "vmap": mapped_over_rows, "twice": mapped_twice, "scan": scanned_once}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.more] if n != "vmap" else []) for n in WHOLE])
def test_a_transformation_measures_the_whole_operand(name):
    arrays = tensors()
    assert_equal(measure(WHOLE[name], *map(jnp.asarray, arrays)), of_all(arrays))


@pytest.mark.more
def test_a_scan_over_parts_measures_the_largest_of_each_number():
    arrays = x, w, c = tensors()
    in_three = lambda a: a.reshape(3, -1, a.shape[-1])

    def parts(op, x, w, c):
        add = lambda total, part: (total + loss(op, part[0], w, part[1]), None)
        return lax.scan(add, jnp.float32(0.0), (in_three(x), in_three(c)))[0]

    of_parts = [of_all((a, w, b)) for a, b in zip(in_three(x), in_three(c), strict=True)]
    largest = [{field: max(part[i][field] for part in of_parts) for field in FIELDS} for i in range(3)]
    assert_equal(measure(parts, *map(jnp.asarray, arrays)), largest)


@pytest.mark.more
def test_microbatches_measure_the_largest_of_each_number():
    x, w, c = tensors()
    layer = eqx.nn.Linear(IN, OUT, use_bias=False, key=jax.random.key(0))
    model = fp8.fp8_linear_layers(eqx.tree_at(lambda m: m.weight, layer, jnp.asarray(w.T)), recipe="current")
    step = fp8.TrainStep(lambda m, x, c: (jax.vmap(m)(x) * c).sum(), optax.sgd(0.0), microbatches=4, monitor=every(1))
    _, _, metrics = step(model, step.init(model), jnp.asarray(x), jnp.asarray(c))
    # A microbatch has every fourth row; the mean over them divides the output's gradient by their number.
    of_parts = [of_all((x[i::4], w, c[i::4])) for i in range(4)]
    largest = [{field: max(part[i][field] for part in of_parts) for field in FIELDS} for i in range(3)]
    operands = ("input", "kernel", "output_grad")
    assert_equal({field: [metrics[f"fp8/model/{name}/{field}"] for name in operands] for field in FIELDS}, largest)


# --- Experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("sizes", [(7, 0, 12), (10, 14, 0)])
def test_each_expert_is_measured_apart(sizes):
    """With scales that each expert has of its own; the last rows belong to none in the first case."""
    x, _, c = tensors()
    w = np.stack([tensors()[1] * 2.0**i for i in range(3)])
    scales = np.float32([2.0**-5, 2.0**-4, 2.0**-3])
    op = fp8.Fp8DotGeneral.init("delayed", groups=hax.Axis("experts", 3))
    scale = jnp.broadcast_to(jnp.asarray(scales)[:, None], (3, 3))
    op = eqx.tree_at(lambda op: op.state, op, op.state.with_scale(scale))
    loss = lambda op, x, w, c: (c * op.ragged_dot(x, w, jnp.asarray(sizes))).sum()
    (got,) = eqx.filter_jit(fp8.quantization_statistics)(op, loss, *map(jnp.asarray, (x, w, c))).of_ops
    ends = np.cumsum(sizes)
    for expert, (size, end, scale) in enumerate(zip(sizes, ends, scales, strict=True)):
        if size == 0:
            assert np.isnan(got.amax[expert]).all()
            continue
        operands = x[end - size : end], w[expert], c[end - size : end]
        for i, (operand, name) in enumerate(zip(operands, ("E4M3", "E4M3", "E5M2"), strict=True)):
            values = reference.cast(operand / scale, name).astype(np.float64) * scale
            wide = operand.astype(np.float64)
            centered = wide - wide.mean()
            row = {
                "amax": np.abs(wide).max(),
                "scale": scale,
                "underflow": ((values == 0) & (wide != 0)).mean(),
                "error": ((wide - values) ** 2).sum() / (wide**2).sum(),
                "rms_error": np.sqrt(((wide - values) ** 2).mean()),
                "norm": np.sqrt((wide**2).sum()),
                "kurtosis": (centered**4).mean() / (centered**2).mean() ** 2,
                "wide_rows": share_of_wide_rows(wide, 0 if i == 1 else 1),
                "active": 1.0,
            }
            for field, value in row.items():
                actual = float(getattr(got, field)[expert, i])
                np.testing.assert_allclose(actual, value, rtol=1e-4, err_msg=f"expert {expert}, {i}: {field}")


def test_the_share_of_experts_with_rows():
    x, _, c = tensors()
    w = jnp.asarray(np.stack([tensors()[1]] * 4))
    op = fp8.Fp8DotGeneral.init("current")
    loss = lambda op, x, w, c: (c * op.ragged_dot(x, w, jnp.asarray([4, 0, 20, 0]))).sum()
    (got,) = eqx.filter_jit(fp8.quantization_statistics)(op, loss, jnp.asarray(x), w, jnp.asarray(c)).of_ops
    assert got.active.tolist() == [0.5, 1.0, 0.5]
    np.testing.assert_allclose(got.norm[0], np.sqrt((x.astype(np.float64) ** 2).sum()), rtol=1e-5)


# --- Ages of scales ---------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_ages_of_scales_are_those_of_the_next_step():
    """Those of the largest amaxes in the histories after the step; operands without history have none."""
    model = fp8.fp8_linear_layers(eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0)), recipe="delayed")
    step = fp8.TrainStep(lambda m, x: (jax.vmap(m)(x) ** 2).mean(), optax.sgd(0.1), monitor=every(1))
    opt_state, x = step.init(model), jax.random.normal(jax.random.key(1), (16, 16))
    for i, factor in enumerate((1.0, 4.0, 2.0, 1.0)):
        model, opt_state, metrics = step(model, opt_state, factor * x)
        ages = {name: float(x) for name, x in metrics.items() if name.endswith("/scale_age")}
        # The newest, then from the oldest on.
        by_age = lambda history: [history[0], *history[:0:-1]]
        ops = {f"layers.{n}": layer.dot_general for n, layer in enumerate(model.layers)}
        assert ages == {
            f"fp8/{layer}/{name}/scale_age": np.argmax(by_age(op.amax_history(name)))
            for layer, op in ops.items()
            for name in ("input", "kernel", "output_grad")
        }
        assert ages["fp8/layers.0/input/scale_age"] == max(0, i - 1)
    current = fp8.fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)), recipe="current")
    measured = eqx.filter_jit(fp8.quantization_statistics)(current, lambda m, x: (jax.vmap(m)(x) ** 2).mean(), x)
    assert not any(name.endswith("scale_age") for name in measured.flat())
    flat = measured.flat()
    np.testing.assert_allclose(flat["fp8/model/input/mse"], flat["fp8/model/input/rms_error"] ** 2)
    noise = np.sqrt(3 * flat["fp8/model/output_grad/error"])
    np.testing.assert_allclose(flat["fp8/model/output_grad/over_noise"], 1 / noise, rtol=1e-6)


# --- Devices ----------------------------------------------------------------------------------------------------------


def layouts():
    """How devices divide input, kernel and the output's gradient."""
    automatic = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    explicit = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    return {
        "rows": (automatic, (P("d"), P(), P("d"))),
        "contracted": (automatic, (P(None, "d"), P("d"), P())),
        "explicit": (explicit, (P("d", None), P(None, "m"), P("d", "m"))),
    }


def with_a_nan(arrays):
    x, w, c = arrays
    return np.where(np.arange(x.size).reshape(x.shape) == 7, np.float32(np.nan), x), w, c


def with_parts_alike(arrays):
    """Two devices hold the same rows of the input; several hold zeros alone, as of padding and of masked tokens."""
    x, w, c = (x.copy() for x in arrays)
    x[3:6], x[6:12], c[12:] = x[:3], 0.0, 0.0
    return x, w, c


def on_devices():
    """What is measured with each layout, and inside `shard_map`."""
    arrays, by_layout = tensors(), {}
    for name, (mesh, specs) in layouts().items():
        divided = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        with jax.set_mesh(mesh):
            by_layout[name] = measure(loss, *divided)
    mesh, specs = layouts()["rows"]
    whole = lambda op, *a: lax.psum(loss(op, *a), "d")
    mapped = jax.shard_map(whole, mesh=mesh, in_specs=(P(), *specs), out_specs=P())
    by_layout["shard_map"] = measure(mapped, *map(jnp.asarray, arrays))
    by_layout["alike"] = measure(mapped, *map(jnp.asarray, with_parts_alike(arrays)))
    by_layout["of NaN"] = measure(mapped, *map(jnp.asarray, with_a_nan(arrays)))

    def inside(op, *arrays):
        (got,) = fp8.quantization_statistics(op, loss, *arrays).of_ops
        return {field: getattr(got, field) for field in FIELDS}

    op = fp8.Fp8DotGeneral.init("current")
    unchecked = jax.shard_map(inside, mesh=mesh, in_specs=(P(), *specs), out_specs=P(), check_vma=False)
    measured = eqx.filter_jit(unchecked)(op, *map(jnp.asarray, arrays))
    by_layout["unchecked"] = {field: np.asarray(x).tolist() for field, x in measured.items()}
    return by_layout


@pytest.mark.more
def test_eight_devices_measure_the_whole_operand():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(str(pathlib.Path(m.__file__).parent) for m in (reference, matrix_product)),
    }
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    by_layout, rows = json.loads(run.stdout.splitlines()[-1]), of_all(tensors())
    # The scale is NaN, and with it each value on the device that has it; what is measured of the operand alone is not.
    of_nan, (x, _, _) = by_layout.pop("of NaN"), with_a_nan(tensors())
    finite = x[np.isfinite(x)].astype(np.float64)
    assert of_nan["nonfinite"] == [1.0, 0.0, 0.0] and np.isnan(of_nan["error"][0])
    np.testing.assert_allclose(of_nan["norm"][0], np.sqrt((finite**2).sum()), rtol=1e-5)
    centered = finite - finite.mean()
    np.testing.assert_allclose(of_nan["kurtosis"][0], (centered**4).mean() / (centered**2).mean() ** 2, rtol=1e-4)
    assert_equal({field: values[1:] for field, values in of_nan.items()}, rows[1:])
    assert_equal(by_layout.pop("alike"), of_all(with_parts_alike(tensors())))
    assert set(by_layout) == {"rows", "contracted", "explicit", "shard_map", "unchecked"}
    for name, measured in by_layout.items():
        try:
            assert_equal(measured, rows)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


if __name__ == "__main__":
    print(json.dumps(on_devices()))
