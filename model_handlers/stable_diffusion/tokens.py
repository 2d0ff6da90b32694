"""Prompts to token ids, with CLIP's tokenizer from transformers."""

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
      ids: int32 (max_length,), begin and end of text included, padded.
      count: tokens of the whole prompt, begin and end included.
      truncated: whether ids hold less than the whole prompt.
      unknown_words: words that the vocabulary has no pieces for, so that they are mostly spelled in single bytes.
    """

    ids: np.ndarray
    count: int
    truncated: bool
    unknown_words: int


class Tokenizer:
    """CLIP's byte-pair encoding, cut and padded to the encoder's length as the reference does."""

    def __init__(self, folder: Path, vocab_size: int, max_length: int):
        """Loads the tokenizer of a checkpoint.

        Args:
          folder: with vocab.json and merges.txt, or with tokenizer.json, all that transformers 5 saves.
          vocab_size: rows of the text encoder's embedding table.
          max_length: positions of the text encoder.

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

    def __call__(self, prompts: Sequence[str]) -> list[Tokens]:
        # verbose=False: that a prompt is longer than the encoder is said by `truncated`, not by a warning.
        encoded = self._tokenizer(list(prompts), add_special_tokens=True, verbose=False)
        return [self._fit(encoding) for encoding in encoded.encodings]

    def _fit(self, encoding: Encoding) -> Tokens:
        ids = encoding.ids
        end, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        truncated = len(ids) > self._max_length
        kept = [*ids[: self._max_length - 1], end] if truncated else ids + [pad] * (self._max_length - len(ids))
        return Tokens(np.array(kept, np.int32), len(ids), truncated, _unknown_words(encoding))


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
