"""Folders in Hugging Face's format: exported for engines, imported into models, checked and converted."""

# By these names too, as before.
from ..folders import (
    BrokenCheckpoint,  # noqa: F401
    CheckReport,  # noqa: F401
    Conversion,  # noqa: F401
    Converted,  # noqa: F401
    Fault,  # noqa: F401
    NotSupported,  # noqa: F401
    check_folder,  # noqa: F401
    convert_folder,  # noqa: F401
)
from . import names as names
from .adapter import export_adapter as export_adapter, import_adapter as import_adapter
from .architecture import hugging_face_config as hugging_face_config
from .exporting import ExportReport as ExportReport, export_model as export_model, serving_tensors as serving_tensors
from .importing import Weights as Weights, import_model as import_model, load as load
from .names import NameMap as NameMap
from .recipe_of_folder import fp8_config_of as fp8_config_of, with_folder_scales as with_folder_scales
