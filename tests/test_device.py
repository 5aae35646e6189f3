"""Which devices have which formats, and what conversion says on one that lacks them."""

import equinox as eqx
import jax
import pytest

import haliax_fp8 as fp8
from haliax_fp8 import _transform
from haliax_fp8._device import Device, require_formats


CPU = Device("cpu", "cpu")
H100, A100 = Device("cuda", "NVIDIA H100 80GB HBM3", "9.0"), Device("cuda", "NVIDIA A100-SXM4-80GB", "8.0")
L40S, B200 = Device("cuda", "NVIDIA L40S", "8.9"), Device("cuda", "NVIDIA B200", "10.0")
MI300, MI350 = Device("rocm", "AMD Instinct MI300X", "gfx942"), Device("rocm", "AMD Instinct MI350X", "gfx950")
TPU7, TPU5 = Device("tpu", "TPU7x"), Device("tpu", "TPU v5 lite")
OCP, FNUZ = (fp8.E4M3, fp8.E5M2), (fp8.E4M3FNUZ, fp8.E5M2FNUZ)


@pytest.mark.parametrize("device", [CPU, H100, L40S, B200, MI350, TPU7])
def test_devices_with_the_ocp_formats(device):
    assert [device.lacks(format) for format in OCP] == [None, None]
    require_formats(OCP, device)


@pytest.mark.parametrize("device", [CPU, MI300])
def test_devices_with_the_fnuz_formats(device):
    assert [device.lacks(format) for format in FNUZ] == [None, None]
    require_formats(FNUZ, device)


@pytest.mark.parametrize(
    ("device", "formats", "reason"),
    [
        (A100, OCP, "compute capability 8.9.*has 8.0"),
        (TPU5, OCP, "TPU7x"),
        (MI300, OCP, "fnuz formats"),
        (H100, FNUZ, "AMD's MI300"),
        (MI350, FNUZ, "format of MI300"),
    ],
)
def test_a_device_that_lacks_a_format_is_named_with_reason_and_remedy(device, formats, reason):
    with pytest.raises(ValueError, match=reason) as error:
        require_formats(formats, device)
    assert device.kind in str(error.value)
    assert "emulate=True" in str(error.value)


def test_conversion_asks_the_default_device(monkeypatch):
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    monkeypatch.setattr(_transform.Device, "default", staticmethod(lambda: A100))
    with pytest.raises(ValueError, match="A100"):
        fp8.fp8_linear_layers(model)
    assert fp8.describe(fp8.fp8_linear_layers(model, fp8.Fp8Config(emulate=True))).fp8_count == 1


def test_layers_left_alone_need_no_formats(monkeypatch):
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    monkeypatch.setattr(_transform.Device, "default", staticmethod(lambda: A100))
    left = fp8.fp8_linear_layers(model, fp8.Fp8Config(overrides={"*": None}))
    assert eqx.tree_equal(left, model)


def test_on_a_cpu_describe_says_that_products_are_emulated():
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    assert "emulated" in str(fp8.describe(fp8.fp8_linear_layers(model)))
    assert "emulated" not in str(fp8.describe(model))
