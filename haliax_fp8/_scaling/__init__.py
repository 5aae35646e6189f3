"""Scalings: how one operand gets its scale. One file per scaling."""

from ._base import AbstractScaling as AbstractScaling
from ._block import BlockScaling as BlockScaling, MXFP8Scaling as MXFP8Scaling
from ._current import CurrentScaling as CurrentScaling, RowwiseScaling as RowwiseScaling
from ._delayed import DelayedScaling as DelayedScaling, usable as usable
from ._high_precision import HighPrecision as HighPrecision
from ._observed import ObservedScaling as ObservedScaling
