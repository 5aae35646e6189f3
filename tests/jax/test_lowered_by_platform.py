"""Primitives that become something else on each platform."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from haliax_fp8._jax.primitives import lower_by_platform


def times(factor):
    return mlir.lower_fun(lambda x: factor * x, multiple_results=False)


scaled_p = Primitive("scaled")
scaled_p.def_abstract_eval(lambda x: x)
lower_by_platform(scaled_p, times(17.0), cpu=times(19.0), cuda=times(23.0))
FACTORS = {"cpu": "1.900000e+01", "cuda": "2.300000e+01", "tpu": "1.700000e+01"}


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("tpu",), ("cpu", "cuda"), ("cuda", "tpu")])
def test_each_platform_has_its_own_rule(platforms):
    traced = jax.jit(scaled_p.bind).trace(jax.ShapeDtypeStruct((), jnp.float32))
    text = traced.lower(lowering_platforms=platforms).as_text()
    assert [platform for platform, factor in FACTORS.items() if factor in text] == list(platforms)
