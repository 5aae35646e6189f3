"""Folders in Hugging Face's format: exported for engines, imported into models, checked, converted and explained."""

from . import names as names
from .adapter import export_adapter as export_adapter
from .architecture import hugging_face_config as hugging_face_config
from .check import CheckReport as CheckReport, check_folder as check_folder
from .checked import Fault as Fault
from .convert import (
    Conversion as Conversion,
    Converted as Converted,
    ScaleRounding as ScaleRounding,
    convert_folder as convert_folder,
)
from .explain import Explanation as Explanation, explain_folder as explain_folder
from .exporting import ExportReport as ExportReport, export_model as export_model, serving_tensors as serving_tensors
from .frozen import (
    FrozenEquinoxLinear as FrozenEquinoxLinear,
    FrozenLinear as FrozenLinear,
    FrozenMoELinear as FrozenMoELinear,
    thaw as thaw,
)
from .importing import Weights as Weights, import_model as import_model, load as load
from .layout import Layout as Layout
from .names import NameMap as NameMap
