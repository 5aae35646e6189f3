"""Several processes on loopback: the numbers of one, and the end of one of them."""

import json
import pathlib
import socket
import subprocess
import sys
import time

import pytest


ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "shared" / "processes.py"


def start(process, count, port, folder):
    command = [sys.executable, str(SCRIPT), str(process), str(count), str(port), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        return tcp.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_resumes_what_two_saved(tmp_path):
    """Loss by loss; after one process is killed, the other ends too and says which one is missing."""
    port = free_port()
    leader, other = (start(process, 2, port, tmp_path) for process in (0, 1))
    try:
        other.communicate(timeout=120)
        killed = time.monotonic()
        _, message = leader.communicate(timeout=60)
        assert time.monotonic() - killed < 60
    finally:
        leader.kill(), other.kill()
    assert other.returncode == -9 and leader.returncode != 0
    assert "Task 1 heartbeat timeout" in message or "unhealthy" in message
    alone = start(0, 1, 0, tmp_path)
    _, message = alone.communicate(timeout=120)
    assert alone.returncode == 0, message
    one, two, last = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1"))
    assert len(one["losses"]) == 10 and one["losses"][-1] < one["losses"][0]
    # Sums in another order, which moves no element here to the next FP8 value, or few.
    assert two["losses"] == last["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert one["resumed"] == pytest.approx(two["losses"][5:], rel=1e-6)
