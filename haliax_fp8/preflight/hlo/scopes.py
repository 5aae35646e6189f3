"""Locates a product in the model from the scopes of its instruction and the names of arguments.

An instruction's scope is the stack of named scopes that it was traced in, as in `op_name`, outermost first.
"""

import re

from ..._product.names import DGRAD, FP8_DOT_GENERAL, FP8_RAGGED_DOT, FPROP, ROTATION, WGRAD


def product_name(scope: str) -> str:
    """`fprop`, `dgrad` or `wgrad` for this package's products; `forward` or `backward` for others and for rotations.

    Example:
        >>> product_name("jit(step)/jvp(MLP)/fp8_linear/fp8_dot_general/fp8_fprop/fprop/dot_general")
        'fprop'
        >>> product_name("jit(step)/transpose(jvp(MLP))/dot_general")
        'backward'
    """
    for name in () if rotates(scope) else scope.split("/"):
        if name in (FPROP, DGRAD, WGRAD):
            return name
    return "backward" if re.search(r"\btranspose\(", scope) else "forward"


def asks_for_fp8(scope: str) -> bool:
    """Whether a product was traced in one of this package's ops."""
    return not {FP8_DOT_GENERAL, FP8_RAGGED_DOT}.isdisjoint(scope.split("/"))


def rotates(scope: str) -> bool:
    """Whether a product rotates an operand of one of this package's products.

    Example:
        >>> rotates("jit(step)/transpose(jvp(MLP))/fp8_dot_general/fp8_backward/wgrad/rotation/dot_general")
        True
    """
    return asks_for_fp8(scope) and ROTATION in scope.split("/")


def label(scope: str) -> str:
    """A scope's name for readers: its named scopes, without functions that JAX and this package jit.

    Example:
        >>> label("jit(step)/jvp(Attention)/contract head_dim -> position/0 1, 2 1 -> 0 2/dot_general")
        'Attention/contract head_dim -> position'
        >>> label("jit(step)/transpose(jvp(vmap(Attention)))/qk/dot_general")
        'Attention/qk'
    """
    names = []
    for part in _parts(scope):
        if re.fullmatch(r"jit\(.*\)|[\d ,]+ -> [\d ]*|\w+_general|dot", part):
            continue
        while (match := re.fullmatch(r"(\w+)\((.*)\)", part)) is not None:
            part = match[2]
        if part and part not in ("while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"):
            names.append(part)
    return "/".join(names)


def _parts(scope: str) -> list[str]:
    """Splits a scope at slashes outside parentheses."""
    parts, depth = [""], 0
    for character in scope:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def dotted(path: str) -> str:
    """A path in a tree as JAX prints it, rewritten as in `describe`, without the dictionary of `compile_for`'s arrays.

    Example:
        >>> dotted("model.layers[0].up['weight'].array"), dotted("arrays['model.layers.0.weight']")
        ('model.layers.0.up.weight.array', 'model.layers.0.weight')
    """
    path = re.sub(r"^(?:arrays|donated)\['(.*)'\]$", r"\1", path)
    # Nodes without names for their children number them.
    path = path.replace("[<flat index 0>]", "")
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).strip(".")


def layer_of(argument: str) -> str:
    """The layer of a weight: its path without the names of the weight and of the array in it.

    Example:
        >>> layer_of("model.layers.0.up.weight.array"), layer_of("w")
        ('model.layers.0.up', 'w')
    """
    return re.sub(r"(?<=.)\.(weight|kernel)(\.(array|value|\d+))?$", "", argument)
