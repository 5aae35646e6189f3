"""A hook of mkdocs: long names in cells of tables may break at underscores, where browsers do not break them."""

import re
from typing import Any


_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>\w{24,}</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Puts `<wbr>`, which copying leaves out, behind the underscores of names of 24 characters or more."""
    breakable = lambda code: code[0].replace("_", "_<wbr>")
    return _CELL.sub(lambda cell: _CODE.sub(breakable, cell[0]), html)
