"""What compiling changes in the process is undone, also where several threads compile at once."""

import logging
import os
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest

from haliax_fp8.preflight import compilable_devices, inspect_step
from haliax_fp8.preflight.compilers import changed_process


VARIABLE, LOGGER, MESSAGE = "HALIAX_FP8_TEST_VARIABLE", "haliax_fp8.test_logger", "this is expected"


def state_of_the_process():
    return dict(os.environ), list(logging.getLogger(LOGGER).filters), list(warnings.filters)


def in_threads(*functions):
    """Calls each in a thread of its own, all at once; raises what they raise."""
    failed = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


def test_changes_last_as_long_as_they_are_needed(caplog):
    before = state_of_the_process()
    with changed_process(variables={VARIABLE: "1"}, quiet=[LOGGER], ignored=[MESSAGE]):
        assert os.environ[VARIABLE] == "1"
        logging.getLogger(LOGGER).warning("no driver")
        logging.getLogger(LOGGER).error("broken")
        warnings.warn(f"{MESSAGE}, always", stacklevel=1)
    assert [record.getMessage() for record in caplog.records] == ["broken"]
    assert state_of_the_process() == before


def test_they_are_undone_after_an_error():
    before = state_of_the_process()
    with pytest.raises(KeyError), changed_process(variables={VARIABLE: "1"}, quiet=[LOGGER], ignored=[MESSAGE]):
        raise KeyError
    assert state_of_the_process() == before


def test_what_a_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine")
    with changed_process(variables={VARIABLE: "1"}):
        assert os.environ[VARIABLE] == "mine"
    assert os.environ[VARIABLE] == "mine"


def test_threads_change_the_process_one_after_the_other():
    """The second begins while the first is inside: were it let in, it would keep the first one's value for its own."""
    before = state_of_the_process()
    first_is_in, second_is_in = threading.Event(), threading.Event()
    events = []

    def first():
        with changed_process(variables={VARIABLE: "first"}, quiet=[LOGGER], ignored=[MESSAGE]):
            with changed_process(variables={VARIABLE: "again"}):  # The same thread may.
                first_is_in.set()
            events.append(("waits", not second_is_in.wait(timeout=0.5)))
            events.append(os.environ[VARIABLE])

    def second():
        assert first_is_in.wait(timeout=60)
        with changed_process(variables={VARIABLE: "second"}, quiet=[LOGGER], ignored=[MESSAGE]):
            second_is_in.set()
            events.append(os.environ[VARIABLE])

    in_threads(first, second)
    assert events == [("waits", True), "first", "second"]
    assert state_of_the_process() == before


missing = compilable_devices["h100"].missing()
with_compiler = [pytest.mark.skipif(missing is not None, reason=missing or ""), pytest.mark.slow]


@pytest.mark.parametrize("names", [["local"] * 3, pytest.param(["h100", "b200", "h100"], marks=with_compiler)])
def test_preflights_in_threads(names):
    """Donated buffers that no result fits make JAX warn, which the preflight drops."""
    before = state_of_the_process()
    step = jax.jit(lambda w, x: (x @ w).sum(), donate_argnums=0)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 16), (8, 32))]
    reports = {}

    def compile_for(i, name):
        reports[i] = inspect_step(step, *args, device=name)

    in_threads(*(lambda i=i, name=name: compile_for(i, name) for i, name in enumerate(names)))
    assert [reports[i].device.name for i in range(len(names))] == names
    assert {report.step.flops for report in reports.values()} == {2 * 8 * 32 * 16}
    assert state_of_the_process() == before
