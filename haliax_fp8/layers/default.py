"""The layer classes that are converted unless told otherwise: one rule per class."""

import equinox as eqx
import haliax.nn as hnn

from .equinox import EquinoxLinear
from .haliax import HaliaxEmbedding, HaliaxLinear, HaliaxMoELinear
from .rule import LayerRule, Refused
from .served import ServedLayers


default_rules: tuple[LayerRule, ...] = (
    ServedLayers(),
    HaliaxLinear(),
    HaliaxMoELinear(),
    HaliaxEmbedding(),
    EquinoxLinear(),
    Refused(
        (eqx.nn.GRUCell, eqx.nn.LSTMCell),
        "a recurrent cell multiplies by raw weight matrices; use Fp8DotGeneral in a cell of your own",
    ),
    Refused((eqx.nn.Conv, eqx.nn.ConvTranspose, hnn.Conv, hnn.ConvTranspose), "convolutions have no FP8 product"),
)
"""The default rules of `Fp8Config`; the first one that fits a layer decides."""
