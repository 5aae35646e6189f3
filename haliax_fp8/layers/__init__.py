"""Layers: which layer classes can be converted, and how; the conversion of a model, and a description of it."""

from .._op import Fp8DotGeneral as Fp8DotGeneral
from .config import Fp8Config as Fp8Config, default_rules as default_rules
from .convert import fp8_linear_layers as fp8_linear_layers, restore_linear_layers as restore_linear_layers
from .describe import (
    LayerDescription as LayerDescription,
    ModelDescription as ModelDescription,
    describe as describe,
    reasons_of_layers as reasons_of_layers,
    recipes_of as recipes_of,
)
from .equinox import EquinoxLinear as EquinoxLinear, rebuilt as rebuilt
from .haliax import HaliaxEmbedding as HaliaxEmbedding, HaliaxLinear as HaliaxLinear, HaliaxMoELinear as HaliaxMoELinear
from .kernel import (
    Kernel as Kernel,
    axes_of as axes_of,
    number_of_features as number_of_features,
    with_names_of_stacks as with_names_of_stacks,
)
from .only_where_faster import FasterOn as FasterOn
from .predicted_time import Prediction as Prediction
from .quantized import AbstractQuantizedLayer as AbstractQuantizedLayer, is_quantized_layer as is_quantized_layer
from .quantized_kernels import quantize_kernels as quantize_kernels
from .rule import LayerRule as LayerRule, OnlyIfNamed as OnlyIfNamed, Refused as Refused
from .state_dict_names import Place as Place, Places as Places
