"""Settings of the suite: strict promotion, two CPU devices, and jaxtyping checked by beartype."""

import os


# The tests run on the CPU wherever they run; the GPU compiler's package, if installed, looks for a driver otherwise.
os.environ["JAX_PLATFORMS"] = "cpu"
# Before JAX starts: several devices, so that sharding is tested on a machine with one.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

from jaxtyping import install_import_hook  # noqa: E402


# Every annotation of the package is checked at run time, here and only here.
install_import_hook("haliax_fp8", "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def getkey():
    """A function that returns a new key at each call, the same sequence in every run."""
    state = [0]

    def next_key():
        state[0] += 1
        return jax.random.key(state[0])

    return next_key


@pytest.fixture
def compiled(monkeypatch):
    """A function with the arguments of `preflight`, for the text of what the target's compiler made, and the report."""
    from haliax_fp8.preflight import _preflight

    texts, compile_for = [], _preflight.compile_for

    def recorded(*args, **options):
        program = compile_for(*args, **options)
        texts.append(program.text)
        return program

    monkeypatch.setattr(_preflight, "compile_for", recorded)

    def compiled_of(step, *args, **options):
        report = _preflight.preflight(step, *args, **options)
        return texts[-1], report

    return compiled_of


def pytest_collection_modifyitems(items):
    """Long tests first: with one of them at the end, all processes but one would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
