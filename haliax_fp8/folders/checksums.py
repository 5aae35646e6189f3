"""Checksums in the metadata of a safetensors file: one for each tensor, and one for the header."""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from .header import Stored
from .strict_json import BrokenCheckpoint, json_object


# The index, which has each tensor's checksum, as in the file of a saved run; and the checksum of the index and of the
# header's tensors. A file has both or neither, so that a changed bit in one of these keys is found too.
_INDEX, _HEADER = "haliax_fp8", "haliax_fp8_crc32"

FORMAT = {"format": "pt"}
"""What Transformers wants in the metadata; the only entry that a file may have beside the checksums."""

type Described = Mapping[str, tuple[str, Sequence[int]]]
"""The safetensors type and the shape of each tensor."""


def checksum(name: str, kind: str, shape: Sequence[int], words: Any) -> str:
    """Eight digits, of the name, the safetensors type, the shape and the bytes of a tensor.

    Args:
        name: The name.
        kind: The type.
        shape: The shape.
        words: The bytes.
    """
    return f"{zlib.crc32(words, zlib.crc32(f'{name} {kind} {tuple(shape)}'.encode())):08x}"


def text_checksum(text: bytes) -> str:
    """Eight digits, of the bytes of a text.

    Args:
        text: The text.
    """
    return f"{zlib.crc32(text):08x}"


def index_metadata(index: Mapping[str, Any], described: Described) -> dict[str, str]:
    """What the metadata of a file hold: an index and the checksum of the header.

    Args:
        index: Under `leaves`, the entry of each tensor with its checksum as `crc32`; and whatever else is recorded.
        described: The tensors.
    """
    text = to_json(index)
    return {_INDEX: text, _HEADER: _checksum_of_header(text, described)}


def read_index(file: str, metadata: Mapping[str, str], tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The index of a file, compared with its checksum and with the names of the tensors; empty if it has none.

    Args:
        file: The name of the file, for errors.
        metadata: Its metadata.
        tensors: Its tensors.

    Raises:
        BrokenCheckpoint: If the header has changed since it was written, or the index is not that of the tensors.
    """
    if _INDEX not in metadata and _HEADER not in metadata:
        return {}
    text = metadata.get(_INDEX, "")
    index = json_object(text.encode(errors="surrogatepass"), file, what="index")
    leaves = index.get("leaves")
    if not isinstance(leaves, dict):
        raise BrokenCheckpoint(file, f"its index has {leaves!r:.60} for the leaves; copy the file again")
    if wrong := sorted(leaves.keys() ^ tensors.keys()):
        raise BrokenCheckpoint(
            file, "its index and its tensors do not both have this name; copy the file again", wrong[0]
        )
    others = {name: value for name, value in metadata.items() if name not in (_INDEX, _HEADER)}
    described = {name: (stored.type, stored.shape) for name, stored in tensors.items()}
    if metadata.get(_HEADER) != _checksum_of_header(text, described) or others not in ({}, FORMAT):
        raise BrokenCheckpoint(file, "its header has changed since it was written; copy the file again")
    for name, entry in leaves.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("crc32"), str):
            raise BrokenCheckpoint(file, f"its index has {entry!r:.60} for it; copy the file again", name)
    return index


def to_json(content: Any) -> str:
    """JSON with characters as they are: of an escape such as `\\u00e9`, a changed bit may mean the same character."""
    return json.dumps(content, ensure_ascii=False)


def _checksum_of_header(index: str, described: Described) -> str:
    return text_checksum(to_json([index, described]).encode(errors="surrogatepass"))
