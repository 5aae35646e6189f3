"""What may still change, or go. Today that is attention in FP8.

Names, arguments and numbers in here may change in any release, without a deprecation. Nothing else in the package
imports it, so the rest keeps its promises without it. A part leaves this folder when it rests on public interfaces and
a model was trained with it.
"""

from . import attention as attention
