"""Norms and activations that keep only their inputs for the backward pass: a function, or all of a model's."""

from .between import BetweenLayers as BetweenLayers
from .default import default_rematerialization as default_rematerialization
from .function import rematerialized as rematerialized
from .model import rematerialize as rematerialize, restore_rematerialized as restore_rematerialized
from .rule import RematerializationRule as RematerializationRule, WholeCall as WholeCall
