"""Checkpoints of layers that `join_linear` joined, read as those of separate layers, and the other way round."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax

from ...layers.default import default_rules
from ...layers.patterns import path_string
from ...layers.walk import rule_of
from ...memory.join import JoinedLinear, join_linear, split_linear
from .checkpoint import AbstractCheckpoint, Entries, Lazily
from .names import is_saved, leaves_of, with_leaves


type Joined = Mapping[str, Sequence[str]]
"""The field of a joined layer, and the fields that the layers have, or had, apart: `{"qkv": ("q", "k", "v")}`."""


def check_joined(joined: Any) -> Joined:
    """What the user gave as `joined`.

    Raises:
        ValueError: If it is not such a mapping.
    """
    fits = isinstance(joined, Mapping) and all(
        isinstance(parts, Sequence) and not isinstance(parts, str) and parts for parts in joined.values()
    )
    if not fits:
        raise ValueError(
            f"joined={joined!r} must map each joined layer's field to those of its separate layers, in order: "
            "{'qkv': ('q', 'k', 'v')}"
        )
    return joined


@dataclasses.dataclass(frozen=True)
class WithJoined(AbstractCheckpoint):
    """A checkpoint with entries for the joined layers of a model, made of those apart, and the reverse.

    Args:
        checkpoint: What there is.
        made: For each name that the model has: how it is made.
    """

    checkpoint: AbstractCheckpoint
    made: Mapping[str, "_Made"]

    @property
    def entries(self) -> Entries:
        """The checkpoint's entries from which no other is made, and the entries that are made."""
        used = {name for made in self.made.values() for name in made.made_of}
        kept = {name: entry for name, entry in self.checkpoint.entries.items() if name not in used}
        return kept | {name: made.entry for name, made in self.made.items()}

    def read(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arrays that have to be made are made on the host."""
        direct = {name: to for name, to in wanted.items() if name not in self.made}
        needed = {part for name in wanted if name in self.made for part in self.made[name].made_of}
        found = self.checkpoint.read(direct | dict.fromkeys(needed))
        return Lazily(wanted, lambda name: self.made[name].make(found) if name in self.made else found[name])

    def how(self, name: str) -> str | None:
        """The entries that it was made from."""
        return f"made of {', '.join(self.made[name].parts)}, bit for bit" if name in self.made else None


@dataclasses.dataclass(frozen=True)
class _Made:
    """One leaf of a layer, made of the entries of others.

    Args:
        entry: Its shape and dtype.
        made_of: The names of the entries.
        parts: Those of the layers that have them.
        layers: The layers, without arrays, whose leaves these are.
        convert: From these layers with their arrays to the layers that have the leaf.
        index: Which of their leaves it is.
    """

    entry: jax.ShapeDtypeStruct
    made_of: tuple[str, ...]
    parts: tuple[str, ...]
    layers: Any
    convert: Any
    index: int

    def make(self, found: Mapping[str, Any]) -> Any:
        with _on_host():
            layers = with_leaves(self.layers, [found[name] for name in self.made_of])
            return [leaf.value for leaf in leaves_of(self.convert(layers))][self.index]


def with_joined(checkpoint: AbstractCheckpoint, model: Any, joined: Joined) -> AbstractCheckpoint:
    """The checkpoint with what the model's joined, or separate, layers can be made of.

    Args:
        checkpoint: The checkpoint.
        model: What is loaded.
        joined: Which fields belong together.
    """
    made: dict[str, _Made] = {}
    for path, layer in _layers(model):
        parent, _, field = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        if isinstance(layer, JoinedLinear) and field in joined:
            apart = eqx.filter_eval_shape(split_linear, layer)
            names = [f"{prefix}{part}" for part in joined[field]]
            if len(apart) != len(names):
                raise ValueError(
                    f"joined names {len(names)} layers for {path}, which was joined from {len(apart)}: {joined[field]}"
                )
            made |= _made_of(checkpoint, apart, names, layer, [f"{path}.linear"], _joined_again)
    layers = dict(_layers(model))
    for field, parts in joined.items():
        first = f".{parts[0]}"
        for path in layers:
            if not f".{path}".endswith(first):
                continue
            prefix = path[: len(path) - len(parts[0])]
            names = [f"{prefix}{part}" for part in parts]
            if not all(isinstance(layers.get(name), hnn.Linear | eqx.nn.Linear) for name in names):
                continue
            apart = [_plain(layers[name]) for name in names]
            whole = eqx.filter_eval_shape(join_linear, apart)
            made |= _made_of(checkpoint, whole, [f"{prefix}{field}"], apart, names, split_linear)
    return WithJoined(checkpoint, made) if made else checkpoint


def _made_of(
    checkpoint: AbstractCheckpoint, have: Any, have_names: list[str], want: Any, want_names: list[str], convert: Any
) -> dict[str, _Made]:
    """How the leaves of the layers that the model has are made of those that the checkpoint has, if it has them."""
    made_of = _names(have, have_names)
    entries = [checkpoint.entries.get(name) for name in made_of]
    shapes = [leaf.value.shape for leaf in leaves_of(have) if is_saved(leaf.value)]
    if any(entry is None or entry.shape != shape for entry, shape in zip(entries, shapes, strict=True)):
        return {}
    dtype = next(entry.dtype for entry in entries if entry is not None)
    plain = _plain(want.linear) if isinstance(want, JoinedLinear) else want
    wanted = [leaf.value for leaf in leaves_of(plain) if is_saved(leaf.value)]
    names = _names(plain if isinstance(plain, list) else [plain], want_names)
    made = (jax.ShapeDtypeStruct(value.shape, dtype) for value in wanted)
    only = eqx.filter(have, is_saved)
    return {
        name: _Made(entry, tuple(made_of), tuple(have_names), only, convert, index)
        for index, (name, entry) in enumerate(zip(names, made, strict=True))
    }


def _joined_again(apart: list[Any]) -> Any:
    return join_linear(apart).linear


def _names(layers: Any, prefixes: list[str]) -> list[str]:
    """The names of leaves of layers, or of a joined one, in their order."""
    layers = layers if isinstance(layers, list) else [layers]
    pairs = zip(layers, prefixes, strict=True)
    return [f"{prefix}.{leaf.name}" for layer, prefix in pairs for leaf in leaves_of(layer) if is_saved(leaf.value)]


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Every joined layer, and every linear one outside of these, with its path."""
    is_layer = lambda node: isinstance(node, JoinedLinear | hnn.Linear | eqx.nn.Linear)
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_layer)[0]:
        if is_layer(node):
            yield path_string(path), node


def _plain(layer: Any) -> Any:
    return rule_of(layer, default_rules).with_op(layer, None)


def _on_host() -> Any:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return contextlib.nullcontext()
