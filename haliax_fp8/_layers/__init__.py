"""Which layer classes can be converted, and how: one rule per class, a value that users can add to."""

import equinox as eqx
import haliax.nn as hnn

from ._base import LayerRule as LayerRule, Refused as Refused
from ._equinox import EquinoxLinear as EquinoxLinear, Fp8Linear as Fp8Linear
from ._haliax import (
    Fp8Embedding as Fp8Embedding,
    Fp8MoELinear as Fp8MoELinear,
    HaliaxEmbedding as HaliaxEmbedding,
    HaliaxLinear as HaliaxLinear,
    HaliaxMoELinear as HaliaxMoELinear,
)


default_layers: tuple[LayerRule, ...] = (
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
"""The rules that `Fp8Config` uses unless told otherwise; the first one that fits a layer decides."""
