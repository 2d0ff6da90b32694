"""Prompts to token ids, with CLIP's tokenizer from transformers.

Axes: W windows, T tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Encoding
from transformers import CLIPTokenizer

from model_handlers.checkpoint import CheckpointError


@dataclass(frozen=True)
class Tokens:
    """One prompt as a text encoder reads it.

    Attributes:
      ids: int32 (W, T), each window with begin and end of text, padded; what lies behind the prompt is empty windows.
      count: tokens of the whole prompt, begin and end included.
      truncated: whether ids hold less than the whole prompt.
      unknown_words: words that the vocabulary has no pieces for, so that they are mostly spelled in single bytes.
      windows: how many of the W hold some of the prompt, at least 1.
    """

    ids: np.ndarray
    count: int
    truncated: bool
    unknown_words: int
    windows: int = 1

    @property
    def cut(self) -> int:
        """How many tokens of the prompt the ids do not hold."""
        windows, length = self.ids.shape
        return max(0, self.count - 2 - windows * (length - 2))


class Tokenizer:
    """CLIP's byte-pair encoding, in windows of the encoder's length.

    In one window, a prompt is cut and padded as the reference does. In several, its tokens are split wherever a window
    is full, so for CLIP into runs of 75.
    """

    def __init__(self, folder: Path, vocab_size: int, max_length: int, windows: int = 1):
        """Loads the tokenizer of a checkpoint.

        Args:
          folder: with vocab.json and merges.txt, or with tokenizer.json, all that transformers 5 saves.
          vocab_size: rows of the text encoder's embedding table.
          max_length: positions of the text encoder.
          windows: how many of that length a prompt may take.

        Raises:
          CheckpointError: the folder has no vocabulary, or one that the text encoder does not know.
        """
        # Without a vocabulary transformers makes up one of two tokens, and every picture ignores its prompt.
        for name in () if (folder / "tokenizer.json").is_file() else ("vocab.json", "merges.txt"):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder / name}: no such file; a tokenizer is vocab.json and merges.txt, or tokenizer.json"
                )
        try:
            self._tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
            raise CheckpointError(f"{folder}: not a CLIP tokenizer ({error})") from error
        if len(self._tokenizer) > vocab_size:
            raise CheckpointError(
                f"{folder}: {len(self._tokenizer)} tokens, but the text encoder's vocab_size is {vocab_size}"
            )
        self._max_length = max_length
        self._windows = windows

    def __call__(self, prompts: Sequence[str]) -> list[Tokens]:
        # verbose=False: that a prompt is longer than the encoder is said by `truncated`, not by a warning.
        encoded = self._tokenizer(list(prompts), add_special_tokens=True, verbose=False)
        return [self._fit(encoding) for encoding in encoded.encodings]

    def _fit(self, encoding: Encoding) -> Tokens:
        begin, *words, end = encoding.ids
        room = self._max_length - 2
        windows = np.full((self._windows, self._max_length), self._tokenizer.pad_token_id, np.int32)
        for i, window in enumerate(windows):
            kept = words[i * room : (i + 1) * room]
            window[: len(kept) + 2] = begin, *kept, end
        wanted = max(1, -(-len(words) // room))
        return Tokens(
            windows,
            len(encoding.ids),
            truncated=wanted > self._windows,
            windows=min(wanted, self._windows),
            unknown_words=_unknown_words(encoding),
        )


def _unknown_words(encoding: Encoding) -> int:
    words: dict[int, list[str]] = {}
    for word, piece in zip(encoding.word_ids, encoding.tokens, strict=True):
        if word is not None:  # as the marks of begin and end are
            words.setdefault(word, []).append(piece.removesuffix("</w>"))
    return sum(_spelled(pieces) for pieces in words.values())


def _spelled(pieces: list[str]) -> bool:
    """Whether at least half of a word's pieces are single bytes; one alone is a word, and a row of signs is none."""
    single = sum(len(piece) == 1 for piece in pieces)
    return len(pieces) > 1 and 2 * single >= len(pieces) and any(piece.isalpha() for piece in pieces)
