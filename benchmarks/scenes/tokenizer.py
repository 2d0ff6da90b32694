"""The demonstration checkpoint's two tokenizers: CLIP's byte-pair format over the scenes' closed vocabulary.

A word of the vocabulary is one token. Anything else falls apart into pieces down to single bytes, which CLIP's
format can always spell, so no prompt is an error. The two differ, as SDXL's do, only in what they pad with:
`tokenizer/` with the end token, `tokenizer_2/` with "!", whose id is 0.
"""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
MAX_LENGTH = 77


def byte_symbols() -> list[str]:
    """The 256 printable characters that stand for bytes, in CLIP's order, so that "!" comes first.

    From openai/CLIP simple_tokenizer.py `bytes_to_unicode`: printable Latin-1 stands for itself, the rest is moved
    to 256 and up.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = 256 - len(printable)
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(moved)]


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Byte-pair merges under which each of the (ASCII) words becomes one token.

    Word by word, what the merges so far leave apart is joined from the left. A later merge ranks behind all earlier
    ones, so it cannot disturb a word that they already joined.
    """
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = apply_merges(word, merges)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = apply_merges(word, merges)
    return merges


def apply_merges(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Splits a word as byte-pair encoding does: of the pairs present, the earliest merge is applied first."""
    pieces = [*word[:-1], word[-1] + "</w>"]
    rank = {pair: index for index, pair in enumerate(merges)}
    while len(pieces) > 1:
        best = min(pairwise(pieces), key=lambda pair: rank.get(pair, len(merges)))
        if best not in rank:
            break
        joined: list[str] = []
        for piece in pieces:
            if joined and (joined[-1], piece) == best:
                joined[-1] += piece
            else:
                joined.append(piece)
        pieces = joined
    return pieces


def build_vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Token to id in CLIP's order: bytes, bytes that end a word, merges, start, end."""
    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *(a + b for a, b in merges), START, END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("two merges give the same token")
    return vocabulary


def write_tokenizers(checkpoint: Path, words: Iterable[str]) -> int:
    """Writes `tokenizer/` and `tokenizer_2/` under `checkpoint`; returns the vocabulary's size.

    The same words in the same order give the same ids.
    """
    merges = learn_merges(words)
    vocabulary = build_vocabulary(merges)
    for folder, pad in (("tokenizer", END), ("tokenizer_2", "!")):
        _write_tokenizer(checkpoint / folder, vocabulary, merges, pad)
    return len(vocabulary)


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], pad: str) -> None:
    def special(token: str) -> dict:
        # As in SDXL's files, "!" is not normalized and the other two are.
        return {
            "content": token,
            "lstrip": False,
            "normalized": token != "!",
            "rstrip": False,
            "single_word": False,
        }

    names = {"bos_token": START, "eos_token": END, "unk_token": END}
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(vocabulary[token]): special(token) | {"special": True}
            for token in sorted({START, END, pad}, key=vocabulary.__getitem__)
        },
        **names,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "vocab.json", vocabulary)
    _write_json(folder / "tokenizer_config.json", config)
    roles = {role: special(token) for role, token in names.items()}
    _write_json(folder / "special_tokens_map.json", roles | {"pad_token": pad})
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
