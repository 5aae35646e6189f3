"""A folder's `config.json` as a model of `models`, and back, by the rows of `folders/families.py`."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import haliax.nn as hnn

from ..folders.config_keys import ELSEWHERE, Fields
from ..folders.families import DEFAULTS, FAMILIES, Family
from ..folders.folder import TensorFolder
from ..models.feed_forward import JoinedSwiGlu, MixtureOfExperts, Mlp, SwiGlu, geglu, squared_relu, swiglu
from ..models.rotary import LinearRope, Llama3Rope, LongRope, NtkRope, Rope, YarnRope
from ..models.transformer import (
    OffsetRmsNorm,
    QueryGrowth,
    Transformer,
    TransformerConfig,
    offset_rms_norm,
    rms_norm,
)
from .names import NameMap


_ACTIVATIONS = {"silu": swiglu, "gelu_pytorch_tanh": geglu, "relu2": squared_relu}
_FEED_FORWARD = {"gated": SwiGlu, "joined": JoinedSwiGlu, "plain": Mlp, "experts": MixtureOfExperts}
_NORMS = {"weight": rms_norm, "1 + weight": offset_rms_norm}
# Fields that are the same in a row and in a `TransformerConfig`.
_SAME = (
    *("vocab", "hidden", "mlp", "layers", "max_length", "norm_eps", "heads", "kv_heads", "head_dim", "biases"),
    *("tied_head", "attention_multiplier", "attention_softcap", "embedding_multiplier", "joined_projections"),
    *("logit_softcap", "logits_scaling", "norms", "partial_rotary_factor", "query_key_norm", "residual_multiplier"),
    *("rope_interleaved", "windows"),
)


# --- Reading config.json ----------------------------------------------------------------------------------------------


def transformer_of(folder: TensorFolder, without_effect: tuple[str, ...] = ()) -> tuple[TransformerConfig, NameMap]:
    """The sizes and parts of a folder's model, and the names of its tensors.

    Args:
        folder: The folder.
        without_effect: As in `load`.

    Raises:
        ValueError: If its architecture, or a key of `config.json`, is not supported; names the key.
    """
    model_type = str(folder.config.get("model_type"))
    known = [name for name, family in FAMILIES.items() if not family.checked_only]
    if model_type not in known:
        reason = f": {FAMILIES[model_type].checked_only}" if model_type in FAMILIES else ""
        raise ValueError(
            f"config.json has model_type={model_type!r}, which load does not know{reason}; it knows "
            f"{', '.join(known)}. {ELSEWHERE}"
        )
    family = FAMILIES[model_type]
    has_head = any(name.startswith("lm_head.") for name in folder.tensors)
    fields = family.fields(folder.config, has_head, without_effect)
    parts = {name: fields[name] for name in _SAME}
    ropes = _ropes(fields)
    config = TransformerConfig(
        **parts,
        rope_theta=next((rope.theta for rope in ropes if rope.theta is not None), None),
        rope_scaling=ropes[0].scaling,
        ropes=ropes if len(set(ropes)) > 1 else (),
        query_growth=_query_growth(fields["rope"]),
        norm=_NORMS[fields["norm"]],
        activation=_ACTIVATIONS[fields["activation"]],
        feed_forward=_feed_forward(fields),
        unroll=1,
    )
    return config, NameMap.of(family.names_in(folder.tensors))


def _feed_forward(fields: Fields) -> Any:
    if fields["experts"] is None:
        return _FEED_FORWARD[fields["feed_forward"]].init
    experts, chosen, normalized = fields["experts"]
    return functools.partial(MixtureOfExperts.init, experts=experts, chosen=chosen, normalized=normalized)


def _ropes(fields: Fields) -> tuple[Rope, ...]:
    """RoPE of each layer: those with a window may have another, and some may have none."""
    layers = fields["layers"]
    usual = _rope(fields["rope"], fields)
    local = usual if fields["local_rope"] is None else _rope(fields["local_rope"], fields)
    windows, without = fields["windows"] or (None,) * layers, fields["without_rope"] or (False,) * layers
    each = zip(windows, without, strict=True)
    return tuple(Rope(None) if none else usual if window is None else local for window, none in each)


def _rope(rope: Mapping[str, Any], fields: Fields) -> Rope:
    theta, factor, original = rope["rope_theta"], rope.get("factor", 1.0), "original_max_position_embeddings"
    match rope["rope_type"]:
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, LinearRope(factor))
        case "llama3":
            return Rope(theta, Llama3Rope(factor, rope["low_freq_factor"], rope["high_freq_factor"], rope[original]))
        case "dynamic":
            return Rope(theta, NtkRope(rope["alpha"]))
        case "yarn":
            growth = lambda scale: 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
            scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
            attention = growth(scales[0]) / growth(scales[1]) if all(scales) else growth(1.0)
            betas = (rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0))
            attention = rope.get("attention_factor", attention)
            return Rope(theta, YarnRope(factor, rope[original], attention, *betas, rope.get("truncate", True)))
    # longrope
    length = rope[original]
    factor = rope.get("factor", fields["max_length"] / length)
    attention = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1.0 else 1.0
    attention = rope.get("attention_factor", attention)
    return Rope(theta, LongRope(rope["short_factor"], rope["long_factor"], length, attention))


def _query_growth(rope: Mapping[str, Any]) -> QueryGrowth | None:
    beta = rope.get("llama_4_scaling_beta")
    return None if beta is None else QueryGrowth(beta, rope["original_max_position_embeddings"])


# --- Writing it -------------------------------------------------------------------------------------------------------


def hugging_face_config(model: Transformer, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a model: that of the first family that has its parts, a Llama if it is one.

    The weights need no permutation: both libraries rotate halves of a head, and number heads alike.

    Args:
        model: The model, converted or not.
        dtype: The dtype in which engines compute.

    Raises:
        ValueError: If no family has its parts: if it is not a `models.Transformer`, or has learned positions,
            LayerNorm, another feed-forward layer or another mix of choices. Names what differs from the nearest.

    Example:
        >>> from haliax_fp8.huggingface import hugging_face_config
        >>> from haliax_fp8.models import Transformer, TransformerConfig
        >>> model = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> hugging_face_config(model)["architectures"]
        ['LlamaForCausalLM']
    """
    fields = _fields(model)
    model_type = _described(fields)
    written = FAMILIES[model_type].config(fields)
    return {
        "architectures": list(FAMILIES[model_type].architectures[:1]),
        "model_type": model_type,
        **written,
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _described(fields: Fields) -> str:
    """The first family whose configuration says all fields of a model."""
    differing: dict[str, list[str]] = {}
    for model_type, family in FAMILIES.items():
        if family.checked_only or (fields["experts"] is None) == (family.fixed.get("feed_forward") == "experts"):
            continue
        try:
            read = family.fields(family.config(fields), has_head=not fields["tied_head"])
        except ValueError:
            continue  # It has no such value, for example another kind of RoPE.
        differing[model_type] = [name for name, value in fields.items() if _differ(name, read[name], value)]
        if not differing[model_type]:
            return model_type
    if not differing:
        raise ValueError(f"model has values that no family has: {fields!r:.400}")
    nearest = min(differing, key=lambda name: len(differing[name]))
    values = ", ".join(f"{name}={fields[name]!r:.80}" for name in differing[nearest])
    raise ValueError(
        f"model has {values}, which no config.json says: the nearest is that of {nearest}. Use the parts of a family, "
        "or write the config.json yourself, and give it to export_model as hf_config"
    )


def _differ(name: str, one: Any, other: Any) -> bool:
    return set(one) != set(other) if name == "biases" else one != other


def _fields(model: Transformer) -> Fields:
    """What a model is, in the fields of rows."""
    if not isinstance(model, Transformer):
        raise ValueError(
            f"model is a {type(model).__name__}, not a haliax_fp8.models.Transformer; write the config.json of your "
            "own model yourself, and give it to export_model as hf_config"
        )
    config = model.config
    block = model.blocks.stacked if isinstance(model.blocks, hnn.Stacked) else model.blocks.blocks[0]
    if config.rope_theta is None or not isinstance(model.norm, hnn.RmsNorm):
        raise ValueError("model has learned positions or LayerNorm, so it is not a Llama; use RoPE and RMSNorm")
    feed_forward = next((name for name, kind in _FEED_FORWARD.items() if _has_parts(block.mlp, kind)), None)
    if feed_forward is None:
        raise ValueError(f"model has {type(block.mlp).__name__} in its blocks, so it is not a Llama; use SwiGlu")
    fields: Fields = {**DEFAULTS, **{name: getattr(config, name) for name in _SAME}, "feed_forward": feed_forward}
    fields["norm"] = "1 + weight" if isinstance(model.norm, OffsetRmsNorm) else "weight"
    # A function of a user's own computes the same, such as a fused one.
    names = {function: name for name, function in _ACTIVATIONS.items()}
    fields["activation"] = names.get(config.activation, "relu2" if feed_forward == "plain" else "silu")
    if feed_forward == "experts":
        fields["experts"] = (block.mlp.Experts.size, block.mlp.Chosen.size, block.mlp.normalized)
        fields["activation"] = "silu"
    return fields | _rope_fields(config)


def _has_parts(layer: Any, kind: type) -> bool:
    """Whether a feed-forward layer has the layers of a kind, whatever its class."""
    if isinstance(layer, MixtureOfExperts) or kind is MixtureOfExperts:
        return isinstance(layer, kind)
    parts = {"gate", "up", "down", "gate_up"}
    return {name for name in parts if hasattr(layer, name)} == parts & set(kind.__dataclass_fields__)


def _rope_fields(config: TransformerConfig) -> Fields:
    ropes = config.ropes or (Rope(config.rope_theta, config.rope_scaling),) * config.layers
    windows = config.windows or (None,) * config.layers
    rotated = [(rope, window) for rope, window in zip(ropes, windows, strict=True) if rope.theta is not None]
    usual = {rope for rope, window in rotated if window is None}
    local = {rope for rope, window in rotated if window is not None}
    usual = usual or set(local)
    if max(len(usual), len(local)) > 1:
        raise ValueError(
            f"model has ropes={config.ropes!r:.120}, which no config.json says: layers with a window have to have the "
            "same, and those without"
        )
    written = _rope_settings(usual.pop())
    if config.query_growth is not None:
        if not isinstance(config.query_growth, QueryGrowth):
            raise ValueError(f"model has query_growth={config.query_growth!r:.60}, not a QueryGrowth; use that")
        written["llama_4_scaling_beta"] = config.query_growth.beta
        written.setdefault("original_max_position_embeddings", config.query_growth.original_length)
    fields: Fields = {"rope": written}
    if local and (of_windows := _rope_settings(local.pop())) != written:
        fields["local_rope"] = of_windows
    without = tuple(rope.theta is None for rope in ropes)
    return fields | ({"without_rope": without} if any(without) else {})


def _rope_settings(rope: Rope) -> dict[str, Any]:
    """As a row reads it, with all keys of its kind that have a value."""
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    original = "original_max_position_embeddings"
    match rope.scaling:
        case None:
            return settings
        case LinearRope(factor):
            return settings | {"rope_type": "linear", "factor": factor}
        case Llama3Rope(factor, low, high, length):
            of_kind = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, original: length}
            return settings | {"rope_type": "llama3", **of_kind}
        case NtkRope(alpha):
            return settings | {"rope_type": "dynamic", "alpha": alpha}
        case YarnRope(factor, length, attention, fast, slow, truncate):
            of_kind = {"factor": factor, original: length, "attention_factor": attention}
            of_kind |= {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            return settings | {"rope_type": "yarn", **of_kind}
        case LongRope(short, long, length, attention):
            of_kind = {"short_factor": short, "long_factor": long, original: length, "attention_factor": attention}
            return settings | {"rope_type": "longrope", **of_kind}
    raise ValueError(
        f"model has rope_scaling={rope.scaling!r:.60}, which config.json cannot say; use one of models, such as "
        "Llama3Rope or YarnRope"
    )


def names_of(model: Any, names: Any = None, tensors: Mapping[str, Any] | None = None) -> NameMap:
    """The names of a model's tensors in folders: those that were given, or those of its architecture, if it has one.

    Args:
        model: The model.
        names: As in `export_model`.
        tensors: Those of a folder that is read, which may have names of another library.
    """
    if names is None and (family := _family_of(model)) is not None:
        return NameMap.of(family.names if tensors is None else family.names_in(tensors))
    return NameMap.of(names)


def config_of(model: Any, hf_config: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """What `config.json` says of a model: what was given, or what describes its architecture, if it has one."""
    if hf_config is None and _family_of(model) is not None:
        return hugging_face_config(model)
    return hf_config or {}


def _family_of(model: Any) -> Family | None:
    try:
        return FAMILIES[_described(_fields(model))]
    except ValueError:
        return None
