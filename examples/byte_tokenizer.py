"""A tokenizer of bytes, as Hugging Face's libraries load it: token `i` is byte `i`."""

import json
import os
import pathlib
from typing import Any


def byte_tokenizer() -> dict[str, Any]:
    """What a `tokenizer.json` of bytes holds: a BPE of 256 tokens and no merges.

    GPT-2's alphabet writes each byte as one printable character. With it, a vocabulary of bytes is valid JSON.

    References:
        `bytes_to_unicode` in GPT-2's `encoder.py`; the format of `tokenizers` 0.23.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_alphabet())},
            "merges": [],
        },
    }


def write_byte_tokenizer(directory: str | os.PathLike[str], *, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` for a model whose tokens are bytes.

    Args:
        directory: The folder of an export.
        max_length: The longest sequence that the model takes.
    """
    folder = pathlib.Path(directory)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, content in (("tokenizer.json", byte_tokenizer()), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _alphabet() -> list[str]:
    """GPT-2's character for each byte: itself if it is printable Latin-1, else one of those from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
