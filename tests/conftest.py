"""Settings of the suite: strict promotion, two CPU devices, and jaxtyping checked by beartype."""

import atexit
import collections
import importlib.util
import os
import pathlib
import shutil
import signal
import tempfile
import threading


# The tests run on the CPU wherever they run; the GPU compiler's package, if installed, looks for a driver otherwise.
os.environ["JAX_PLATFORMS"] = "cpu"
# Before JAX starts: several devices, so that sharding is tested on a machine with one.
_flags = os.environ.get("XLA_FLAGS", "").split() + ["--xla_force_host_platform_device_count=4"]
if not any("xla_backend_optimization_level" in flag for flag in _flags):
    # LLVM takes half of the time that a test takes, to make programs fast that run once. XLA's own decisions, which are
    # what is tested, stay the same. Whoever names a level gets it: CI runs some files with the default, 3.
    _flags.append("--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join(_flags)
# Compiling is half of what is left, much of it the same in several files. This run's processes share their programs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="haliax-fp8-programs-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their children with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxtyping import install_import_hook  # noqa: E402


def _modules_with_arrays() -> list[str]:
    """The package's modules that annotate arrays, without importing any."""
    (folder,) = importlib.util.find_spec("haliax_fp8").submodule_search_locations
    root = pathlib.Path(folder)
    annotated = (path for path in root.rglob("*.py") if "from jaxtyping" in path.read_text())
    return [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in annotated]


# Every annotation of an array is checked at run time, here and only here. Other modules have pyright: the checks would
# take half of the time of the tests of the preflight.
install_import_hook(_modules_with_arrays(), "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Lets go of what earlier files compiled before Linux runs out of memory maps for it, which ends the process.

    A program for the CPU takes about 16 maps, and a process may have 65,530.
    """
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """Lines are as long as without a terminal, whatever a script that a test has run left in the environment."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def standard_promotion():
    """JAX's defaults, with which users run benchmarks and examples."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def getkey():
    """A function that returns a new key at each call, the same sequence in every run."""
    state = [0]

    def next_key():
        state[0] += 1
        return jax.random.key(state[0])

    return next_key


@pytest.fixture
def compiled():
    """A function with the arguments of `inspect_step`, for the text of what the device's compiler made, and the report.

    Products are cuBLASLt's, as in a `TrainStep`, unless options of the compiler are given.
    """
    from compiled_models import unknown_calls

    from haliax_fp8.preflight import inspect_step

    def compiled_of(step, *args, **options):
        options = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}, **options}
        report = inspect_step(step, *args, **options)
        assert unknown_calls(report.step) == set()
        return report.step.text, report

    return compiled_of


def pytest_ignore_collect(collection_path, config):
    """With `-m smoke`, only files with such tests are imported: to import all takes longer than these tests."""
    if config.option.markexpr == "smoke" and collection_path.suffix == ".py":
        return "pytest.mark.smoke" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Which cases of a parametrized test are in the fast run: the first one listed, so list the telling one first.

    The others are marked `more`. A mark of a case's own decides otherwise: `fast` keeps a further case in the fast run,
    and one that is marked `more` or `slow` is not the first. In `tests/project` each case is another file or page, and
    all are fast unless marked. Of a test marked `smoke`, one case is.

    Files with long tests first, then those with many: with one of them at the end, a process would wait for it.
    """
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        has_own = any(item.get_closest_marker(mark) for mark in ("fast", "more", "slow"))
        if has_own or item.path.parent.name == "project":
            continue
        if test in seen:
            item.add_marker(pytest.mark.more)
            item.own_markers = [mark for mark in item.own_markers if mark.name != "smoke"]
        seen.add(test)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path], item.path))
