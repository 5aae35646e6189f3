"""Names of tensors: those that a model's state dict has, and those that a checkpoint has."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..folders.families import FAMILIES


_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Translates the names of a model's layers to those of a checkpoint.

    A rule is a pair of templates that match whole components of a name from its beginning: `{i}` stands for one
    component, and must be in both. If several rules match, the longest counts. Names that none matches stay as
    they are.

    Args:
        rules: Pairs of a template of the model and one of the checkpoint.

    Raises:
        ValueError: If two rules have the same template, or the templates of a rule have different placeholders.

    Example:
        >>> names = NameMap.of({"blocks.{i}.mlp.up": "model.layers.{i}.mlp.up_proj"})
        >>> names.to_checkpoint("blocks.3.mlp.up.weight")
        'model.layers.3.mlp.up_proj.weight'
    """

    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for model, checkpoint in self.rules:
            if sorted(_PLACEHOLDER.findall(model)) != sorted(_PLACEHOLDER.findall(checkpoint)):
                raise ValueError(
                    f"names maps {model!r} to {checkpoint!r}, which have different placeholders; both need the same, "
                    "as in 'blocks.{i}.mlp' and 'model.layers.{i}.mlp'"
                )
        for side, templates in zip(("model", "checkpoint"), zip(*self.rules, strict=True), strict=False):
            twice = {template for template in templates if templates.count(template) > 1}
            if twice:
                raise ValueError(f"names has two rules with {sorted(twice)[0]!r} of the {side}; keep one")

    @staticmethod
    def of(names: "NameMap | Mapping[str, str] | Iterable[tuple[str, str]] | None") -> "NameMap":
        """A map from what a caller gives: a map, a dict from the model's templates to the checkpoint's, or None.

        Args:
            names: The rules.

        Raises:
            ValueError: If it is none of these; and as the class.
        """
        if isinstance(names, NameMap):
            return names
        # To a type checker, a mapping may be an iterable of pairs too.
        pairs: Any = names.items() if isinstance(names, Mapping) else names or ()
        try:
            rules = tuple((model, checkpoint) for model, checkpoint in pairs)
        except (TypeError, ValueError):
            rules = None
        if rules is None or not all(isinstance(name, str) for rule in rules for name in rule):
            raise ValueError(
                f"names={names!r:.80} is not a NameMap, nor a dict from the model's names to the checkpoint's; use "
                "one, such as {'blocks.{i}.mlp': 'model.layers.{i}.mlp'}"
            )
        return NameMap(rules)

    def to_checkpoint(self, name: str) -> str:
        """The checkpoint's name of a tensor or layer of the model."""
        return _translated(name, self.rules)

    def __or__(self, other: "NameMap | Mapping[str, str]") -> "NameMap":
        """The rules of both; where both have one for the same template of the model, the right one's."""
        return NameMap(tuple((dict(self.rules) | dict(NameMap.of(other).rules)).items()))


def _translated(name: str, rules: Iterable[tuple[str, str]]) -> str:
    parts, best, translated = name.split("."), 0, name
    for old, new in rules:
        template = old.split(".")
        if len(template) > best and (values := _match(template, parts)) is not None:
            best = len(template)
            head = _PLACEHOLDER.sub(lambda match, values=values: values[match.group(1)], new)
            translated = ".".join([head, *parts[len(template) :]])
    return translated


def _match(template: list[str], parts: list[str]) -> dict[str, str] | None:
    if len(template) > len(parts):
        return None
    values = {}
    for expected, part in zip(template, parts, strict=False):
        if placeholder := _PLACEHOLDER.fullmatch(expected):
            values[placeholder.group(1)] = part
        elif expected != part:
            return None
    return values


LLAMA = NameMap.of(FAMILIES["llama"].names)
"""Maps the names of `models.Transformer` to those of Hugging Face's Llama."""

QWEN3 = NameMap.of(FAMILIES["qwen3"].names)
"""The same for Qwen3, whose attention also norms query and key, here `query_norm` and `key_norm`."""

QWEN3_MOE = NameMap.of(FAMILIES["qwen3_moe"].names)
"""The same for Qwen3's mixtures of experts, from `models.MixtureOfExperts`: experts are `mlp.experts.{e}.gate_proj`."""

MIXTRAL = NameMap.of(FAMILIES["mixtral"].names)
"""The same for Mixtral, whose architecture `models.MixtureOfExperts` has."""
