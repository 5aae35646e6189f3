"""Reads a user's step: `FILE.py:FUNCTION` or `package.module:FUNCTION`."""

import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .._arguments import nearest


class UsageError(Exception):
    """The command cannot run as given; the message, one line without a traceback, says what to change."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step with its arguments.

    Args:
        function: The step.
        args: Its arguments, arrays or `ShapeDtypeStruct`s.
        shardings: A `PartitionSpec` (or a tree of them, or None) for each argument; None to use the arrays' own.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    shardings: Any = None


def split_reference(reference: str) -> tuple[str, str]:
    """`my_training.py:make_step` -> `("my_training.py", "make_step")`.

    Raises:
        UsageError: If one of the two is missing.
    """
    file, colon, name = reference.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UsageError(f"{reference!r} names no function; write FILE.py:FUNCTION, such as my_training.py:make_step")
    return file, name


def load_function(reference: str) -> Callable[..., Any]:
    """Finds a function.

    Args:
        reference: `FILE.py:FUNCTION` or `package.module:FUNCTION`.

    Raises:
        UsageError: If the file, module or function does not exist. What the user's code raises is not caught.
    """
    file, name = split_reference(reference)
    module = _module(file)
    make = getattr(module, name, None)
    if not callable(make):
        functions = _functions(module)
        near = nearest(name, functions) or functions[:5]
        raise UsageError(f"{file} has no function {name!r}; it has {', '.join(near) or 'none'}")
    return make


def load_step(reference: str) -> Callable[[], Step]:
    """Finds the function that makes a step; the step is made when what is returned is called.

    Args:
        reference: As in `load_function`. The function takes nothing and returns `(step_fn, args)`, or `(step_fn, args,
            shardings)`.

    Raises:
        UsageError: As in `load_function`; and when called, if it returns something else.
    """
    make = load_function(reference)
    if missing := _without_default(make):
        raise UsageError(
            f"{reference} has to take no arguments, but takes {', '.join(missing)}; give it defaults, or name a "
            "function that calls it"
        )

    def step() -> Step:
        made = make()
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]) or not _is_sequence(made[1]):
            raise UsageError(
                f"{reference} returned {_brief(made)}; it has to return (step_fn, args) or (step_fn, args, shardings), "
                "args being a tuple"
            )
        return Step(made[0], tuple(made[1]), made[2] if len(made) == 3 else None)

    return step


def _without_default(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin: the call will say what is wrong
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _functions(module: ModuleType) -> list[str]:
    """The functions that a module defines; those that it imports, if it only gathers what others define."""
    is_function = lambda name, value: callable(value) and not isinstance(value, type) and not name.startswith("_")
    functions = {name: value for name, value in vars(module).items() if is_function(name, value)}
    defined = [name for name, value in functions.items() if getattr(value, "__module__", None) == module.__name__]
    return defined or [*functions]


def _module(file: str) -> ModuleType:
    path = pathlib.Path(file)
    if path.suffix != ".py":
        try:
            sys.path.insert(0, "")
            return importlib.import_module(file)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{file}.".startswith(f"{error.name}."):
                raise  # A module that the user's module imports.
            raise UsageError(f"cannot find a module named {file!r}; to name a file, write {file}.py:FUNCTION") from None
        finally:
            sys.path.remove("")
    if not path.is_file():
        raise UsageError(f"cannot find the file {file}; give its path from the current directory")
    # Not the file's own name: it may be that of a library.
    name = f"haliax_fp8_step_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As `python FILE.py` does: its neighbours can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_sequence(value: Any) -> bool:
    return isinstance(value, tuple | list) and not hasattr(value, "_fields")


def _brief(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
