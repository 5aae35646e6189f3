"""Ctrl-C that is acknowledged at once, also while XLA compiles, and waits for the end of a step."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 plus the signal's number, as in shells."""

_GRACE = 2.0
"""Seconds that a second Ctrl-C gives Python; while XLA compiles, Python does not run."""


@contextmanager
def stop_requests(say: Callable[[str], None], farewell: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """Lets Ctrl-C wait for the end of the step; a second Ctrl-C interrupts at once.

    Python handles a signal between two of its own instructions, so while XLA compiles, nothing would answer for a
    minute. The operating system's handler runs at once and wakes a thread, which says what will happen; and on a second
    Ctrl-C, if Python does not get to it, ends the process.

    Args:
        say: Shows a line.
        farewell: The last line of a process that is ended while Python does not run.

    Yields:
        Whether a stop was requested.
    """
    requests = 0
    answered = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def request(signum: int, frame: Any) -> None:
        nonlocal requests
        requests += 1
        if requests > 1:
            raise KeyboardInterrupt

    def answer() -> None:
        seen = 0
        while received := reader.recv(1):
            if received[0] != signal.SIGINT:
                continue
            seen += 1
            if seen == 1:
                say("Stopping after this step; Ctrl-C again ends at once.")
            elif not answered.wait(_GRACE):
                say(farewell())
                os._exit(INTERRUPTED)

    before, wakeup = signal.signal(signal.SIGINT, request), signal.set_wakeup_fd(writer.fileno())
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield lambda: requests > 0
    finally:
        answered.set()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, before)
        writer.close()
        thread.join()
        reader.close()
