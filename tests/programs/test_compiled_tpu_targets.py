"""TPUs as targets: how many there may be, their compiler's flags, and what is said of FP8 on them."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from compiled_models import struct

from haliax_fp8.preflight import compilable_devices, inspect_step


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilable_devices["tpu7x"].missing() is not None, reason="needs XLA's compiler for TPUs"),
]

TPUS = ("tpu7x", "tpu6e", "tpu5e")
E4M3 = jnp.float8_e4m3fn


def product(x, w):
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def run_alone(code, **variables):
    """Runs code in a process of its own, since libtpu may end it, and reads its flags once."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


# --- Numbers of devices -----------------------------------------------------------------------------------------------

COMPILES = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from haliax_fp8.preflight import inspect_step
array = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
for count in {counts}:
    # Devices send each other what they need for the sum.
    options = dict(device={device!r}, devices=count, shardings=(P("devices"), P("devices")))
    kinds = {{found.kind for found in inspect_step(lambda x, w: x.T @ w, array, array, **options).step.collectives}}
    print(count, bool(kinds))
"""


@pytest.mark.parametrize(("device", "most"), [("tpu5e", 256), ("tpu6e", 256), ("tpu7x", 64)])
def test_every_power_of_two_is_compiled_for(device, most):
    counts = [2**i for i in range(most.bit_length())]
    run = run_alone(COMPILES.format(device=device, counts=counts))
    assert run.stdout.split() == [word for count in counts for word in (str(count), str(count > 1))], run.stderr


@pytest.mark.parametrize(("device", "most", "deep"), [("tpu5e", 256, 1), ("tpu6e", 256, 1), ("tpu7x", 8192, 16)])
def test_a_pod_of_v5e_and_v6e_is_flat(device, most, deep):
    """Two devices of TPU7x are the cores of one chip."""
    chips = compilable_devices[device].devices(most)
    assert len(set(chips)) == most
    sizes = [1 + max(chip.coords[axis] for chip in chips) for axis in range(3)]
    assert sizes == [16, 16, deep]


@pytest.mark.parametrize(("device", "most"), [("tpu5e", 256), ("tpu6e", 256), ("tpu7x", 8192)])
def test_more_than_the_largest_slice_has_is_refused(device, most):
    with pytest.raises(ValueError, match=rf"devices={most + 1} is more than the largest"):
        compilable_devices[device].devices(most + 1)
    assert len(compilable_devices[device].devices(6)) == 6


# --- Flags ------------------------------------------------------------------------------------------------------------

REPORTS = """
import jax, jax.numpy as jnp
from haliax_fp8.preflight import inspect_step
array = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
report = inspect_step(jnp.dot, array, array, device={device!r}, compiler_options={options})
print(report.to_markdown().splitlines()[0])
"""
LIMIT = "xla_tpu_scoped_vmem_limit_kib"


@pytest.mark.parametrize(("options", "limit"), [({}, 65536), ({LIMIT: "32768"}, 32768)])
def test_the_report_names_the_flags_of_the_environment(options, limit):
    code = REPORTS.format(device="tpu7x", options=options)
    run = run_alone(code, LIBTPU_INIT_ARGS=f"--{LIMIT}=65536", XLA_FLAGS="")
    assert run.stdout.strip() == f"XLA flags: --{LIMIT}={limit}", run.stderr


# --- FP8 --------------------------------------------------------------------------------------------------------------


def test_no_operand_is_padded():
    """The product reads what was written, so the report does not say that it is padded."""
    report = inspect_step(product, struct(512, 1000, dtype=E4M3), struct(1000, 1000, dtype=E4M3), device="tpu7x")
    assert report.fp8_share == 1.0 and all("k=1000" in p.indivisible for p in report.products)
    assert re.search(r"f8e4m3fn\[[\d,]*1008", report.step.text) is None
    assert not any("padded" in finding for finding in report.findings)


@pytest.mark.parametrize("device", TPUS)
def test_which_tpu_multiplies_fp8(device):
    """Their programs read the same: all have a product of FP8 arrays."""
    narrow, wide = (
        inspect_step(product, *2 * [struct(512, 512, dtype=x)], device=device) for x in (E4M3, jnp.bfloat16)
    )
    assert narrow.has_fp8_product is (device == "tpu7x") and not wide.has_fp8_product
