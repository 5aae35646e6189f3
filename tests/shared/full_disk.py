"""A disk with no room left, as programs meet it: writing fails in the middle of a file."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Inside, the operating system lets this process write only so many bytes of each file, and refuses the next.

    Args:
        size: The number of bytes.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
