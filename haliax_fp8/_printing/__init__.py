"""How results are printed."""

from .names import (
    DottedName as DottedName,
    common_prefix as common_prefix,
    in_one_name as in_one_name,
    without_numbers as without_numbers,
)
from .printable import Printable as Printable, columns as columns, new_table as new_table
