"""Checkpoints: saved, and loaded into other models; exported as engines load them, imported, checked and converted."""

from . import names as names
from .check import CheckReport as CheckReport, Fault as Fault, check_folder as check_folder
from .convert import (
    Conversion as Conversion,
    Converted as Converted,
    ScaleRounding as ScaleRounding,
    convert_folder as convert_folder,
)
from .explain import Explanation as Explanation, explain_folder as explain_folder
from .exporting import ExportReport as ExportReport, export_model as export_model, serving_tensors as serving_tensors
from .files import BrokenCheckpoint as BrokenCheckpoint
from .frozen import (
    FrozenEquinoxLinear as FrozenEquinoxLinear,
    FrozenLinear as FrozenLinear,
    FrozenMoELinear as FrozenMoELinear,
    thaw as thaw,
)
from .importing import Weights as Weights, import_model as import_model
from .interchange.file import save as save
from .interchange.load import load_into as load_into
from .interchange.report import LoadReport as LoadReport
from .layout import Layout as Layout
from .names import NameMap as NameMap
