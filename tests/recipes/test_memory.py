"""What a scaling remembers is an object of its own: made once, compared by its fields, and one may write another."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from matrix_product import loss, table

import haliax_fp8 as fp8
from haliax_fp8.recipes import (
    FP8_UNITS,
    AbstractMemory,
    AbstractScaling,
    MostRecent,
    NVFP4Scaling,
    StaticScaling,
    amaxes_of_rows,
    quantize_by_stored_scale,
    scale_of_amax,
)
from haliax_fp8.recipes.scaling import MeasuredScaling


SCALINGS = {scaling: None for recipe in fp8.recipes.named.values() for scaling in recipe.scalings}


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_a_scaling_stores_its_scale_if_it_remembers_more_than_statistics(scaling):
    is_stateful = isinstance(scaling, fp8.DelayedScaling | StaticScaling)
    assert scaling.stores_scale == is_stateful
    # In NVFP4 the state has one of two scales.
    in_two_levels = isinstance(scaling, NVFP4Scaling) and scaling.delayed is not None
    assert (scaling.memory is not None) == (is_stateful or in_two_levels)
    measured = MeasuredScaling(scaling, fp8.recipes.E4M3)
    assert measured.memory is not None and measured.stores_scale == is_stateful
    assert fp8.Recipe.of(scaling).is_stateful == (scaling.memory is not None)
    assert fp8.Recipe.of(measured).is_stateful


@dataclasses.dataclass(frozen=True)
class Last(AbstractMemory):
    """The scale of the last amax, computed with one division."""

    numbers: ClassVar[int] = 1

    @property
    def first_row(self):
        return (1.0, 0.0)

    def measure(self, x, quantized, ensemble):
        return jnp.max(jnp.abs(x), axis=tuple(range(ensemble, x.ndim)), initial=0.0)[..., None, None]

    def head(self, rows, measured, limits):
        return jnp.concatenate([measured / jnp.asarray(limits, jnp.float32)[:, None], measured], axis=-1)


@dataclasses.dataclass(frozen=True)
class OfLast(AbstractScaling):
    """A scaling of one's own."""

    units = FP8_UNITS
    per_axis: ClassVar[bool] = False

    @functools.cached_property
    def memory(self):
        return Last()

    def quantize(self, x, use):
        return quantize_by_stored_scale(x, use)


def test_a_memory_of_ones_own_is_used_in_training():
    """As one that the library has, whose double reciprocal may differ in the last bit."""
    rng = np.random.default_rng(0)
    own = fp8.Fp8DotGeneral.init(OfLast())
    known = fp8.Fp8DotGeneral.init(fp8.DelayedScaling(amax_history_length=1, amax_compute=MostRecent()))
    for size in (1.0, 20.0, 3.0):
        x, w, c = (
            jnp.asarray(size * rng.standard_normal(shape), jnp.float32) for shape in ((12, 32), (32, 8), (12, 8))
        )
        tables = []
        for op in (own, known):
            overwrites, rest = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(op, x, w, c))
            tables.append(fp8.apply_updates(op, rest, overwrites))
        own, known = tables
        np.testing.assert_allclose(table(own)[:, :2], table(known)[:, :2], rtol=1e-6)
        np.testing.assert_allclose(table(own)[:, 1], [float(jnp.abs(a).max()) for a in (x, w, c)], rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class LastTwo(Last):
    """Records the amax and the mean of magnitudes, in this order, in front of which it keeps how many steps it saw."""

    numbers: ClassVar[int] = 2

    @property
    def first_row(self):
        return (1.0, 0.0, 0.0, 0.0)

    def measure(self, x, quantized, ensemble):
        axes = tuple(range(ensemble, x.ndim))
        return jnp.stack([jnp.max(jnp.abs(x), axis=axes), jnp.mean(jnp.abs(x), axis=axes)], axis=-1)[..., None]

    def head(self, rows, measured, limits):
        scale = measured[..., :1] / jnp.asarray(limits, jnp.float32)[:, None]
        return jnp.concatenate([scale, rows[..., 1:2] + 1.0, measured], axis=-1)

    def newest(self, rows):
        return rows[..., 2:]


@dataclasses.dataclass(frozen=True)
class OfLastTwo(OfLast):
    """Two numbers behind a counter."""

    @functools.cached_property
    def memory(self):
        return LastTwo()


def test_a_memory_may_record_several_numbers_and_store_them_elsewhere():
    """In a step, and in calibration, which runs it for an operand in high precision."""
    rng = np.random.default_rng(0)
    x, w, c = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((12, 32), (32, 8), (12, 8)))
    op = fp8.Fp8DotGeneral.init(OfLastTwo())
    overwrites, rest = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(op, x, w, c))
    for found in (fp8.apply_updates(op, rest, overwrites), fp8.calibrate(op, loss, [(x, w, c)])):
        np.testing.assert_array_equal(table(found)[:, 1], 1.0)
        np.testing.assert_allclose(table(found)[:, 2], [float(jnp.abs(a).max()) for a in (x, w, c)], rtol=1e-6)
        np.testing.assert_allclose(table(found)[:, 3], [float(jnp.abs(a).mean()) for a in (x, w, c)], rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Calibrated(Last):
    """The scale of calibration's largest amax; training measures nothing, and reads no operand."""

    def measure(self, x, quantized, ensemble):
        return jnp.zeros((*x.shape[:ensemble], 1, 1))

    def measure_for_calibration(self, x, quantized, ensemble):
        return amaxes_of_rows(x, ensemble)

    def head(self, rows, measured, limits):
        return jnp.concatenate([scale_of_amax(measured, rows[..., :1], limits), measured], axis=-1)


@dataclasses.dataclass(frozen=True)
class OfCalibration(OfLast):
    """A scaling that measures in calibration alone."""

    @functools.cached_property
    def memory(self):
        return Calibrated()


def test_a_memory_knows_whether_it_is_calibrated():
    """A step of training leaves the scale as it is; a step of calibration makes it fit the operand."""
    rng = np.random.default_rng(0)
    x, w, c = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((12, 32), (32, 8), (12, 8)))
    op = fp8.Fp8DotGeneral.init(OfCalibration())
    overwrites, rest = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(op, x, w, c))
    np.testing.assert_array_equal(table(fp8.apply_updates(op, rest, overwrites))[:, :2], [[1.0, 0.0]] * 3)
    limits = [fp8.recipes.E4M3.max, fp8.recipes.E4M3.max, fp8.recipes.E5M2.max]
    scales = [float(jnp.abs(a).max()) / limit for a, limit in zip((x, w, c), limits, strict=True)]
    calibrated = fp8.calibrate(op, loss, [(x, w, c)])
    np.testing.assert_allclose(table(calibrated)[:, 0], scales, rtol=1e-6)
    overwrites, rest = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(calibrated, x, w, c))
    np.testing.assert_allclose(table(fp8.apply_updates(calibrated, rest, overwrites))[:, 0], scales, rtol=1e-6)
