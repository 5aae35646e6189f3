"""Where an error was raised: by an assertion of the user, or in which loop or solver of Equinox or Diffrax.

Equinox and Diffrax differentiate loops by rules of their own and raise whatever JAX raises there. Only private names of
theirs, in an error's traceback, tell which rule it was.
"""

import dis
import traceback
from types import FrameType


def by_users_assertion(error: Exception) -> bool:
    """Whether an `assert` of the user failed, or of anybody but JAX and Equinox, which assert where they should raise.

    JAX may remove frames from a traceback: its own, and those of NumPy's assertions. The last one that is left did not
    raise then, but called what did. Nobody can tell whose assertion it was, and the answer is no.
    """
    if not isinstance(error, AssertionError):
        return False
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    is_theirs = _name_of(last.tb_frame).partition(".")[0] in ("jax", "equinox")
    return not is_theirs and dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def in_checkpointed_loop(error: Exception) -> bool:
    """Whether Equinox's checkpointed loop was running, as in `diffrax.RecursiveCheckpointAdjoint`."""
    return _was_running(error, "equinox.internal._loop.checkpointed")


def in_backsolve(error: Exception) -> bool:
    """Whether `diffrax.BacksolveAdjoint` was solving for the gradient."""
    return _was_running(error, "diffrax._adjoint", "_loop_backsolve_bwd")


def _was_running(error: Exception, module: str, function: str | None = None) -> bool:
    """Whether a function of a module or its submodules was running when the error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = lambda frame: f"{_name_of(frame)}.".startswith(f"{module}.")
    return any(inside(frame) and function in (None, frame.f_code.co_name) for frame in frames)


def _name_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
