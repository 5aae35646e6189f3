"""What devices have, and that names and JAX's own descriptions lead to the same device."""

import re

import equinox as eqx
import jax
import pytest
from helpers import unchecked

import haliax_fp8
from haliax_fp8.devices import Device
from haliax_fp8.devices.catalog import NotCompiled, XlaGpu, canonical, catalog
from haliax_fp8.devices.device import devices
from haliax_fp8.devices.units import FP8_UNITS, MX_UNITS, NO_UNITS
from haliax_fp8.preflight import compilable_devices
from haliax_fp8.preflight.devices import as_compilable
from haliax_fp8.recipes import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ


# From the vendors' documents: NVIDIA's table of compute capabilities (FP8 tensor cores since 8.9, block scaling since
# 10.0), AMD's CDNA 3 and CDNA 4 papers, Google's TPU7x page.
WITH_FP8 = {"l4", "l40s", "rtx4090", "h100", "h200", "b200", "gb200", "mi300x", "mi325x", "mi350x", "mi355x", "tpu7x"}
WITH_MX = {"b200", "gb200", "mi350x", "mi355x"}
FNUZ_ONLY = {"mi300x", "mi325x"}
ACCELERATORS = [name for name in devices if name != "cpu"]


def test_a_row_of_the_catalog_is_all_that_a_device_needs():
    """Its names, its peaks, and how the preflight compiles for it, or why it does not."""
    for row in catalog.values():
        device = Device.by_name(row.name)
        assert (device.platform, device.kind, device.compute_capability) == (
            row.platform,
            row.kind,
            row.compute_capability,
        )
        assert {Device.by_name(name) for name in (row.name.upper(), *row.aliases)} == {device}
        assert device.peaks == row.peaks
        if isinstance(row.xla, NotCompiled):
            assert row.name not in compilable_devices and row.peaks is None
            with pytest.raises(
                ValueError, match=re.escape(f"device={row.name!r} cannot be compiled for: {row.xla.reason}; choose")
            ):
                as_compilable(row.name)
        else:
            target = compilable_devices[row.name]
            assert (target.name, target.kind, target.hardware, target.peaks) == (row.name, row.kind, device, row.peaks)
            assert row.peaks.fp8 >= row.peaks.bf16 >= row.peaks.f32 > 0 and row.peaks.source


def test_xla_and_the_estimates_have_one_bandwidth():
    """The data sheet's is rounded."""
    for row in catalog.values():
        if isinstance(row.xla, XlaGpu):
            assert row.xla.memory_bandwidth == pytest.approx(row.peaks.bandwidth, rel=0.01), row.name


def test_a_name_means_one_device():
    names = [name for row in catalog.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names)) and all(canonical(name) in catalog for name in names)
    assert len({row.kind for row in catalog.values()}) == len(catalog)


def test_units():
    for name in ACCELERATORS:
        device = Device.by_name(name)
        assert (device.lacks(FP8_UNITS) is None) == (name in WITH_FP8)
        assert (device.lacks(MX_UNITS) is None) == (name in WITH_MX)
        assert device.lacks(NO_UNITS) is not None


def test_formats():
    for name in ACCELERATORS:
        device = Device.by_name(name)
        has = {f.name for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ) if device.lacks(f) is None}
        fnuz, ocp = {"E4M3FNUZ", "E5M2FNUZ"}, {"E4M3", "E5M2"}
        assert has == (set() if name not in WITH_FP8 else fnuz if name in FNUZ_ONLY else ocp)


def test_a_cpu_emulates_all_formats():
    device = Device.by_name("cpu")
    assert device.emulates
    assert [device.lacks(f) for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)] == [None] * 4


@pytest.mark.parametrize("units", [FP8_UNITS, MX_UNITS])
def test_a_missing_unit_is_said_with_what_it_needs_and_what_is_there(units):
    on_a100 = Device.by_name("a100").lacks(units)
    assert "capability" in on_a100 and "has 8.0" in on_a100
    assert "gfx90a" in Device.by_name("mi250x").lacks(units)
    assert "unknown" in Device("cuda", "NVIDIA something").lacks(units)
    assert "metal" in Device("metal", "Apple M4").lacks(units)
    assert "CPU" in Device.by_name("cpu").lacks(units)


def test_compute_capabilities_are_compared_as_numbers():
    """As text, 10.0 is below 8.9."""
    assert Device("cuda", "NVIDIA B200", "10.0").lacks(FP8_UNITS) is None
    assert Device("cuda", "NVIDIA B300", "10.3").lacks(MX_UNITS) is None


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


TAKES_A_DEVICE = {
    "supported": lambda device: haliax_fp8.recipes.supported("delayed", device),
    "describe": lambda device: haliax_fp8.describe(eqx.nn.Linear(16, 16, key=jax.random.key(0)), device=device),
    "FasterOn": lambda device: haliax_fp8.layers.FasterOn(device, tokens=8192),
}


@pytest.mark.parametrize("name", TAKES_A_DEVICE)
def test_what_is_no_device_is_refused_wherever_one_is_taken(name):
    """JAX's own devices are what is easily mistaken for one."""
    with unchecked(), pytest.raises(ValueError, match=rf"device=.*of {name} is not a Device"):
        TAKES_A_DEVICE[name](jax.devices()[0])


def test_a_device_is_taken_as_it_is_and_names_are_looked_up():
    unlisted = Device("cuda", "NVIDIA something")
    assert Device.of(unlisted, of="describe") is unlisted
    assert Device.of("H100", of="describe") == Device.by_name("h100")


def test_the_device_that_is_here():
    here = Device.default()
    assert here == Device.local() == Device.by_name("local")
    assert (here.platform, here.kind) == ("cpu", jax.devices()[0].device_kind)


def test_the_default_is_the_device_of_the_mesh_in_use():
    for name in ACCELERATORS:
        with devices[name].as_default():
            assert Device.default() == devices[name]
            assert Device.by_name("local") == Device.local() == devices["cpu"]
        assert Device.default() == devices["cpu"]


def test_a_mesh_of_a_device_that_the_catalog_lacks():
    with Device("cuda", "NVIDIA something").as_default():
        assert Device.default() == Device("cuda", "NVIDIA something")


def test_the_axes_of_a_mesh_stay():
    with jax.set_mesh(jax.make_mesh((2,), ("data",))), devices["h100"].as_default():
        assert (Device.default(), jax.sharding.get_abstract_mesh().shape) == (devices["h100"], {"data": 2})


def test_a_device_whose_kind_says_something_else_cannot_be_the_default():
    with (
        pytest.raises(ValueError, match=r"RTX 5090.*cannot be the default.*'h100'"),
        Device("cuda", "NVIDIA GeForce RTX 5090", "12.0").as_default(),
    ):
        raise AssertionError("entered")


def test_a_mesh_of_the_devices_that_are_here():
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        assert Device.default() == Device.local()
