"""Diagnosis: what statistics and state say is wrong with a model, and what helps."""

from .apply import apply_remedies as apply_remedies
from .finding import Diagnosis as Diagnosis, Finding as Finding, Problem as Problem, Remedy as Remedy
from .run_checks import diagnose as diagnose
from .thresholds import Thresholds as Thresholds
from .where import where_not_finite as where_not_finite
