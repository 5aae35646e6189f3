"""What published models say in `config.json`, with small sizes: the keys and the other values are as published."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_USUAL = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
_WINDOW = {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False}
_GEMMA = {
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 32,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-06,
    "sliding_window": 8,
    "tie_word_embeddings": None,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_NO_BIASES = {"attention_bias": False}


def _yarn(**more: object) -> dict[str, object]:
    return {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "rope_type": "yarn",
        **more,
    }


_LONG = {"long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0], "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}
_HYBRID = ["sliding_attention"] * 3 + ["full_attention"]

PUBLISHED: dict[str, dict[str, object]] = {
    "Llama-2-7b": {"model_type": "llama", "pretraining_tp": 1, "rope_theta": None, "attention_dropout": None},
    "Llama-3.2-1B": {
        "model_type": "llama",
        "head_dim": 16,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        **_BIASES,
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        **_BIASES,
    },
    "vicuna-7b-v1.5": {"model_type": "llama", "max_sequence_length": 64, "rope_theta": None},
    "Mistral-7B-v0.1": {"model_type": "mistral", "sliding_window": 8},
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rope_theta": None,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "Qwen2.5-7B": {"model_type": "qwen2", "rope_theta": 1000000.0, "use_mrope": False, **_WINDOW},
    "R1-Distill-Qwen": {"model_type": "qwen2", "use_mrope": False, **_WINDOW, "rope_scaling": _yarn()},
    "Qwen3-8B": {"model_type": "qwen3", "head_dim": 32, "attention_bias": False, **_WINDOW, "sliding_window": None},
    "Phi-3-mini-4k": {
        "model_type": "phi3",
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 64,
        "resid_pdrop": 0.0,
        "sliding_window": 8,
        **_NO_BIASES,
    },
    "phi-4": {
        "model_type": "phi3",
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 64,
        "resid_pdrop": 0.0,
        "rope_theta": 250000,
        "sliding_window": None,
        **_BIASES,
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rope_scaling": {**_LONG, "type": "longrope"},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        **_BIASES,
    },
    "granite-3.1-8b": {
        "model_type": "granite",
        "attention_dropout": 0.1,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "tie_word_embeddings": True,
        **_BIASES,
    },
    "OLMo-2-7B": {"model_type": "olmo2", "rope_theta": 500000, **_NO_BIASES},
    "Olmo-3-7B": {
        "model_type": "olmo3",
        "layer_types": _HYBRID,
        "rope_scaling": _yarn(attention_factor=1.2079441541679836),
        "rope_theta": 500000,
        "sliding_window": 8,
        **_NO_BIASES,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 4,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "pretraining_tp": 2,
        "rope_theta": 5000000.0,
        **_WINDOW,
        "sliding_window": None,
        **_BIASES,
    },
    "Ministral-3-3B": {
        "model_type": "ministral3",
        "head_dim": 32,
        "rope_parameters": {
            **_yarn(factor=4.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0, rope_theta=1000000.0),
            "type": "yarn",
        },
        "rope_theta": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "Seed-OSS-36B": {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 32,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "residual_dropout": 0.1,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
    },
    "AFM-4.5B": {
        "model_type": "arcee",
        "head_dim": 16,
        "hidden_act": "relu2",
        "rope_scaling": _yarn(mscale=1.0),
        "rope_theta": 500000.0,
        **_BIASES,
    },
    "ERNIE-4.5-0.3B": {
        "model_type": "ernie4_5",
        "architectures": ["Ernie4_5_ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_ernie4_5.Ernie4_5_Config"},
        "head_dim": 32,
        "rope_theta": 500000,
        "tie_word_embeddings": True,
        "use_bias": False,
        "attention_dropout": None,
        "use_cache": False,
    },
    "Hunyuan-7B": {
        "model_type": "hunyuan_v1_dense",
        "add_classification_head": False,
        "attention_bias": False,
        "attention_head_dim": 32,
        "cla_share_factor": 2,
        "class_num": 0,
        "dense_list": [4096, 0],
        "enable_lm_head_fp32": True,
        "eod_token_id": 127967,
        "head_dim": 32,
        "im_end_id": 5,
        "mask_init_id": 12,
        "mlp_bias": False,
        "norm_type": "rms",
        "org_vocab_size": 64,
        "pool_type": "last",
        "position_embedding_xdrope": False,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "tie_word_embeddings": True,
        "use_cla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    },
    "GLM-4-9B-0414": {
        "model_type": "glm4",
        "attention_bias": True,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 144,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 2,
    },
}


def published() -> dict[str, dict[str, object]]:
    """The configurations by the models' names."""
    rows = {name: {**SIZES, **_USUAL, **keys} for name, keys in PUBLISHED.items()}
    # A key that is not there is not the same as null.
    absent = {name: {key for key, value in keys.items() if value is None} for name, keys in PUBLISHED.items()}
    for name, keys in rows.items():
        for key in absent[name] - {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}:
            del keys[key]
    return rows
