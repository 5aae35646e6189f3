"""Runs a command and turns what happens into an exit status."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from .checkpoint import run_checkpoint
from .compiler import install_compiler
from .load import UsageError
from .options import parse_options
from .preflight import explain, run_preflight, use_local_devices
from .screen import fitted, on_error, screen
from .tables import as_json, device_rows, device_table, format_rows, format_table


INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 plus the signal's number, as in shells."""

CLOSED = 141
"""The exit status when nobody reads the output any more, as after `| head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit status: 0 all is well, 1 a requirement is not met, 2 the command or a package is wrong, 130 after
        Ctrl-C.
    """
    options = parse_options(argv)
    say = on_error().print
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Nor is anybody there for what Python has still to write at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        say("Stopped.")
        return INTERRUPTED
    except UsageError as error:
        say(fitted(f"error: {error}"), style="red")
        return 2
    except Exception as error:  # Whatever the user's step raises while it is traced.
        say(explain(error, options), style="red")
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command == "preflight":
        return run_preflight(options)
    if options.command == "checkpoint":
        return run_checkpoint(options)
    if options.command == "install-compiler":
        install_compiler(options.compiler)
        return 0
    rows, table = {
        "devices": (device_rows, device_table),
        "formats": (format_rows, format_table),
    }[options.command]
    use_local_devices()
    found = rows()
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        screen().print(table(found))
    return 0
