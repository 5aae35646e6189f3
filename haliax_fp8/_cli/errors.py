"""What the command line says in one line, without a traceback."""


class UsageError(Exception):
    """The command cannot run as given; the message says what to change."""
