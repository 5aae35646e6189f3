"""The classes that are rematerialized by default."""

import equinox as eqx
import haliax.nn as hnn
from haliax.nn.normalization import LayerNormBase

from .between import BetweenLayers
from .rule import RematerializationRule, WholeCall


default_rematerialization: tuple[RematerializationRule, ...] = (
    # Haliax's `LayerNorm` and `RmsNorm`, and Levanter's, which derive from the same class.
    WholeCall((LayerNormBase, eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm)),
    BetweenLayers(
        # For Llama, Mistral, Qwen and Gemma; and for OLMo 2.
        ("levanter.models.llama:LlamaMlp", "levanter.models.olmo:Olmo2MLP"),
        before=("gate_proj", "up_proj"),
        after=("down_proj",),
        gated=True,
    ),
    BetweenLayers(("levanter.models.mixtral:MixtralMoEMlp",), before=("w1", "w3"), after=("w2",), gated=True),
    BetweenLayers(("levanter.models.modernbert:ModernBertMlp",), before=("Wi",), after=("Wo",), gated=True),
    BetweenLayers(("levanter.models.apertus:ApertusMlp",), before=("up_proj",), after=("down_proj",)),
    BetweenLayers(("levanter.models.gpt2:Gpt2Mlp",), before=("c_fc",), after=("c_proj",)),
    BetweenLayers(("levanter.models.whisper:WhisperMlp",), before=("fc1",), after=("fc2",)),
    BetweenLayers((hnn.MLP, eqx.nn.MLP), before=("layers",), after=("layers",)),
)
"""The default rules of `rematerialize`: Haliax's, Equinox's and Levanter's norms and feed-forward layers."""
