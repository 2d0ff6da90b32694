"""The tokenizers that we write are CLIP tokenizers to transformers, and know the scenes' words."""

import json
import random

import pytest
from transformers import CLIPTokenizer

from benchmarks.scenes.scenes import VOCABULARY, caption, sample_scene
from benchmarks.scenes.tokenizer import (
    END,
    MAX_LENGTH,
    START,
    apply_merges,
    build_vocabulary,
    byte_symbols,
    learn_merges,
    write_tokenizers,
)

FOLDERS = ("tokenizer", "tokenizer_2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tokenizers(folder, VOCABULARY)
    return folder


@pytest.fixture(scope="module", params=FOLDERS)
def tokenizer(request, checkpoint):
    return CLIPTokenizer.from_pretrained(checkpoint / request.param)


def _padded(tokenizer, text: str) -> list[int]:
    return tokenizer(text, padding="max_length", max_length=MAX_LENGTH, truncation=True).input_ids


def test_every_word_of_the_vocabulary_is_one_token(tokenizer):
    for word in VOCABULARY:
        assert tokenizer.tokenize(word) == [f"{word}</w>"]


def test_a_caption_is_a_token_a_word_and_comes_back(tokenizer):
    rng = random.Random(0)
    for _ in range(100):
        text = caption(sample_scene(rng), rng)
        words = text.replace(",", " ,").split()
        assert tokenizer.tokenize(text) == [f"{word}</w>" for word in words]
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == " ".join(words)


def test_ids_lie_as_in_clip_with_start_and_end_last(tokenizer):
    size = len(tokenizer)
    assert tokenizer.get_vocab()["!"] == 0
    assert tokenizer.get_vocab()["!</w>"] == 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (size - 2, size - 1)
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert tokenizer.model_max_length == MAX_LENGTH


@pytest.mark.parametrize(("folder", "pad"), [("tokenizer", END), ("tokenizer_2", "!")])
def test_each_pads_as_its_namesake_in_sdxl_does(checkpoint, folder, pad):
    tokenizer = CLIPTokenizer.from_pretrained(checkpoint / folder)
    vocabulary = tokenizer.get_vocab()
    ids = _padded(tokenizer, "red circle")
    assert ids[:4] == [vocabulary[token] for token in (START, "red</w>", "circle</w>", END)]
    assert ids[4:] == [vocabulary[pad]] * (MAX_LENGTH - 4)


def test_a_long_prompt_is_cut_and_still_ends(tokenizer):
    ids = _padded(tokenizer, "red " * 200)
    assert len(ids) == MAX_LENGTH
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


def test_capitals_and_spaces_make_no_difference(tokenizer):
    assert tokenizer("  A RED\tCircle ").input_ids == tokenizer("a red circle").input_ids


@pytest.mark.parametrize("text", ["zebra", "🦓", "一只斑马", "naïve café", "it's 3.5 %", "reddish"])
def test_any_other_text_is_spelt_in_known_pieces(tokenizer, text):
    pieces = tokenizer.tokenize(text)
    assert pieces
    assert not set(pieces) & {f"{word}</w>" for word in VOCABULARY if len(word) > 1}
    # What CLIP splits apart (numbers, "'s") it joins with spaces, so compare without.
    decoded = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")


def test_an_empty_prompt_is_start_and_end(tokenizer):
    assert tokenizer("").input_ids == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_both_folders_hold_sdxls_files_and_one_vocabulary(checkpoint):
    names = {"vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"}
    for folder in FOLDERS:
        assert {path.name for path in (checkpoint / folder).iterdir()} == names
    first, second = (json.loads((checkpoint / folder / "vocab.json").read_text()) for folder in FOLDERS)
    assert first == second


def test_writing_again_gives_the_same_bytes(checkpoint, tmp_path):
    write_tokenizers(tmp_path, VOCABULARY)
    for path in tmp_path.rglob("*.*"):
        assert path.read_bytes() == (checkpoint / path.relative_to(tmp_path)).read_bytes()


def test_byte_symbols_are_256_different_characters():
    assert len(set(byte_symbols())) == 256
    assert byte_symbols()[0] == "!"


def test_later_words_do_not_take_earlier_ones_apart():
    words = ["aba", "bab", "abab", "baba", "ab", "ba", "a"]
    merges = learn_merges(words)
    for word in words:
        assert apply_merges(word, merges) == [f"{word}</w>"]
    assert len(build_vocabulary(merges)) == 512 + len(merges) + 2
