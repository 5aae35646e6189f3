"""Where an error was raised: by an assertion of the user, or in a loop or a custom derivative of Equinox.

And which frames its traceback shows.

Equinox differentiates loops by rules of its own and raises whatever JAX raises there. Only private names of its, in an
error's traceback, tell which rule it was.
"""

import dis
import functools
import inspect
import traceback
from collections.abc import Callable
from types import FrameType

from jax._src.traceback_util import api_boundary, register_exclusion


def calls_users_function[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function that runs the user's: an error in there shows frames of the user, as under JAX's own functions.

    Frames of the file that defines the function are hidden; `JAX_TRACEBACK_FILTERING=off` shows them.

    Args:
        function: The function.
    """
    _hide(inspect.unwrap(function).__code__.co_filename)
    return api_boundary(function)


# JAX keeps a list, to which each call would add.
_hide = functools.cache(register_exclusion)


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


def in_custom_derivative(error: Exception) -> bool:
    """Whether Equinox's custom derivatives asserted, without a message, that what they take for a constant is one."""
    return isinstance(error, AssertionError) and not error.args and not by_users_assertion(error)


def _was_running(error: Exception, module: str) -> bool:
    """Whether a function of a module or its submodules was running when the error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(f"{_name_of(frame)}.".startswith(f"{module}.") for frame in frames)


def _name_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
