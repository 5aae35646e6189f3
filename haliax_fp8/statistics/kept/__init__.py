"""A black box: one product's operands, kept with all that it takes to compute it again elsewhere."""

from .box import BlackBox as BlackBox
from .culprit import Culprit as Culprit
from .keep import black_box as black_box
from .replaying import Replay as Replay, Replayed as Replayed, replay as replay
