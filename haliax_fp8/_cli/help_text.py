"""Help that fits the terminal: paragraphs are wrapped, what is indented stays as it is."""

import argparse
import pathlib
import sys
import textwrap


class Paragraphs(argparse.HelpFormatter):
    """Wraps the paragraphs of descriptions and epilogs, each by itself; examples below a line keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip("\n").split("\n\n"):
            is_list = "\n " in paragraph
            filled.append(textwrap.indent(paragraph, indent) if is_list else textwrap.fill(paragraph, width))
        return "\n\n".join(filled) + "\n"


def program_name() -> str:
    """The command as it was called."""
    script = "haliax-fp8"
    return script if pathlib.Path(sys.argv[0]).stem == script else "python -m haliax_fp8"
