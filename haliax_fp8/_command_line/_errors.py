"""What the command line says in one line, without a traceback."""


class UsageError(Exception):
    """The command cannot be carried out as it was given; the message says what to change."""
