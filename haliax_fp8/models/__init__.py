"""Models: a family of language models in plain Haliax, which examples train, exports name and `--demo` compiles.

And low-rank adapters, for these and for any other model of Haliax or Equinox.
"""

from .adapters import (
    AdaptedModel as AdaptedModel,
    LoraLinear as LoraLinear,
    add_lora as add_lora,
    merge_lora as merge_lora,
    with_dropout_keys as with_dropout_keys,
)
from .feed_forward import (
    JoinedSwiGlu as JoinedSwiGlu,
    MixtureOfExperts as MixtureOfExperts,
    Mlp as Mlp,
    SwiGlu as SwiGlu,
    geglu as geglu,
    squared_relu as squared_relu,
    swiglu as swiglu,
)
from .rotary import (
    LinearRope as LinearRope,
    Llama3Rope as Llama3Rope,
    LongRope as LongRope,
    NtkRope as NtkRope,
    Rope as Rope,
    YarnRope as YarnRope,
    rotary_tables as rotary_tables,
    rotate as rotate,
)
from .transformer import (
    Attention as Attention,
    Block as Block,
    QueryGrowth as QueryGrowth,
    Transformer as Transformer,
    TransformerConfig as TransformerConfig,
    causal_attention as causal_attention,
    offset_rms_norm as offset_rms_norm,
)
