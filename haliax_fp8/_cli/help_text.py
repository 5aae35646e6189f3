"""Help and errors that fit the terminal: paragraphs are wrapped, what is indented stays as it is."""

import argparse
import pathlib
import sys
import textwrap
from typing import NoReturn

from .screen import fitted


class Parser(argparse.ArgumentParser):
    """Wraps its errors too, as it does the usage above them; those of its commands are of this class as well."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, and ends the process with status 2."""
        self.print_usage(sys.stderr)
        self.exit(2, fitted(f"{self.prog}: error: {message}") + "\n")


class Paragraphs(argparse.HelpFormatter):
    """Wraps the paragraphs of descriptions and epilogs, each by itself, and commands in examples with backslashes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip("\n").split("\n\n"):
            if "\n " in paragraph:
                lines = [_continued(line, width - len(indent)) for line in paragraph.splitlines()]
                filled.append(textwrap.indent("\n".join(lines), indent))
            else:
                filled.append(textwrap.fill(paragraph, width))
        return "\n\n".join(filled) + "\n"


def _continued(line: str, width: int) -> str:
    """A command in as many lines as it needs, still one command for a shell."""
    if len(line) <= width:
        return line
    begin = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(
        line.strip(),
        width - 2,
        initial_indent=begin,
        subsequent_indent=f"{begin}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(parts)


def program_name() -> str:
    """The command as it was called."""
    script = "haliax-fp8"
    return script if pathlib.Path(sys.argv[0]).stem == script else "python -m haliax_fp8"
