"""Custom calls by what they do; what the preflight does not know, it says."""

import jax
import jax.numpy as jnp
import pytest
from compiled_models import on, unknown_calls
from test_preflight_products import module, read

import haliax_fp8 as fp8
from haliax_fp8.preflight import inspect_step
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.instruction import Call
from haliax_fp8.preflight.report import PreflightReport


def call(name):
    text = module([f'ROOT %c = f32[2]{{0}} custom-call(), custom_call_target="{name}"'])
    return parse_hlo(text).entry.root


@pytest.mark.parametrize(
    "name, kind",
    [
        ("__cublas$lt$matmul$f8", Call.PRODUCT),
        ("__cublas$lt$matmul$f8$graph", Call.PRODUCT),
        ("__cublas$triangularSolve", Call.OTHER),
        ("__cudnn$convForward", Call.CONVOLUTION),
        ("__cudnn$fmhaSoftmaxBackwardF8", Call.ATTENTION),
        ("__gpu$xla.gpu.triton", Call.OPAQUE),
        ("__cub$DeviceRadixSort", Call.OTHER),
        ("xla_ffi_partitioned_python_gpu_callback", Call.OTHER),
        ("__cublas$lt$somethingNew", Call.UNKNOWN),
        ("my_kernel", Call.UNKNOWN),
        ("", Call.UNKNOWN),
    ],
)
def test_custom_calls_by_what_they_do(name, kind):
    assert call(name).call_kind is kind


@pytest.mark.parametrize("name", ["my_kernel", "__gpu$xla.gpu.triton", "__cublas$lt$groupedMatmul"])
def test_what_is_not_known_is_named_in_the_report(name):
    """It may multiply anything: it is neither one of the other launches nor missing without a word."""
    text = module(
        [
            "%x = f32[8]{0} parameter(0)",
            f'%c = f32[8]{{0}} custom-call(%x), custom_call_target="{name}"',
            "ROOT %n = f32[8]{0} negate(%c)",
        ]
    )
    program = read(text)
    assert [call.name for call in program.opaque] == [name] and program.others.count == 1
    device, without = fp8.preflight.compilable_devices["h100"], read(module(["ROOT %x = f32[8]{0} parameter(0)"]))
    report = PreflightReport(device, {"devices": 1}, program)
    assert f"1 launches cannot be analyzed, and are not in the times: {name}" in report.caveats
    report = PreflightReport(device, {"devices": 1}, without, baseline=program)
    assert f"1 launches of the baseline cannot be analyzed, and are not in the times: {name}" in report.caveats


def anywhere(x, key):
    """Sorts, random numbers, transforms, convolutions, products."""
    values, indices = jax.lax.top_k(jnp.sort(x, axis=0) + jax.random.normal(key, x.shape), 4)
    window = jax.lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")
    return values, indices, jnp.fft.fft(x), window, x @ x


def here(x, key):
    """And what a process lowers for its own devices alone: decompositions, and calls of Python."""
    jax.debug.callback(lambda _: None, x[0, 0])
    q, r = jnp.linalg.qr(x)
    return anywhere(x, key), jax.scipy.linalg.solve_triangular(r, q)


@pytest.mark.parametrize(("function", "device"), [("here", "local"), *on(["anywhere"], ["h100", "tpu7x"])])
def test_what_jax_compiles_to_is_known(function, device):
    args = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.random.key(0)
    report = inspect_step({"here": here, "anywhere": anywhere}[function], *args, device=device)
    assert unknown_calls(report.step) == set()
    assert "custom-call" in report.step.text
