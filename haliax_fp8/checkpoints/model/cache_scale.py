"""The scales of keys and values that the state of attention holds, for engines that keep both in FP8."""

import dataclasses

import numpy as np

from ...attention.op import Fp8Attention


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
            ValueError: If the state has none yet.
        """
        found = [np.asarray(self.op.scale(tensor)) for tensor in ("key", "value")]
        index = self.index[: found[0].ndim]
        found = [scale[index] for scale in found]
        histories = [np.asarray(self.op.amax_history(tensor))[index] for tensor in ("key", "value")]
        usable = [np.isfinite(scale) and scale > 0 for scale in found]
        if not all(usable) or not all(history.any() for history in histories):
            raise ValueError(f"{self.name} has no amaxes of keys and values yet; train a step, or calibrate the model")
        return float(found[0]), float(found[1])
