"""What is drawn, read back from the figures, is what NumPy computes from the same numbers."""

import importlib.util
import inspect
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from haliax_fp8 import DelayedScaling, plots
from haliax_fp8.recipes import E2M1, E4M3, E4M3FNUZ, E5M2, MostRecent


RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Every figure that a test makes can also be drawn: constrained layouts and labels fail only then."""
    figures = []
    from matplotlib.figure import Figure

    init = Figure.__init__
    monkeypatch.setattr(Figure, "__init__", lambda self, *a, **k: (init(self, *a, **k), figures.append(self))[0])
    yield
    for figure in figures:
        figure.draw_without_rendering()


def line(axes, i):
    return np.asarray(axes.get_lines()[i].get_ydata(), np.float64)


def test_a_notebook_shows_a_figure():
    """Without `%matplotlib inline`, by IPython's rule: a method for the kind of picture."""
    shown = plots.loss_curves({"bf16": [2.0, 1.0]}, baseline="bf16")._repr_png_()
    width, height = (int.from_bytes(shown[i : i + 4], "big") for i in (16, 20))
    assert shown[:8] == b"\x89PNG\r\n\x1a\n" and width == 760 and height > 200


# --- Losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_gap_and_noise_of_a_seed():
    plain, fp8 = RNG.uniform(1.0, 2.0, (3, 20)), RNG.uniform(1.0, 2.0, (2, 20))
    top, bottom = plots.loss_curves({"bf16": plain, "fp8": fp8}, baseline="bf16", steps=range(0, 40, 2)).axes
    np.testing.assert_allclose(line(top, 0), plain.mean(0))
    np.testing.assert_allclose(line(top, 1), fp8.mean(0))
    assert top.get_lines()[1].get_xdata().tolist() == list(range(0, 40, 2))
    np.testing.assert_allclose(line(bottom, 0), 100 * (fp8.mean(0) / plain.mean(0) - 1))
    (band,) = bottom.collections
    noise = 100 * np.sqrt(((plain - plain.mean(0)) ** 2).sum(0) / 2) / plain.mean(0)
    vertices = band.get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([vertices.min(), vertices.max()], [-noise.max(), noise.max()])


@pytest.mark.more
def test_window_is_of_the_steps_before():
    losses = np.asarray([4.0, 2.0, 3.0, 1.0])
    axes = plots.loss_curves({"a": losses}, baseline="a", window=2).axes[0]
    assert line(axes, 0).tolist() == [3.0, 2.5, 2.0]
    assert axes.get_lines()[0].get_xdata().tolist() == [2, 3, 4]


def test_runs_can_be_told_apart_without_colour():
    axes = plots.loss_curves({str(i): np.ones(9) for i in range(8)}, baseline="0").axes[0]
    looks = {(str(curve.get_linestyle()), str(curve._dash_pattern)) for curve in axes.get_lines()}
    assert len(looks) == 8 and len({curve.get_marker() for curve in axes.get_lines()}) == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"runs": {"a": [1.0]}, "baseline": "b"}, "baseline='b' is not one of"),
        ({"runs": [[1.0], [2.0]], "baseline": "a"}, r"runs is a list, but must be a dict .*loss_curves\(\{'a': losses"),
        ({"runs": {"a": [{"loss": 1.0}]}, "baseline": "a"}, r"runs\['a'\] holds dicts, not losses"),
        ({"runs": {"a": [1.0, 2.0], "b": [1.0]}, "baseline": "a"}, r"runs\['b'\] has shape"),
        ({"runs": {"a": [1.0, 2.0]}, "baseline": "a", "window": 3}, "window=3"),
        ({"runs": {"a": [1.0, 2.0]}, "baseline": "a", "steps": [1]}, "steps has shape"),
    ],
)
def test_losses_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        plots.loss_curves(**arguments)


# --- Statistics -------------------------------------------------------------------------------------------------------


def flat(step):
    """Two layers of which the second is first measured at step 10."""
    layers = ("layers.0", "blocks[1].up") if step else ("layers.0",)
    numbers = {f"fp8/{layer}/input/amax": jnp.float32(2.0**step * (1 + i)) for i, layer in enumerate(layers)}
    numbers |= {f"fp8/{layer}/input/underflow": 0.01 * step for layer in layers}
    return numbers | {"loss": 1.0 / (1 + step)}


def test_heatmaps_hold_the_numbers():
    amaxes = [[1.0, 1024.0, 2.0**30], [np.nan, 2048.0, 2.0**31]]
    figure = plots.statistics_heatmaps(list(map(flat, (0, 10, 30))), [0, 10, 30], statistics=["amax", "underflow"])
    amax, underflow = (axes.collections[0] for axes in figure.axes[:2])
    drawn = np.ma.filled(amax.get_array().reshape(2, 3), np.nan)
    np.testing.assert_array_equal(drawn, amaxes)
    assert (amax.norm.vmin, amax.norm.vmax) == (1.0, 2.0**31)
    np.testing.assert_allclose(underflow.get_array().reshape(2, 3)[0], [0.0, 10.0, 30.0])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["layers.0", "blocks[1].up"]
    # The first layer is on top, and columns begin half way between steps.
    assert figure.axes[0].get_ylim() == (2.0, 0.0)
    assert amax.get_coordinates()[0, :, 0].tolist() == [-5.0, 5.0, 20.0, 40.0]


def test_lighter_is_larger():
    """Read in grey: the luminance of the colours rises with the value."""
    figure = plots.statistics_heatmaps([flat(1)], statistics=["amax"])
    colors = figure.axes[0].collections[0].cmap(np.linspace(0.0, 1.0, 64))[:, :3]
    assert (np.diff(colors @ [0.2126, 0.7152, 0.0722]) > 0.0).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: plots.statistics_heatmaps([]), "0 entries"),
        # Without the check of annotations that tests add.
        (lambda: inspect.unwrap(plots.statistics_heatmaps)([7.0]), "measured has a float, not a dict of numbers"),
        (lambda: plots.statistics_heatmaps([flat(0), flat(1)], [1, 1]), "is not increasing"),
        (lambda: plots.statistics_heatmaps([{"a": np.ones(3)}]), r"'a' has shape \(3,\)"),
        (lambda: plots.statistics_heatmaps([flat(0)], statistics=["amx"]), r"'amx' .* \['amax', 'underflow'\]"),
        (lambda: plots.statistics_heatmaps([flat(0)], operand="bias"), "operand='bias'"),
        (lambda: plots.statistics_heatmaps([flat(0)], statistics=[]), "statistics is empty"),
    ],
)
def test_what_is_no_measurement(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Operands and formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_histogram(format):
    x = RNG.standard_normal((64, 64)).astype(np.float32) * np.exp(3.0 * RNG.standard_normal((64, 64))).astype(
        np.float32
    )
    x[0, :3] = 0.0, np.inf, np.nan
    scale = float(np.quantile(np.abs(x[np.isfinite(x)]), 0.99)) / format.max
    (axes,) = plots.operand_histogram(jnp.asarray(x), format, scale).axes
    kept = np.abs(x[np.isfinite(x) & (x != 0)]) / np.float32(scale)
    rounded = np.minimum(kept, format.max).astype(format.dtype).astype(np.float64)
    expected = {
        "become zero": np.mean(rounded == 0),
        "subnormal": np.mean((kept < format.smallest_normal) & (rounded > 0)),
        "clipped": np.mean(kept > format.max),
    }
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == [f"{100 * share:.1f} % {kind}" for kind, share in expected.items()]
    assert expected["clipped"] > 0.005
    # The bars hold everything; those below half of the smallest number hold what becomes zero.
    bars = [(bar.get_x(), bar.get_height()) for bar in axes.patches if bar.get_hatch() is None]
    np.testing.assert_allclose(sum(height for _, height in bars), 100.0)
    below = sum(height for left, height in bars if left < 0.99 * format.smallest_subnormal / 2)
    np.testing.assert_allclose(below, 100 * expected["become zero"], atol=1e-3)


def test_histogram_of_bfloat16_with_its_own_scale():
    (axes,) = plots.operand_histogram(jnp.asarray([1.0, 7.0], jnp.bfloat16), E4M3).axes
    assert "0.0156" in axes.get_xlabel()  # 7 / 448


def test_what_fits_under_delayed_scaling():
    amaxes = np.abs(RNG.standard_normal(20)) + 0.1
    scalings = {"max of 4": DelayedScaling(4, margin=1), "last": DelayedScaling(4, amax_compute=MostRecent())}
    (axes,) = plots.delayed_scaling(amaxes, scalings, E5M2).axes
    limits = [max(amaxes[max(0, i - 4) : i]) * 2.0 for i in range(1, 20)]
    np.testing.assert_allclose(line(axes, 0), limits, rtol=1e-6)
    np.testing.assert_allclose(line(axes, 1), amaxes[:-1], rtol=1e-6)
    clipped = [i for i in range(1, 20) if amaxes[i] > min(limits[i - 1], amaxes[i - 1])]
    assert axes.get_lines()[2].get_xdata().tolist() == clipped
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], amaxes, rtol=1e-6)
    with pytest.raises(ValueError, match="amaxes has shape"):
        plots.delayed_scaling([1.0], scalings)


# --- Of the documentation alone ---------------------------------------------------------------------------------------


@pytest.fixture
def format_figures(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "docs" / "_figures")
    return importlib.import_module("format_figures")


def test_relative_errors_are_those_of_every_float(format_figures):
    """Against ml_dtypes' cast of many more values, and the formats' own bound."""
    for format in (E4M3, E5M2, E4M3FNUZ):
        curve = format_figures.relative_errors([format]).axes[0].get_lines()[0]
        edges, errors = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
        for left, right, error in zip(edges, edges[1:], errors, strict=False):
            x = np.linspace(left, min(right, format.max), 4001)
            exact = np.abs(x.astype(format.dtype).astype(np.float64) - x) / x
            np.testing.assert_allclose(error, 100 * exact.max(), rtol=0.02)
        normal = errors[:-1][edges[:-1] >= format.smallest_normal]
        # `2**-(M + 1) / (1 + 2**-(M + 1))` is that of a value half way above a power of two.
        half = 2.0 ** -(format.mantissa_bits + 1)
        np.testing.assert_allclose(normal, 100 * half / (1 + half), rtol=0.02)


def test_representable_values_are_all(format_figures):
    figure = format_figures.representable_values([E2M1, E4M3], -2.0, 2.0)
    e2m1, e4m3 = (sorted(segment[0, 0] for segment in marks.get_segments()) for marks in figure.axes[0].collections)
    assert e2m1 == [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    patterns = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    assert e4m3 == sorted(set(patterns[np.abs(patterns) <= 2.0]))


# --- Without matplotlib -----------------------------------------------------------------------------------------------


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = pathlib.Path(plots.__file__)
    spec = importlib.util.spec_from_file_location("plots_without_matplotlib", path)
    with pytest.raises(ModuleNotFoundError, match=r"haliax-fp8\[plot\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_package_does_not_load_matplotlib():
    """It takes as long to load as the rest of the package."""
    code = "import sys, haliax_fp8; assert 'matplotlib' not in sys.modules; haliax_fp8.plots; sys.modules['matplotlib']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_work_with_a_device_array():
    figure = plots.operand_histogram(jax.random.normal(jax.random.key(0), (32,)), E4M3)
    assert len(figure.axes) == 1
