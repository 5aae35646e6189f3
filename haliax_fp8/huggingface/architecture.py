"""A folder's `config.json` as a model of `models`, and back."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import haliax.nn as hnn

from ..folders.folder import TensorFolder
from ..models.adapters import require_merged
from ..models.transformer import LinearRope, Llama3Rope, MixtureOfExperts, Transformer, TransformerConfig
from .names import LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, NameMap


# --- Reading config.json ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Family:
    """Models that `config.json` describes with the same keys.

    Args:
        architecture: The class in Transformers.
        names: The names of their tensors.
        query_key_norm: Whether heads are normed.
        biases: The layers that always have biases.
    """

    architecture: str
    names: NameMap
    query_key_norm: bool = False
    biases: tuple[str, ...] = ()


_QKV = ("query", "key", "value")
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", LLAMA),
    "mistral": _Family("MistralForCausalLM", LLAMA),
    "qwen2": _Family("Qwen2ForCausalLM", LLAMA, biases=_QKV),
    "qwen3": _Family("Qwen3ForCausalLM", QWEN3, query_key_norm=True),
    "mixtral": _Family("MixtralForCausalLM", MIXTRAL),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", QWEN3_MOE, query_key_norm=True),
}

# Keys that describe the tokenizer, the file, or training in another library.
_WITHOUT_EFFECT = frozenset(
    (
        "_name_or_path _attn_implementation_autoset architectures bos_token_id chunk_size_feed_forward dtype "
        "eos_token_id id2label initializer_range is_encoder_decoder label2id model_type output_attentions "
        "output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type quantization_config "
        "return_dict router_aux_loss_coef tokenizer_class torch_dtype transformers_version unsloth_version use_cache"
    ).split()
)


class _Keys:
    """The keys of a `config.json`, and which of them were read."""

    def __init__(self, config: Mapping[str, Any]):
        self.config, self.read = config, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.get(key, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not fits or (kind is int and not isinstance(value, int)):
            what = "has no" if value is None else f"has {value!r:.40} for"
            raise ValueError(f"config.json {what} {key}, which has to be a positive {kind.__name__}")
        return kind(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"config.json has {value!r:.40} for {key}, which has to be true or false")
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Raises a ValueError if a key is there and not one of the supported values."""
        if key in self.config and self.get(key) not in (*supported, None):
            values = " or ".join(map(repr, supported))
            raise ValueError(
                f"config.json has {key}={self.config[key]!r:.60}, which changes what the model computes; {values} is "
                "supported. Build the model yourself, and give it to import_model"
            )


def transformer_of(folder: TensorFolder, without_effect: tuple[str, ...] = ()) -> tuple[TransformerConfig, NameMap]:
    """The sizes and parts of a folder's model, and the names of its tensors.

    Args:
        folder: The folder.
        without_effect: As in `load`.

    Raises:
        ValueError: If its architecture, or a key of `config.json`, is not supported; names the key.
    """
    keys = _Keys(folder.config)
    model_type = keys.get("model_type")
    if model_type not in _FAMILIES:
        raise ValueError(
            f"config.json has model_type={model_type!r}, which load does not know; it knows {', '.join(_FAMILIES)}. "
            "Build the model yourself, and give it to import_model"
        )
    family = _FAMILIES[model_type]
    if (architectures := keys.get("architectures")) not in (None, [family.architecture]):
        raise ValueError(
            f"config.json has architectures={architectures!r:.80}; load builds a {family.architecture}. Build the "
            "model yourself, and give it to import_model"
        )
    heads, hidden = keys.number("num_attention_heads", int), keys.number("hidden_size", int)
    theta, scaling = _rope(keys)
    options: dict[str, Any] = {}
    if "num_local_experts" in keys.config or "num_experts" in keys.config:
        options["feed_forward"] = _experts(keys, model_type)
    keys.only("hidden_act", "silu")
    # Only training has them, and another library's.
    keys.only("attention_dropout", 0.0)
    keys.only("router_jitter_noise", 0.0)
    width = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
    if model_type == "qwen3_moe":
        # That of dense blocks, of which there are none.
        keys.get("intermediate_size")
    config = TransformerConfig(
        layers=keys.number("num_hidden_layers", int),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.number("num_key_value_heads", int, heads),
        head_dim=keys.number("head_dim", int, hidden // heads),
        mlp=keys.number(width, int),
        vocab=keys.number("vocab_size", int),
        max_length=_max_length(keys),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=keys.number("rms_norm_eps", float),
        query_key_norm=family.query_key_norm,
        biases=_biases(keys, model_type, family),
        tied_head=_is_tied(keys, folder),
        unroll=1,
        **options,
    )
    known = keys.read | _WITHOUT_EFFECT | set(without_effect)
    if unknown := sorted(key for key, value in keys.config.items() if key not in known and value is not None):
        raise ValueError(
            f"config.json has keys that load does not know for {model_type}: {', '.join(unknown)}. If they do not "
            f"change what the model computes, name them: load(directory, without_effect={tuple(unknown)!r})"
        )
    return config, family.names


def _rope(keys: _Keys) -> tuple[float, LinearRope | Llama3Rope | None]:
    """RoPE's base and scaling, which older and newer versions of Transformers write under different keys."""
    settings: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = keys.get(key, {})
        if not isinstance(given, dict):
            raise ValueError(f"config.json has {given!r:.60} for {key}, which has to be an object")
        settings |= given
    key = "rope_theta"
    if key in settings and keys.get(key, settings[key]) != settings[key]:
        raise ValueError(f"config.json has rope_theta={keys.config[key]!r} and, in rope_parameters, {settings[key]!r}")
    inner = _Keys({key: keys.get(key), **settings})
    theta, kind = inner.number(key, float), inner.get("rope_type", inner.get("type", "default"))
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearRope(inner.number("factor", float))
        case "llama3":
            scaling = Llama3Rope(
                inner.number("factor", float),
                inner.number("low_freq_factor", float),
                inner.number("high_freq_factor", float),
                inner.number("original_max_position_embeddings", int),
            )
        case _:
            raise ValueError(
                f"config.json has rope_type={kind!r} in rope_scaling; 'default', 'linear' and 'llama3' are supported. "
                "Build the model yourself, and give it to import_model"
            )
    inner.read |= {"rope_type", "type"}
    if unknown := sorted(key for key, value in inner.config.items() if key not in inner.read and value is not None):
        raise ValueError(
            f"config.json has {', '.join(unknown)} in rope_scaling, which rope_type={kind!r} does not take"
        )
    return theta, scaling


def _max_length(keys: _Keys) -> int:
    """The longest sequence: in a window of a sliding attention, it is attention to all positions."""
    length, window = keys.number("max_position_embeddings", int), keys.get("sliding_window")
    # Qwen2 and Qwen3 name a window that they do not use.
    uses_window = keys.flag("use_sliding_window") if "use_sliding_window" in keys.config else True
    keys.get("max_window_layers")
    kinds = keys.get("layer_types", [])
    if unknown := sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"config.json has {unknown[0]!r} in layer_types; only full and sliding attention are supported"
        )
    if kinds and "sliding_attention" not in kinds:
        uses_window = False
    return length if window is None or not uses_window else min(length, keys.number("sliding_window", int))


def _biases(keys: _Keys, model_type: str, family: _Family) -> tuple[str, ...]:
    biases = family.biases
    if model_type in ("llama", "qwen3", "qwen3_moe") and keys.flag("attention_bias"):
        biases = (*_QKV, "output")
    if model_type == "llama" and keys.flag("mlp_bias"):
        biases = (*biases, "gate", "up", "down")
    return biases


def _is_tied(keys: _Keys, folder: TensorFolder) -> bool:
    """Whether the head is the embedding; where nothing says so, whether the folder lacks a head."""
    if "tie_word_embeddings" in keys.config:
        return keys.flag("tie_word_embeddings")
    return not any(name.startswith("lm_head.") for name in folder.tensors)


def _experts(keys: _Keys, model_type: str) -> Any:
    chosen, normalized = keys.number("num_experts_per_tok", int), True
    if model_type == "qwen3_moe":
        normalized = keys.flag("norm_topk_prob")
        keys.only("decoder_sparse_step", 1)
        keys.only("mlp_only_layers", [])
    # Newer versions of Transformers write the second for all models.
    counts = {keys.number(key, int) for key in ("num_experts", "num_local_experts") if keys.get(key) is not None}
    if len(counts) != 1:
        raise ValueError(f"config.json has num_experts and num_local_experts, {sorted(counts)}; they mean the same")
    (count,) = counts
    return functools.partial(MixtureOfExperts.init, experts=count, chosen=chosen, normalized=normalized)


# --- Writing it -------------------------------------------------------------------------------------------------------


def hugging_face_config(model: Transformer, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a model: a Llama, Qwen2, Qwen3, Mixtral or Qwen3-MoE.

    The weights need no permutation: both libraries rotate halves of a head, and number heads alike.

    Args:
        model: The model, converted or not.
        dtype: The dtype in which engines compute.

    Raises:
        ValueError: If the model has none of these architectures: if it is not a `models.Transformer`, or has learned
            positions, LayerNorm or another feed-forward layer.

    Example:
        >>> from haliax_fp8.huggingface import hugging_face_config
        >>> from haliax_fp8.models import Transformer, TransformerConfig
        >>> model = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> hugging_face_config(model)["architectures"]
        ['LlamaForCausalLM']
    """
    if not isinstance(model, Transformer):
        raise ValueError(
            f"model is a {type(model).__name__}, not a haliax_fp8.models.Transformer; write the config.json of your "
            "own model yourself, and give it to export_model as hf_config"
        )
    config = model.config
    block = model.blocks.stacked if isinstance(model.blocks, hnn.Stacked) else model.blocks.blocks[0]
    if config.rope_theta is None or not isinstance(model.norm, hnn.RmsNorm):
        raise ValueError("model has learned positions or LayerNorm, so it is not a Llama; use RoPE and RMSNorm")
    has_experts = isinstance(block.mlp, MixtureOfExperts)
    if not has_experts and not all(hasattr(block.mlp, name) for name in ("gate", "up", "down")):
        raise ValueError(f"model has {type(block.mlp).__name__} in its blocks, so it is not a Llama; use SwiGlu")
    if config.query_key_norm:
        model_type = "qwen3_moe" if has_experts else "qwen3"
    elif has_experts:
        model_type = "mixtral"
    else:
        model_type = "qwen2" if set(config.biases) == set(_QKV) else "llama"
    rope = {"rope_type": "default"} | _rope_settings(config.rope_scaling)
    written = {
        "architectures": [_FAMILIES[model_type].architecture],
        "model_type": model_type,
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
        # Older versions of transformers read the first two keys, newer ones the third.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_bias_settings(model_type, config.biases),
    }
    if model_type == "mixtral":
        written |= {"num_local_experts": block.mlp.Experts.size, "num_experts_per_tok": block.mlp.Chosen.size}
    if model_type == "qwen3_moe":
        written |= {"num_experts": block.mlp.Experts.size, "num_experts_per_tok": block.mlp.Chosen.size}
        written |= {"moe_intermediate_size": config.mlp, "norm_topk_prob": block.mlp.normalized}
        written |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    elif has_experts and not block.mlp.normalized:
        raise ValueError("model has experts whose weights do not add up to 1, and no query_key_norm; Mixtral's do")
    return written


def names_of(model: Any, names: Any = None) -> NameMap:
    """The names of a model's tensors in folders: those that were given, or those of its architecture, if it has one.

    Args:
        model: The model.
        names: As in `export_model`.

    Raises:
        ValueError: If the model has adapters, which a folder has no layers for.
    """
    require_merged(model)
    if names is None and isinstance(model, Transformer) and _is_described(model):
        return _FAMILIES[hugging_face_config(model)["model_type"]].names
    return NameMap.of(names)


def config_of(model: Any, hf_config: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """What `config.json` says of a model: what was given, or what describes its architecture, if it has one."""
    if hf_config is None and isinstance(model, Transformer) and _is_described(model):
        return hugging_face_config(model)
    return hf_config or {}


def _is_described(model: Transformer) -> bool:
    try:
        hugging_face_config(model)
    except ValueError:
        return False
    return True


def _rope_settings(scaling: Any) -> dict[str, Any]:
    match scaling:
        case None:
            return {}
        case LinearRope(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Rope(factor, low, high, length):
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", **dict(zip(names, (factor, low, high, length), strict=True))}
    raise ValueError(
        f"model has rope_scaling={scaling!r:.60}, which config.json cannot say; use Llama3Rope or LinearRope"
    )


def _bias_settings(model_type: str, biases: tuple[str, ...]) -> dict[str, bool]:
    """What says which layers have biases.

    Raises:
        ValueError: If no setting says just these.
    """
    attention, mlp, chosen = {*_QKV, "output"}, {"gate", "up", "down"}, set(biases)
    if model_type == "llama" and chosen in (set(), attention, mlp, attention | mlp):
        return {"attention_bias": attention <= chosen, "mlp_bias": mlp <= chosen}
    if model_type in ("qwen3", "qwen3_moe") and chosen in (set(), attention):
        return {"attention_bias": bool(chosen)}
    if chosen == set(_FAMILIES[model_type].biases):
        return {}
    raise ValueError(
        f"model has biases={biases}, which no config.json of {model_type} says; give all of attention biases, or all "
        "of the feed-forward layer, or none"
    )
