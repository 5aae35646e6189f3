"""Demo: language models in plain Haliax, which the preflight's `--demo`, examples and benchmarks use to try FP8.

Read them and copy from them: their names and arguments may change without notice.
"""

from .fused import fused_causal_attention as fused_causal_attention
from .hugging_face import hugging_face_config as hugging_face_config
from .loss import next_token_loss as next_token_loss
from .transformer import (
    Attention as Attention,
    Block as Block,
    SwiGlu as SwiGlu,
    Transformer as Transformer,
    TransformerConfig as TransformerConfig,
    causal_attention as causal_attention,
    rotary_tables as rotary_tables,
    rotate as rotate,
    swiglu as swiglu,
)
from .variants import MixtureOfExperts as MixtureOfExperts, Mlp as Mlp, layer_norm as layer_norm
