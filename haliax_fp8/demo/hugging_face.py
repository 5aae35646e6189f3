"""The configuration with which Hugging Face's libraries build the demo's models."""

from typing import Any

import haliax.nn as hnn

from .transformer import Transformer
from .variants import MixtureOfExperts


def hugging_face_config(model: Transformer, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a model: a Llama, or with a mixture of experts a Mixtral.

    The weights need no permutation: both libraries rotate halves of a head, and number heads alike.

    Args:
        model: The model, converted or not.
        dtype: The dtype in which engines compute.

    Raises:
        ValueError: If the model has neither architecture: if it has learned positions, LayerNorm or another
            feed-forward layer.

    Example:
        >>> from haliax_fp8.demo import Transformer, TransformerConfig
        >>> model = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> hugging_face_config(model)["architectures"]
        ['LlamaForCausalLM']
    """
    config = model.config
    block = model.blocks.stacked if isinstance(model.blocks, hnn.Stacked) else model.blocks.blocks[0]
    if config.rope_theta is None or not isinstance(model.norm, hnn.RmsNorm):
        raise ValueError("model has learned positions or LayerNorm, so it is not a Llama; use RoPE and RMSNorm")
    shared = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        # Older versions of transformers read the first key of each pair, newer ones the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.use_bias,
        "mlp_bias": config.use_bias,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if isinstance(block.mlp, MixtureOfExperts):
        experts = {"num_local_experts": block.mlp.Experts.size, "num_experts_per_tok": block.mlp.Chosen.size}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **shared, **experts}
    if not all(hasattr(block.mlp, name) for name in ("gate", "up", "down")):
        raise ValueError(f"model has {type(block.mlp).__name__} in its blocks, so it is not a Llama; use SwiGlu")
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shared}
