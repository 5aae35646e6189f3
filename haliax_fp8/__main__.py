"""`python -m haliax_fp8`."""

import os
import sys

from ._cli.main import INTERRUPTED, main


def run() -> None:
    """Runs the command line and ends the process with its status."""
    status = main()
    if status == INTERRUPTED:
        # A compilation goes on in its thread, and would crash or be waited for at a regular end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
