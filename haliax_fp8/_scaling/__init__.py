"""Scalings: how one operand gets its scale. One file per scaling."""

from ._base import AbstractScaling as AbstractScaling
from ._delayed import DelayedScaling as DelayedScaling, usable as usable
from ._observed import ObservedScaling as ObservedScaling
