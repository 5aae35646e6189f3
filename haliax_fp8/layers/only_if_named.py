"""OnlyIfNamed: the reason of layers that are converted only if `targets` or an override selects them."""

import dataclasses

from .._numerics.require import require


@dataclasses.dataclass(frozen=True)
class OnlyIfNamed:
    """What `LayerRule.refusal` returns for a layer that stays in high precision unless a pattern names it.

    A pattern of `targets` or `overrides` names it, even one that matches many layers.

    Args:
        reason: Why it stays in high precision; `describe` shows it.

    Raises:
        ValueError: If the reason is not a string.

    Example:
        >>> class SmallLast(EquinoxLinear):
        ...     def refusal(self, layer):
        ...         few = layer.out_features < 32
        ...         return super().refusal(layer) or (OnlyIfNamed("few outputs gain little") if few else None)
        >>> model = eqx.nn.MLP(64, 10, 128, 1, key=jax.random.key(0))
        >>> rules = (SmallLast(), *default_rules)
        >>> config = Fp8Config(rules=rules)
        >>> describe(fp8_linear_layers(model, config), config)["layers.1"].reason
        'few outputs gain little'
        >>> config = Fp8Config(rules=rules, targets="layers.*")
        >>> describe(fp8_linear_layers(model, config), config)["layers.1"].is_fp8
        True
    """

    reason: str

    def __post_init__(self) -> None:
        require("reason", self.reason, str, "a sentence such as 'few outputs gain little'", of="OnlyIfNamed")
