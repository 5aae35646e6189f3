"""A griffe extension: shows `Example:` sections of docstrings as code. Griffe knows only the plural."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section before the docstring is parsed; `griffe` calls it for every object that it finds."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames it in the object's docstring, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
