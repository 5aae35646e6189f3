"""The keys of `config.json` that say what a model computes, read and written.

A group of keys reads the fields of a model that they say, and writes them again. A family of models is a row of groups,
see `families.py`. Fields have the names of `models.TransformerConfig`, and values that JSON has too.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any


type Fields = dict[str, Any]

ELSEWHERE = "Build the model yourself, and give it to import_model"


class Keys:
    """The keys of a `config.json`, and which of them were read."""

    def __init__(self, config: Mapping[str, Any], place: str = ""):
        self.config, self.place, self.read = config, place, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default if it is not there, or null."""
        self.read.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """A positive number.

        Raises:
            ValueError: If it is none, or neither there nor has a default.
        """
        value = self.get(key, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not fits or (kind is int and not isinstance(value, int)):
            what = "has no" if value is None else f"has {value!r:.40} for"
            raise ValueError(f"config.json {what} {key}{self.place}, which has to be a positive {kind.__name__}")
        return kind(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether a key is true.

        Raises:
            ValueError: If it is neither true nor false.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json has {value!r:.40} for {key}, which has to be true or false")
        return value

    def each_layer(self, key: str, layers: int) -> list[Any] | None:
        """The value of each layer; None if the key is not there.

        Raises:
            ValueError: If there are others than layers.
        """
        values = self.get(key)
        if values is not None and not (isinstance(values, list) and len(values) == layers):
            raise ValueError(
                f"config.json has {values!r:.60} for {key}, which has to be a list of {layers}, the layers"
            )
        return values

    def only(self, key: str, *supported: Any) -> None:
        """Raises a ValueError if a key is there and not one of the supported values."""
        if key in self.config and self.get(key) not in (*supported, None):
            values = " or ".join(map(repr, supported))
            raise ValueError(
                f"config.json has {key}={self.config[key]!r:.60}{self.place}, which changes what the model computes; "
                f"{values} is supported. {ELSEWHERE}"
            )

    def unread(self, known: Iterable[str] = ()) -> list[str]:
        """The keys that have a value, and that nothing has read."""
        known = self.read.union(known)
        return sorted(key for key, value in self.config.items() if key not in known and value is not None)


class Group(abc.ABC):
    """Keys that say something together."""

    @abc.abstractmethod
    def read(self, keys: Keys, fields: Fields) -> Fields:
        """What they say.

        Args:
            keys: Those of `config.json`.
            fields: What other groups have read before.
        """

    @abc.abstractmethod
    def write(self, fields: Fields) -> dict[str, Any]:
        """The keys for what a model is."""


@dataclasses.dataclass(frozen=True)
class Number(Group):
    """A positive number.

    Args:
        key: Its key.
        field: Its field; by default of the same name.
        kind: Its type.
        default: What it is if the key is not there; it has to be there if this is None.
        optional: Whether null means none.
    """

    key: str
    field: str = ""
    kind: type = float
    default: float | None = None
    optional: bool = False

    def read(self, keys: Keys, fields: Fields) -> Fields:
        is_none = self.optional and (self.default is None or self.key in keys.config) and keys.get(self.key) is None
        return {self.field or self.key: None if is_none else keys.number(self.key, self.kind, self.default)}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.key: fields[self.field or self.key]}


@dataclasses.dataclass(frozen=True)
class QueryScalar(Group):
    """`query_pre_attn_scalar`, by whose root scores are divided."""

    key: str = "query_pre_attn_scalar"

    def read(self, keys: Keys, fields: Fields) -> Fields:
        return {"attention_multiplier": keys.number(self.key, int, 256) ** -0.5}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.key: max(1, round((fields["attention_multiplier"] or 1.0) ** -2))}


@dataclasses.dataclass(frozen=True)
class Heads(Group):
    """The number of query heads and of key heads, and their width.

    Args:
        head_dim: The width if it is not there; by default that of the model divided by the heads.
    """

    head_dim: int | None = None

    def read(self, keys: Keys, fields: Fields) -> Fields:
        heads = keys.number("num_attention_heads", int)
        width = keys.number("head_dim", int, self.head_dim or fields["hidden"] // heads)
        return {"heads": heads, "kv_heads": keys.number("num_key_value_heads", int, heads), "head_dim": width}

    def write(self, fields: Fields) -> dict[str, Any]:
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
        return dict(zip(keys, (fields["heads"], fields["kv_heads"], fields["head_dim"]), strict=True))


@dataclasses.dataclass(frozen=True)
class Biases(Group):
    """A flag for the biases of some layers.

    Args:
        key: Its key.
        layers: The layers.
        default: What it is if the key is not there.
    """

    key: str
    layers: tuple[str, ...]
    default: bool = False

    def read(self, keys: Keys, fields: Fields) -> Fields:
        return {"biases": (*fields["biases"], *(self.layers if keys.flag(self.key, self.default) else ()))}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.key: set(self.layers) <= set(fields["biases"])}


@dataclasses.dataclass(frozen=True)
class Only(Group):
    """A key that has only one value here: with another one, the model computes something else.

    Args:
        key: The key.
        value: The value.
        written: Whether it is written.
    """

    key: str
    value: Any
    written: bool = False

    def read(self, keys: Keys, fields: Fields) -> Fields:
        keys.only(self.key, self.value)
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.key: self.value} if self.written else {}


@dataclasses.dataclass(frozen=True)
class Ignored(Group):
    """Keys that other families' models of the same library have, and that say nothing here."""

    names: tuple[str, ...]

    def read(self, keys: Keys, fields: Fields) -> Fields:
        keys.read.update(self.names)
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Experts(Group):
    """The number of experts, and of those that a token goes through.

    Args:
        key: The key that is written for their number; another one is read too.
        normalized: Whether `norm_topk_prob` says that the weights of a token's experts add up to 1; else they do.
        width: The key of an expert's width.
    """

    key: str
    normalized: bool = False
    width: str = "intermediate_size"

    def read(self, keys: Keys, fields: Fields) -> Fields:
        # Newer versions of Transformers write the second for all models.
        counts = {keys.number(key, int) for key in ("num_experts", "num_local_experts") if keys.get(key) is not None}
        if len(counts) != 1:
            raise ValueError(f"config.json has num_experts and num_local_experts, {sorted(counts)}; they mean the same")
        normalized = not self.normalized or keys.flag("norm_topk_prob")
        chosen = keys.number("num_experts_per_tok", int)
        # Another width is that of dense blocks, of which there are none.
        keys.get("intermediate_size")
        return {"experts": (*counts, chosen, normalized), "mlp": keys.number(self.width, int)}

    def write(self, fields: Fields) -> dict[str, Any]:
        if fields["experts"] is None:
            return {}
        count, chosen, normalized = fields["experts"]
        written = {self.key: count, "num_experts_per_tok": chosen}
        written |= dict.fromkeys(("intermediate_size", self.width), fields["mlp"])
        return written | ({"norm_topk_prob": normalized} if self.normalized else {})


@dataclasses.dataclass(frozen=True)
class FullAttention(Group):
    """`layer_types` of a family whose layers all attend to all earlier positions."""

    def read(self, keys: Keys, fields: Fields) -> Fields:
        for kind in keys.each_layer("layer_types", fields["layers"]) or []:
            if kind != "full_attention":
                raise ValueError(f"config.json has {kind!r} in layer_types; only full_attention is supported here")
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Windows(Group):
    """How far back each layer attends.

    Args:
        of_layer: Whether a layer has the window if `layer_types` does not say it, by its number and the keys; with
            None, all layers have it, whatever `layer_types` says.
        default: The window if it is not there.
        flag: Whether `use_sliding_window` has to be true.
        also: The keys that `of_layer` may read.
    """

    of_layer: Callable[[int, Keys], bool] | None = None
    default: int | None = None
    flag: bool = False
    also: tuple[str, ...] = ()

    def read(self, keys: Keys, fields: Fields) -> Fields:
        layers, key = fields["layers"], "sliding_window"
        keys.read.update(self.also)
        window = keys.get(key) if key in keys.config else self.default
        kinds = keys.each_layer("layer_types", layers) or [None] * layers
        if unknown := sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention", "None"}):
            raise ValueError(
                f"config.json has {unknown[0]!r} in layer_types; only full and sliding attention are supported"
            )
        of_layer = self.of_layer or (lambda layer, keys: True)
        slides = [of_layer(i, keys) if kind is None else kind == "sliding_attention" for i, kind in enumerate(kinds)]
        # Qwen2 and Qwen3 name a window that they do not use.
        if (self.flag and not keys.flag("use_sliding_window")) or window is None:
            return {}
        window = keys.number(key, int, self.default)
        slides = slides if self.of_layer else [True] * layers
        return {"windows": tuple(window if sliding else None for sliding in slides) if any(slides) else ()}

    def write(self, fields: Fields) -> dict[str, Any]:
        windows = fields["windows"] or (None,) * fields["layers"]
        window = next(filter(None, windows), None)
        kinds = [f"{'full' if window is None else 'sliding'}_attention" for window in windows]
        written = {"sliding_window": window, "use_sliding_window": window is not None}
        return {key: written[key] for key in ("sliding_window", *["use_sliding_window"] * self.flag)} | (
            {"layer_types": kinds} if self.of_layer else {}
        )


@dataclasses.dataclass(frozen=True)
class NoRope(Group):
    """The layers that do not rotate query and key: every fourth, unless `no_rope_layers` says it with 0."""

    def read(self, keys: Keys, fields: Fields) -> Fields:
        interval = keys.number("no_rope_layer_interval", int, 4)
        default = [int((i + 1) % interval != 0) for i in range(fields["layers"])]
        rotates = keys.each_layer("no_rope_layers", fields["layers"]) or default
        return {} if all(rotates) else {"without_rope": tuple(not rotated for rotated in rotates)}

    def write(self, fields: Fields) -> dict[str, Any]:
        without = fields["without_rope"] or (False,) * fields["layers"]
        return {"no_rope_layers": [int(not none) for none in without]}


# The keys of each kind of scaling: those that it needs, and those that it may have.
_ROPE = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("original_max_position_embeddings", "factor", "attention_factor")),
    "dynamic": (("alpha",), ()),
}
_ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class Rope(Group):
    """The wavelengths by which query and key are rotated, under the keys of older and newer versions of Transformers.

    Args:
        theta: The base of the wavelengths if it is not there.
        local: What layers with a window have instead: wavelengths with this base, or with 0 the base of the others
            without scaling; None if they have the same as others.
        partial: The part of each head that is rotated if it is not there; None if all of it is, always.
        kinds: Kinds of scaling that the family has.
        renamed: Kinds of scaling by older names.
        more: Keys of the same object that have a meaning of their own in this family.
        without_effect: Keys of the same object that have none, and what is written for them beside a scaling.
    """

    theta: float = 10_000.0
    local: float | None = None
    partial: float | None = None
    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: tuple[str, ...] = ()
    without_effect: Mapping[str, float | None] = dataclasses.field(default_factory=dict)

    def read(self, keys: Keys, fields: Fields) -> Fields:
        settings: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = keys.get(key, {})
            if not isinstance(value, dict):
                raise ValueError(f"config.json has {value!r:.60} for {key}, which has to be an object")
            settings |= value
        nested = {"full_attention", "sliding_attention"} & settings.keys() if self.local is not None else set()
        whole, local = settings, {}
        if nested:
            local = settings.pop("sliding_attention", None) or {}
            whole = {**(settings.pop("full_attention", None) or {}), **settings}
        if self.local == 0.0 and not nested and keys.get("rope_theta", self.theta) != self.theta:
            raise ValueError(
                f"config.json has rope_theta={keys.get('rope_theta')!r}, which some libraries take for all layers, and "
                "some for those without a window; write it in rope_parameters, for each kind of layer"
            )
        if "longrope" in self.kinds and keys.get(_ORIGINAL) is not None:
            whole = {**whole, _ORIGINAL: keys.get(_ORIGINAL)}
        read: Fields = {"rope": self._one(keys, whole, "rope_theta", self.theta, fields)}
        partial = Keys({"partial_rotary_factor": keys.get("partial_rotary_factor"), **whole})
        if self.partial is None:
            partial.only("partial_rotary_factor", 1.0)
        else:
            read["partial_rotary_factor"] = partial.number("partial_rotary_factor", float, self.partial)
        if self.local is not None:
            theta = self.local or read["rope"]["rope_theta"]
            local_rope = self._one(keys, local, "rope_local_base_freq" if self.local else "rope_theta", theta, fields)
            if local_rope != read["rope"]:
                read["local_rope"] = local_rope
        return read

    def _one(self, keys: Keys, settings: Mapping[str, Any], key: str, theta: float, fields: Fields) -> dict[str, Any]:
        outside = keys.get(key)
        if outside is not None and settings.get("rope_theta", outside) != outside:
            raise ValueError(
                f"config.json has {key}={outside!r} and, in rope_parameters, rope_theta={settings['rope_theta']!r}"
            )
        inner = Keys({"rope_theta": outside, **settings}, " in rope_scaling")
        kind = inner.get("rope_type", inner.get("type", "default"))
        kind = self.renamed.get(kind, kind)
        if kind not in self.kinds:
            raise ValueError(
                f"config.json has rope_type={kind!r} in rope_scaling; {', '.join(map(repr, self.kinds))} are "
                f"supported. {ELSEWHERE}"
            )
        needed, optional = _ROPE[kind]
        read = {"rope_type": kind, "rope_theta": inner.number("rope_theta", float, theta)}
        for name in (*needed, *optional, *self.more):
            if name in (*needed, *self.more) or inner.get(name) is not None:
                read[name] = self._value(inner, name, fields)
        inner.read |= {
            "type",
            "partial_rotary_factor",
            *self.without_effect,
            *([_ORIGINAL] if kind == "default" else []),
        }
        if unknown := inner.unread():
            raise ValueError(
                f"config.json has {', '.join(unknown)} in rope_scaling, which rope_type={kind!r} does not take"
            )
        return read

    def _value(self, inner: Keys, name: str, fields: Fields) -> Any:
        match name:
            case "truncate":
                return inner.flag(name)
            case "original_max_position_embeddings":
                return inner.number(name, int)
            case "short_factor" | "long_factor":
                values, half = inner.get(name), fields["head_dim"] // 2
                if not (isinstance(values, list) and all(isinstance(x, int | float) and x > 0 for x in values)):
                    raise ValueError(f"config.json has {values!r:.40} for {name}, which has to be a list of {half}")
                return tuple(map(float, values))
        return inner.number(name, float)

    def write(self, fields: Fields) -> dict[str, Any]:
        plain = lambda rope: {key: list(x) if isinstance(x, tuple) else x for key, x in rope.items()}
        rope, local = plain(fields["rope"]), fields["local_rope"]
        theta, is_scaled = rope["rope_theta"], len(rope) > 2
        rope |= {key: value for key, value in self.without_effect.items() if is_scaled and value is not None}
        partial = {} if self.partial is None else {"partial_rotary_factor": fields["partial_rotary_factor"]}
        # Older versions of transformers read the first two keys, newer ones the third.
        written = {"rope_theta": theta}
        written["rope_scaling"] = {key: x for key, x in rope.items() if key != "rope_theta"} if is_scaled else None
        written["rope_parameters"] = {**rope, **partial} if self.local is None else {"full_attention": rope}
        if self.local is not None:
            written["rope_parameters"]["sliding_attention"] = plain(local or fields["rope"])
            written |= {"rope_local_base_freq": (local or rope)["rope_theta"]} if self.local else {}
        if "longrope" in self.kinds and _ORIGINAL in rope:
            written[_ORIGINAL] = rope[_ORIGINAL]
        return written | partial
