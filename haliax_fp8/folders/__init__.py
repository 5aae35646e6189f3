"""Folders of quantized weights, read, checked and converted with NumPy alone: no JAX, no Haliax."""

from .check import CheckReport as CheckReport, check_folder as check_folder
from .checked import Fault as Fault
from .configuration import NotSupported as NotSupported
from .contents import Tensors as Tensors
from .convert import Conversion as Conversion, Converted as Converted, convert_folder as convert_folder
from .strict_json import BrokenCheckpoint as BrokenCheckpoint
