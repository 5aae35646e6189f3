"""Private names of JAX that are missing: one sentence that says which versions were tested, and which is installed."""

import contextlib
from collections.abc import Iterator
from importlib.metadata import version

import jax


LOWEST = "0.11.1"
NEWEST = "0.12.0.1"
"""The lowest version of JAX, as in `pyproject.toml`, and the newest with which the tests have passed."""


@contextlib.contextmanager
def needs(what: str) -> Iterator[None]:
    """Put it around imports and uses of JAX's private names; if one is gone, the error says what to install.

    Args:
        what: What needs them, such as "the preflight".

    Raises:
        ImportError: In place of an ImportError or AttributeError.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"haliax_fp8 {version('haliax-fp8')} was tested with JAX {LOWEST} to {NEWEST}; JAX {jax.__version__} is "
            f"installed, which lacks a private name that {what} needs ({error}). Install a tested version: "
            f'pip install "jax>={LOWEST},<={NEWEST}"'
        ) from error
