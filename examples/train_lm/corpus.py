"""Bytes to train on: prose that ships with Python, split, and batches that depend only on seed and step."""

import dataclasses
import hashlib
import importlib
import pathlib

import numpy as np


# A block is long enough to hold whole paragraphs, short enough that validation is drawn from everywhere in the text.
BLOCK_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation bytes.

    Args:
        name: The source of the text, for messages.
        train: Training bytes, uint8.
        validation: Validation bytes, uint8. The default text holds no paragraph twice, so they are new to the model.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray

    @property
    def digest(self) -> str:
        """A hash of both parts, to check on resuming that the text has not changed."""
        return hashlib.sha256(self.train.tobytes() + b"|" + self.validation.tobytes()).hexdigest()[:16]

    def batch(self, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
        """The training batch of a step: a pure function of its arguments, so a resumed run sees the same batches.

        Returns:
            `(batch_size, length + 1)`, int32: windows at random positions; the extra byte is the last target.
        """
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - length, batch_size)
        return self.train[starts[:, None] + np.arange(length + 1)].astype(np.int32)

    def validation_batches(self, batch_size: int, length: int, limit: int | None = None) -> list[np.ndarray]:
        """All of the validation text in order, cut into batches like those of `batch`.

        Args:
            batch_size: Windows per batch.
            length: Predicted bytes per window.
            limit: At most this many batches, evenly spread; None for all.

        Raises:
            ValueError: If the validation text is too short for one batch.
        """
        count = (len(self.validation) - 1) // (batch_size * length)
        if count == 0:
            raise ValueError(
                f"the validation text has {len(self.validation)} bytes, less than one batch of {batch_size} windows of "
                f"{length}; use a longer text, a larger --validation-fraction, or a smaller --batch-size or --seq-len"
            )
        starts = np.arange(count * batch_size).reshape(count, batch_size) * length
        if limit is not None and limit < count:
            starts = starts[np.linspace(0, count - 1, limit).round().astype(int)]
        return [self.validation[row[:, None] + np.arange(length + 1)].astype(np.int32) for row in starts]


def load_corpus(path: str | None, validation_fraction: float) -> Corpus:
    """Reads a text and holds back every n-th block of 4 KiB for validation, with n = `1 / validation_fraction` rounded.

    Args:
        path: A file, read as bytes; None for the prose that ships with Python (`pydoc_data.topics`).
        validation_fraction: Share of the text held back, at most 0.5.

    Raises:
        ValueError: If the file cannot be read or is too short, or the fraction is not in (0, 0.5].
    """
    name, text = (path, _read(path)) if path is not None else ("pydoc_data.topics", _python_topics())
    return split_corpus(name, text, validation_fraction)


def split_corpus(name: str, text: bytes, validation_fraction: float) -> Corpus:
    """As `load_corpus`, of a text that is in memory.

    Args:
        name: The source of the text, for messages.
        text: The text.
        validation_fraction: See `load_corpus`.

    Raises:
        ValueError: If the text is too short, or the fraction is not in (0, 0.5].
    """
    if not 0 < validation_fraction <= 0.5:
        raise ValueError(f"--validation-fraction {validation_fraction} is not above 0 and at most 0.5")
    every = round(1 / validation_fraction)
    blocks = [text[start : start + BLOCK_BYTES] for start in range(0, len(text), BLOCK_BYTES)]
    if len(blocks) < every:
        raise ValueError(
            f"{name} has {len(text)} bytes; with --validation-fraction {validation_fraction} at least "
            f"{(every - 1) * BLOCK_BYTES + 1} are needed"
        )
    validation = b"".join(blocks[every - 1 :: every])
    rest = b"".join(block for index, block in enumerate(blocks) if index % every != every - 1)
    return Corpus(name, np.frombuffer(rest, np.uint8), np.frombuffer(validation, np.uint8))


def _read(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--data {path} cannot be read: {error.strerror or error}") from error


def _python_topics() -> bytes:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError("this Python comes without pydoc_data.topics; give a text with --data FILE") from error
    # Some topics quote others in full. Each paragraph is kept once, or the model would memorize validation text.
    paragraphs = dict.fromkeys(paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n\n".join(paragraphs).encode()
