"""Makes norms and activations keep only their inputs for the backward pass: a single function, or a whole model."""

from .between import BetweenLayers as BetweenLayers
from .default import default_rematerialization as default_rematerialization
from .function import rematerialized as rematerialized
from .model import rematerialize as rematerialize, restore_rematerialized as restore_rematerialized
from .rule import RematerializationRule as RematerializationRule, WholeCall as WholeCall
