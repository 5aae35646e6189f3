"""Families of published models, one row each: what `config.json` says of them, and the names and shapes of tensors.

Whatever reads, writes or checks a folder takes it from here. Rows say it in fields of `models.TransformerConfig`, in
values that JSON has too; `huggingface/architecture.py` makes a configuration of them.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from .._tensor_names import JOINED
from .config_keys import (
    ELSEWHERE,
    Biases,
    Experts,
    Fields,
    FullAttention,
    Group,
    Heads,
    Ignored,
    Keys,
    NoRope,
    Number,
    Only,
    QueryScalar,
    Rope,
    Windows,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that `config.json` describes with the same keys.

    Args:
        architectures: Their class in Transformers, and other names of it.
        names: The parts of the model, and their names in folders.
        keys: The keys that say how its models differ from each other, besides those of all families.
        fixed: What all of its models are; a function takes it from other fields.
        other_names: Names of the same parts that other libraries write.
        heads: The keys of its heads.
        activation: The function between the products of the feed-forward layer, as the key says it.
        activation_key: The key.
        checked_only: Why its models are not built here, though its folders are checked; empty if they are.
    """

    architectures: tuple[str, ...]
    names: Mapping[str, str]
    keys: tuple[Group, ...]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    other_names: tuple[Mapping[str, str], ...] = ()
    heads: Heads = Heads()
    activation: str = "silu"
    activation_key: str = "hidden_act"
    checked_only: str = ""

    def __post_init__(self) -> None:
        fields = {**DEFAULTS, **self.fixed}
        unknown = sorted(self.fixed.keys() - DEFAULTS.keys())
        needed = _parts(fields)
        for names in (self.names, *self.other_names):
            if unknown or set(names) != needed:
                raise ValueError(
                    f"the row of {self.architectures[0]} needs names for {sorted(needed - set(names))}, has names for "
                    f"{sorted(set(names) - needed)} that it has no parts for, and has the unknown fields {unknown}"
                )

    def fields(self, config: Mapping[str, Any], has_head: bool, without_effect: Collection[str] = ()) -> Fields:
        """What a configuration says of a model.

        Args:
            config: What is in `config.json`.
            has_head: Whether the folder has a head, for a configuration that does not say whether it is tied.
            without_effect: Keys that do not matter, besides those that are known not to.

        Raises:
            ValueError: If a value is not supported, or nobody knows a key; names the key.
        """
        keys = Keys(config)
        if (architectures := keys.get("architectures")) not in (None, *([name] for name in self.architectures)):
            raise ValueError(
                f"config.json has architectures={architectures!r:.80}; load builds a {self.architectures[0]}. "
                + ELSEWHERE
            )
        fields: Fields = {**DEFAULTS, "activation": self.activation}
        for group in self._groups:
            fields |= group.read(keys, fields)
        for name, value in self.fixed.items():
            fields[name] = value(fields) if callable(value) else value
        tied = "tie_word_embeddings"
        fields["tied_head"] = keys.flag(tied) if tied in config else not has_head
        known = _WITHOUT_EFFECT.union(without_effect)
        if unknown := [key for key in keys.unread(known) if not key.endswith(("_id", "_dropout", "_pdrop"))]:
            raise ValueError(
                f"config.json has keys that load does not know for {keys.get('model_type')}: {', '.join(unknown)}. If "
                "they do not change what the model computes, name them: "
                f"load(directory, without_effect={tuple(unknown)!r})"
            )
        return fields

    def config(self, fields: Fields) -> dict[str, Any]:
        """The keys for what a model is, as far as the family has them."""
        written: dict[str, Any] = {}
        for group in self._groups:
            written |= group.write(fields)
        return written | {"tie_word_embeddings": fields["tied_head"]}

    def names_in(self, tensors: Collection[str]) -> Mapping[str, str]:
        """The names that a folder has: those of the family, or of another library that writes it."""
        for names in self.other_names:
            changed = [f"{name.format(i=0, e=0)}.weight" for part, name in names.items() if name != self.names[part]]
            if all(any(tensor.startswith(name) for tensor in tensors) for name in changed):
                return names
        return self.names

    @property
    def norms_multiply(self) -> bool:
        """Whether a norm's weight multiplies: if it is zero, so are the norm's outputs."""
        return self.fixed.get("norm") != "1 + weight"

    @functools.cached_property
    def parts(self) -> dict[str, str]:
        """The part that a tensor belongs to, by the last component of its layer's name."""
        pairs = ((name, part) for names in (self.names, *self.other_names) for part, name in names.items())
        return {name.rpartition(".")[2]: part.removesuffix(".{e}").rpartition(".")[2] for name, part in pairs}

    @property
    def layers_of_block(self) -> list[str]:
        """The layers of a block, by their names in it, but experts and routers."""
        names = {part: name.partition("{i}.")[2] for part, name in self.names.items() if "{i}" in part}
        return [name for part, name in names.items() if not part.endswith(("{e}", "router"))]

    def shape(self, layer: str, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The shape of a layer's weight; None if the configuration does not say it.

        Args:
            layer: Its name in the folder.
            config: What is in `config.json`, its sizes positive.
        """
        last = layer.rpartition(".")[2]
        names = [last] if last in self.parts else JOINED.get(last, ())
        if not names or "shared_expert" in layer:
            return None
        known = self._shapes(config, is_expert="experts" in layer)
        shapes = [known.get(self.parts.get(name, ""), ()) for name in names]
        if not all(shape and all(shape) for shape in shapes):
            return None
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _shapes(self, config: Mapping[str, Any], *, is_expert: bool) -> dict[str, tuple[Any, ...]]:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if not hidden or not heads:
            return {}
        # Some models have blocks without experts between those with them.
        experts = next((group for group in self.keys if isinstance(group, Experts)), None) if is_expert else None
        inner = config.get(experts.width if experts else "intermediate_size") or config.get("intermediate_size") or 0
        width = config.get("head_dim") or self.heads.head_dim or hidden // heads
        query, key = heads * width, (config.get("num_key_value_heads") or heads) * width
        normed = (query, key) if self.fixed.get("query_key_norm") == "all heads" else (width, width)
        norms = ("norm", "attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
        return {
            **dict.fromkeys(("embedding", "head"), (config.get("vocab_size"), hidden)),
            **dict.fromkeys(norms, (hidden,)),
            **{"query": (query, hidden), "key": (key, hidden), "value": (key, hidden), "output": (hidden, query)},
            **{"query_key_value": (query + 2 * key, hidden), "query_norm": normed[:1], "key_norm": normed[1:]},
            **{"gate": (inner, hidden), "up": (inner, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)},
        }

    @property
    def _groups(self) -> tuple[Group, ...]:
        has_experts = any(isinstance(group, Experts) for group in self.keys)
        windows = () if any(isinstance(group, Windows) for group in self.keys) else (FullAttention(),)
        activation = Only(self.activation_key, self.activation, written=True)
        return (*_SIZES, *(() if has_experts else (_INNER,)), self.heads, activation, *windows, *self.keys)


# What a model is if nothing says otherwise.
DEFAULTS: Fields = {
    "activation": "silu",
    "attention_multiplier": None,
    "attention_softcap": None,
    "biases": (),
    "embedding_multiplier": 1.0,
    "experts": None,
    "feed_forward": "gated",
    "joined_projections": False,
    "local_rope": None,
    "logit_softcap": None,
    "logits_scaling": 1.0,
    "norm": "weight",
    "norms": "before",
    "partial_rotary_factor": 1.0,
    "query_key_norm": False,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "windows": (),
    "without_rope": (),
}

_SIZES = (
    Number("vocab_size", "vocab", int),
    Number("hidden_size", "hidden", int),
    Number("num_hidden_layers", "layers", int),
    Number("max_position_embeddings", "max_length", int),
    Number("rms_norm_eps", "norm_eps"),
)

_INNER = Number("intermediate_size", "mlp", int)

# Keys that describe the tokenizer, the file, another library, or its training.
_WITHOUT_EFFECT = frozenset(
    (
        "_name_or_path _attn_implementation_autoset architectures auto_map cache_implementation "
        "chunk_size_feed_forward dtype id2label initializer_range is_encoder_decoder label2id "
        "max_sequence_length model_type output_attentions output_hidden_states output_router_logits pretraining_tp "
        "problem_type quantization_config return_dict router_aux_loss_coef router_jitter_noise tokenizer_class "
        "torch_dtype transformers.js_config transformers_version unsloth_version use_cache"
    ).split()
)


# --- Names ------------------------------------------------------------------------------------------------------------


def _parts(fields: Fields) -> set[str]:
    """The parts of a model that tensors belong to."""
    projections = ("query_key_value",) if fields["joined_projections"] else ("query", "key", "value")
    normed = ("query_norm", "key_norm") if fields["query_key_norm"] else ()
    inner = {
        "gated": ("gate", "up", "down"),
        "joined": ("gate_up", "down"),
        "plain": ("up", "down"),
        "experts": ("router", "gate.{e}", "up.{e}", "down.{e}"),
    }[fields["feed_forward"]]
    block = ["attention_norm", "mlp_norm"]
    block += ["attention_post_norm", "mlp_post_norm"] if fields["norms"] == "both" else []
    block += [f"attention.{name}" for name in (*projections, "output", *normed)]
    block += [f"mlp.{name}" for name in inner]
    return {"embedding", "norm", "head", *(f"blocks.{{i}}.{name}" for name in block)}


def _names(names: str) -> dict[str, str]:
    """Names of a block's parts, `part=name` each."""
    pairs = (pair.split("=") for pair in names.split())
    return {f"blocks.{{i}}.{part}": f"model.layers.{{i}}.{name}" for part, name in pairs}


_AROUND = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_GATED = "mlp.gate=mlp.gate_proj mlp.up=mlp.up_proj mlp.down=mlp.down_proj"
_EXPERTS = " ".join(
    ["mlp.router=mlp.gate", *(f"mlp.{part}.{{e}}=mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down"))]
)
_ATTENTION = {
    **_AROUND,
    **_names(
        "attention_norm=input_layernorm mlp_norm=post_attention_layernorm attention.query=self_attn.q_proj "
        "attention.key=self_attn.k_proj attention.value=self_attn.v_proj attention.output=self_attn.o_proj"
    ),
}
_NORMED = _names("attention.query_norm=self_attn.q_norm attention.key_norm=self_attn.k_norm")

LLAMA = _ATTENTION | _names(_GATED)
QWEN3 = LLAMA | _NORMED
QWEN2_MOE = _ATTENTION | _names(_EXPERTS)
QWEN3_MOE = QWEN2_MOE | _NORMED
JOINED_MLP = _names("mlp.gate_up=mlp.gate_up_proj mlp.down=mlp.down_proj")
PHI3 = {
    **_AROUND,
    **_names(
        "attention_norm=input_layernorm mlp_norm=post_attention_layernorm "
        "attention.query_key_value=self_attn.qkv_proj attention.output=self_attn.o_proj"
    ),
    **JOINED_MLP,
}
OLMO2 = QWEN3 | _names("attention_norm=post_attention_layernorm mlp_norm=post_feedforward_layernorm")
ARCEE = _ATTENTION | _names("mlp.up=mlp.up_proj mlp.down=mlp.down_proj")
HUNYUAN = LLAMA | _names("attention.query_norm=self_attn.query_layernorm attention.key_norm=self_attn.key_layernorm")
GLM4 = {
    **_ATTENTION,
    **_names("attention_post_norm=post_self_attn_layernorm mlp_post_norm=post_mlp_layernorm"),
    **JOINED_MLP,
}
GEMMA2 = LLAMA | _names(
    "attention_post_norm=post_attention_layernorm mlp_norm=pre_feedforward_layernorm "
    "mlp_post_norm=post_feedforward_layernorm"
)
GEMMA3 = GEMMA2 | _NORMED
MIXTRAL = _ATTENTION | _names(
    "mlp.router=block_sparse_moe.gate mlp.gate.{e}=block_sparse_moe.experts.{e}.w1 "
    "mlp.up.{e}=block_sparse_moe.experts.{e}.w3 mlp.down.{e}=block_sparse_moe.experts.{e}.w2"
)

# --- The rows ---------------------------------------------------------------------------------------------------------

_QKV, _OUTPUT, _MLP = ("query", "key", "value"), ("output",), ("gate", "up", "down")
_ATTENTION_BIAS, _MLP_BIAS = Biases("attention_bias", _QKV + _OUTPUT), Biases("mlp_bias", _MLP)
# Qwen's windows begin at a layer; with the usual 28 of 28, none has one.
_QWEN_WINDOWS = Windows(
    lambda layer, keys: layer >= keys.number("max_window_layers", int, 28), 4096, flag=True, also=("max_window_layers",)
)
_NO_MROPE = Only("use_mrope", False)


def _no_rope_layer(layer: int, keys: Keys) -> bool:
    rotates = keys.get("no_rope_layers")
    return not rotates[layer] if rotates else (layer + 1) % keys.number("no_rope_layer_interval", int, 4) == 0


def _gemma3_layer(layer: int, keys: Keys) -> bool:
    return (layer + 1) % keys.number("sliding_window_pattern", int, 6) != 0


_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_GEMMA = (QueryScalar(), Only("hidden_act", "gelu_pytorch_tanh"), Only("use_bidirectional_attention", False))
_OF_GEMMA: Fields = {
    "norms": "both",
    "norm": "1 + weight",
    "embedding_multiplier": lambda fields: fields["hidden"] ** 0.5,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        ("LlamaForCausalLM",),
        LLAMA,
        (
            *(Rope(), _ATTENTION_BIAS, _MLP_BIAS),
            # SmolLM2's, of nanotron.
            *(Only("is_llama_config", True), Only("rope_interleaved", False)),
        ),
    ),
    "qwen2": Family(
        ("Qwen2ForCausalLM",),
        LLAMA,
        (Rope(), _QWEN_WINDOWS, _NO_MROPE),
        {"biases": _QKV},
    ),
    "mistral": Family(("MistralForCausalLM",), LLAMA, (Rope(), Windows(default=4096))),
    "qwen3": Family(("Qwen3ForCausalLM",), QWEN3, (Rope(), _ATTENTION_BIAS, _QWEN_WINDOWS), {"query_key_norm": True}),
    "mixtral": Family(
        ("MixtralForCausalLM",),
        MIXTRAL,
        (Rope(1e6), Windows(), Experts("num_local_experts")),
        {"feed_forward": "experts"},
        # llm-compressor's, with and without the module's name in Transformers 5.
        other_names=(
            QWEN2_MOE,
            _ATTENTION | _names(_EXPERTS.replace("=mlp.", "=block_sparse_moe.")),
        ),
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        QWEN3_MOE,
        (
            *(Rope(), _ATTENTION_BIAS, Windows(default=4096, flag=True, also=("max_window_layers",))),
            Experts("num_experts", normalized=True, width="moe_intermediate_size"),
            *(Only("decoder_sparse_step", 1, written=True), Only("mlp_only_layers", [], written=True)),
        ),
        {"query_key_norm": True, "feed_forward": "experts"},
    ),
    "phi3": Family(
        ("Phi3ForCausalLM",),
        PHI3,
        (
            Rope(partial=1.0, kinds=("default", "longrope"), renamed={"su": "longrope", "yarn": "longrope"}),
            Windows(),
            *(Only("attention_bias", False), Only("mlp_bias", False), Only("lm_head_bias", False)),
            # Phi-4-mini's.
            *(Only("full_attn_mod", 1), Only("interpolate_factor", 1)),
        ),
        {"joined_projections": True, "feed_forward": "joined"},
    ),
    "granite": Family(
        ("GraniteForCausalLM",),
        LLAMA,
        (
            *(Rope(), _ATTENTION_BIAS, _MLP_BIAS),
            *(Number("embedding_multiplier", default=1.0), Number("residual_multiplier", default=1.0)),
            *(Number("attention_multiplier", default=1.0), Number("logits_scaling", default=1.0)),
        ),
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM",), OLMO2, (Rope(), _ATTENTION_BIAS), {"norms": "after", "query_key_norm": "all heads"}
    ),
    "olmo3": Family(
        ("Olmo3ForCausalLM",),
        OLMO2,
        (Windows(lambda layer, keys: (layer + 1) % 4 != 0, 4096), Rope(500_000.0, local=0.0), _ATTENTION_BIAS),
        {"norms": "after", "query_key_norm": "all heads"},
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        LLAMA,
        (
            Rope(2_000_000.0),
            NoRope(),
            Windows(_no_rope_layer, flag=True, also=("max_window_layers",)),
            _ATTENTION_BIAS,
            _MLP_BIAS,
        ),
    ),
    "ministral3": Family(
        ("Ministral3ForCausalLM",),
        LLAMA,
        (
            Rope(
                1e6,
                kinds=("yarn",),
                more=("llama_4_scaling_beta",),
                without_effect={"max_position_embeddings": None},
            ),
            Windows(),
        ),
        heads=Heads(128),
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",),
        LLAMA,
        (Rope(), Biases("attention_bias", _QKV, True), Biases("attention_out_bias", _OUTPUT), _MLP_BIAS),
        heads=Heads(128),
    ),
    "arcee": Family(
        ("ArceeForCausalLM",),
        ARCEE,
        (Rope(), _ATTENTION_BIAS, Biases("mlp_bias", ("up", "down"))),
        {"feed_forward": "plain"},
        activation="relu2",
    ),
    "ernie4_5": Family(
        # The second is that of its own code, from before Transformers had it.
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        LLAMA,
        (Rope(500_000.0), Biases("use_bias", _QKV + _OUTPUT + _MLP)),
        {"rope_interleaved": True},
        heads=Heads(128),
    ),
    "hunyuan_v1_dense": Family(
        ("HunYuanDenseV1ForCausalLM",),
        HUNYUAN,
        (
            Rope(
                kinds=("default", "dynamic"),
                without_effect={"beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            ),
            _ATTENTION_BIAS,
            *(Only("use_qk_norm", True), Only("use_cla", False), Only("mlp_bias", False), Only("norm_type", "rms")),
            *(Only("use_rotary_pos_emb", True), Only("position_embedding_xdrope", False)),
            Only("add_classification_head", False),
            Ignored(("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "enable_lm_head_fp32")),
            Ignored(("org_vocab_size", "pool_type")),
        ),
        {"query_key_norm": "after rotation"},
    ),
    "glm4": Family(
        ("Glm4ForCausalLM",),
        GLM4,
        (Rope(partial=0.5), Biases("attention_bias", _QKV, True)),
        {"norms": "both", "feed_forward": "joined", "rope_interleaved": True},
        heads=Heads(128),
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",),
        GEMMA2,
        (
            *(Rope(), Windows(lambda layer, keys: layer % 2 == 0, 4096), _ATTENTION_BIAS, *_GEMMA),
            Number("attn_logit_softcapping", "attention_softcap", default=50.0, optional=True),
            Number("final_logit_softcapping", "logit_softcap", default=30.0, optional=True),
        ),
        _OF_GEMMA,
        heads=Heads(256),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
    ),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        GEMMA3,
        (
            *(Windows(_gemma3_layer, 4096, also=_PATTERNS), Rope(1e6, local=10_000.0), _ATTENTION_BIAS, *_GEMMA),
            Number("attn_logit_softcapping", "attention_softcap", optional=True),
            Number("final_logit_softcapping", "logit_softcap", optional=True),
        ),
        {**_OF_GEMMA, "query_key_norm": True},
        heads=Heads(256),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        QWEN2_MOE,
        (Rope(), Experts("num_experts", normalized=True, width="moe_intermediate_size")),
        {"biases": _QKV, "feed_forward": "experts"},
        checked_only="it has shared experts",
    ),
}
"""The families by `model_type`."""
