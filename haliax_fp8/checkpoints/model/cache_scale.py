"""The scales of keys and values that the state of attention holds, for engines that keep both in FP8."""

import dataclasses

import numpy as np

from ...attention.op import Fp8Attention
from ...layers.own_state import is_changed


@dataclasses.dataclass(frozen=True)
class CacheScale:
    """The scales of the keys and values of one attention.

    Args:
        name: The name of what the attention belongs to, numbers filled in.
        op: The attention, whose state holds them.
        index: Which of a stack this is.
    """

    name: str
    op: Fp8Attention
    index: tuple[int, ...]

    def scales(self) -> tuple[float, float]:
        """The scales of keys and of values for the next step.

        Raises:
            ValueError: If the state has none yet, was changed by something else, or belongs to several attentions.
        """
        owner = self.name or "the model"
        if is_changed(self.op.state):
            raise ValueError(
                f"the state of the attention in {owner} was changed by something other than its own update, such as an "
                "optimizer that was given the whole model, so its scales are lost; replace the Fp8Attention "
                "by a new one and calibrate the model"
            )
        found = [np.asarray(self.op.scale(tensor)) for tensor in ("key", "value")]
        index = self.index[: found[0].ndim]
        found = [scale[index] for scale in found]
        if found[0].ndim:
            raise ValueError(
                f"{owner} is an ensemble of {found[0].size} layers with attention, which an export cannot name; use "
                "a list of layers or a haliax.nn.Stacked instead"
            )
        histories = [np.asarray(self.op.amax_history(tensor))[index] for tensor in ("key", "value")]
        # A step that was not finite records `-inf`, and leaves the scale as it was.
        known = [(history > 0).any() or scale != 1 for history, scale in zip(histories, found, strict=True)]
        if not all(known) or not all(np.isfinite(scale) and scale > 0 for scale in found):
            raise ValueError(
                f"{owner} has no amaxes of keys and values yet, or only zeros and infinities; train a step, or "
                "calibrate the model, on finite data"
            )
        return float(found[0]), float(found[1])
