"""What devices have, and that names and JAX's own descriptions lead to the same device."""

import jax
import pytest

import haliax_fp8 as fp8
from haliax_fp8.devices.device import FP8_UNITS, MX_UNITS, NO_UNITS, Device, devices


# From the vendors' documents: NVIDIA's table of compute capabilities (FP8 tensor cores since 8.9, block scaling since
# 10.0), AMD's CDNA 3 and CDNA 4 papers, Google's TPU7x page.
WITH_FP8 = {"l4", "l40s", "rtx4090", "h100", "h200", "b200", "gb200", "mi300x", "mi325x", "mi350x", "mi355x", "tpu7x"}
WITH_MX = {"b200", "gb200", "mi350x", "mi355x"}
FNUZ_ONLY = {"mi300x", "mi325x"}
every_device = pytest.mark.parametrize("name", [name for name in devices if name != "cpu"])


@every_device
def test_units(name):
    device = Device.by_name(name)
    assert (FP8_UNITS.lacking(device) is None) == (name in WITH_FP8)
    assert (MX_UNITS.lacking(device) is None) == (name in WITH_MX)
    assert NO_UNITS.lacking(device) is not None


@every_device
def test_formats(name):
    device = Device.by_name(name)
    has = {f.name for f in (fp8.E4M3, fp8.E5M2, fp8.E4M3FNUZ, fp8.E5M2FNUZ) if device.lacks(f) is None}
    fnuz, ocp = {"E4M3FNUZ", "E5M2FNUZ"}, {"E4M3", "E5M2"}
    assert has == (set() if name not in WITH_FP8 else fnuz if name in FNUZ_ONLY else ocp)


def test_a_cpu_emulates_all_formats():
    device = Device.by_name("cpu")
    assert device.emulates
    assert [device.lacks(f) for f in (fp8.E4M3, fp8.E5M2, fp8.E4M3FNUZ, fp8.E5M2FNUZ)] == [None] * 4


@pytest.mark.parametrize("units", [FP8_UNITS, MX_UNITS])
def test_a_missing_unit_is_said_with_what_it_needs_and_what_is_there(units):
    assert "capability" in units.lacking(Device.by_name("a100")) and "has 8.0" in units.lacking(Device.by_name("a100"))
    assert "gfx90a" in units.lacking(Device.by_name("mi250x"))
    assert "unknown" in units.lacking(Device("cuda", "NVIDIA something"))
    assert "metal" in units.lacking(Device("metal", "Apple M4"))
    assert "CPU" in units.lacking(Device.by_name("cpu"))


def test_compute_capabilities_are_compared_as_numbers():
    """As text, 10.0 is below 8.9."""
    assert FP8_UNITS.lacking(Device("cuda", "NVIDIA B200", "10.0")) is None
    assert MX_UNITS.lacking(Device("cuda", "NVIDIA B300", "10.3")) is None


@pytest.mark.parametrize(
    ("kind", "generation"), [("TPU v4", 4), ("TPU v5 lite", 5), ("TPU v5p", 5), ("TPU v6 lite", 6), ("TPU7x", 7)]
)
def test_generations_of_tpus(kind, generation):
    assert Device("tpu", kind).tpu_generation == generation


def test_only_a_tpu_has_a_generation():
    assert Device.by_name("h100").tpu_generation is None


@pytest.mark.parametrize("name", ["h100", "H100", "RTX 4090", "rtx-4090"])
def test_names_are_read_loosely(name):
    assert Device.by_name(name).platform == "cuda"


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"device='h10' is unknown; the nearest are .*'h100'"):
        Device.by_name("h10")


def test_the_device_that_is_here():
    here = Device.default()
    assert here == Device.by_name("local")
    assert (here.platform, here.kind) == ("cpu", jax.devices()[0].device_kind)
