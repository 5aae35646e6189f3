"""Runs a command and turns what happens into an exit status."""

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from .help_text import Parser, program_name
from .load import UsageError
from .screen import fitted, on_error


INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 plus the signal's number, as in shells."""

_COMMANDS = {
    "preflight": ("preflight",),
    "tables": ("devices",),
    "checkpoint": ("checkpoint",),
    "compiler": ("install-compiler",),
}
"""The commands of each module."""

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
        status = options.run(options)
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
        say(_explained(error, options), style="red")
        return 2


def _explained(error: Exception, options: argparse.Namespace) -> str:
    """What is said of an error: `explain` of the command, which may run code of the user's; otherwise one line."""
    explain = getattr(options, "explain", None)
    said = " ".join(str(error).split())
    kind = "" if said and isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
    return fitted(f"error: {kind}{said}".removesuffix(": ")) if explain is None else explain(error, options)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; `run` of the result runs the command.

    Raises:
        SystemExit: With status 2, and a message that names the flag, its value and the remedy.
    """
    parser = Parser(
        prog=program_name(),
        description="Shows which matrix products of a training step run in FP8 on a device that this machine need not "
        "have, and checks and converts checkpoints with FP8 weights.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    # Without a command the help says what there is, which argparse's own error does not.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = (sys.argv[1:] if argv is None else argv)[:1]
    for module, names in _COMMANDS.items():
        # What the others need is loaded for the list of commands, and for none of them.
        if not {*asked} & {name for of in _COMMANDS.values() for name in of} or {*asked} & {*names}:
            importlib.import_module(f".{module}", __package__).add_parsers(commands)
    options = parser.parse_args(argv)
    if options.version:
        print(f"haliax-fp8 {importlib.metadata.version('haliax-fp8')}")
        parser.exit()
    if options.command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    return options
