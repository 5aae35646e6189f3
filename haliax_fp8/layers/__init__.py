"""Layers: which layer classes can be converted, and how; the conversion of a model, and a description of it."""

from .config import Fp8Config as Fp8Config, default_rules as default_rules
from .convert import fp8_linear_layers as fp8_linear_layers, restore_linear_layers as restore_linear_layers
from .describe import LayerDescription as LayerDescription, ModelDescription as ModelDescription, describe as describe
from .equinox import EquinoxLinear as EquinoxLinear
from .haliax import HaliaxEmbedding as HaliaxEmbedding, HaliaxLinear as HaliaxLinear, HaliaxMoELinear as HaliaxMoELinear
from .kernel import Kernel as Kernel
from .only_where_faster import FasterOn as FasterOn
from .predicted_time import Prediction as Prediction
from .quantized import AbstractQuantizedLayer as AbstractQuantizedLayer
from .quantized_kernels import quantize_kernels as quantize_kernels
from .rule import LayerRule as LayerRule, OnlyIfNamed as OnlyIfNamed, Refused as Refused
