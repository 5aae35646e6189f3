"""In which loop or solver of Equinox or Diffrax an error was raised: private names of theirs, found in its traceback.

They differentiate by rules of their own and raise whatever JAX raises there.
"""

import traceback


def in_checkpointed_loop(error: Exception) -> bool:
    """Whether Equinox's checkpointed loop was running, as in `diffrax.RecursiveCheckpointAdjoint`."""
    return _was_running(error, "equinox.internal._loop.checkpointed")


def in_backsolve(error: Exception) -> bool:
    """Whether `diffrax.BacksolveAdjoint` was solving for the gradient."""
    return _was_running(error, "diffrax._adjoint", "_loop_backsolve_bwd")


def _was_running(error: Exception, module: str, function: str | None = None) -> bool:
    """Whether a function of a module or its submodules was running when the error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = lambda frame: f"{frame.f_globals.get('__name__', '')}.".startswith(f"{module}.")
    return any(inside(frame) and function in (None, frame.f_code.co_name) for frame in frames)
