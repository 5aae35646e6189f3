"""The order in which cuDNN reads the scales of blocks."""

from jaxtyping import Array, Shaped


TILE = 128
"""The rows and columns of a tile of a kernel. cuDNN reads the scales of 128 rows and 4 blocks as one piece."""


def for_cudnn(scales: Shaped[Array, "rows blocks"]) -> Shaped[Array, "pieces 512"]:
    """The scales of a tile in cuDNN's order: row `32 i + j` and block `4 b + k` are at `[b, 16 j + 4 i + k]`."""
    return scales.reshape(4, 32, -1, 4).transpose(2, 1, 0, 3).reshape(-1, 4 * TILE)


def in_rows(swizzled: Shaped[Array, "tiles pieces 512"]) -> Shaped[Array, "rows blocks"]:
    """The inverse of `for_cudnn`, of all tiles."""
    tiles, pieces, _ = swizzled.shape
    return swizzled.reshape(tiles, pieces, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(tiles * TILE, pieces * 4)
