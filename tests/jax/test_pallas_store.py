"""What `_product/grouped/mosaic.py` needs of JAX, in every allowed version: Pallas kernels for GPUs are lowered."""

import jax
import jax.numpy as jnp
import pytest

import haliax_fp8 as fp8


@pytest.mark.parametrize("device", ["h100", "b200"])
def test_kernels_for_gpus_are_lowered(device):
    """Rows in groups whose sizes no tile divides, and an odd number of rows: output and gradients."""
    op = fp8.Fp8DotGeneral.init("rowwise")
    x, kernels, sizes = jnp.ones((201, 64), jnp.bfloat16), jnp.ones((3, 64, 32), jnp.bfloat16), jnp.array([60, 70, 71])
    output = lambda x, kernels: op.ragged_dot(x, kernels, sizes).sum()
    with fp8.devices.Device.by_name(device).as_default():
        lowered = jax.jit(jax.grad(output, (0, 1))).trace(x, kernels).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 3
