"""Whether a folder holds a quantized checkpoint that engines can load: names, shapes, dtypes and values."""

from .folder import check_folder as check_folder
from .report import CheckReport as CheckReport, Fault as Fault
