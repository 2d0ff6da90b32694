"""What the tokenizer makes of a prompt: the ids that the text encoders see, where it is cut, and what is unknown."""

import numpy as np
import pytest

from model_handlers.fetch import EMBEDDED, checkpoint_folder
from model_handlers.stable_diffusion.tokens import Tokenizer
from tests.parity import cases

LENGTH, ROOM = 77, 75


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(checkpoint_folder(EMBEDDED) / "tokenizer", vocab_size=664, max_length=77)


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("a red circle, left of THE blue square", 0),
        ("", 0),
        ("x, 3; (a)!", 0),  # single letters, digits and signs are spelled by what they are
        ("a dog and a red circle", 1),
        ("Katze 中 été", 3),
        ("a red zeppelin above a blue zeppelin", 2),
    ],
)
def test_words_without_pieces_in_the_vocabulary_are_counted(tokenizer, prompt, unknown):
    assert tokenizer([prompt])[0].unknown_words == unknown


def test_words_beyond_the_cut_are_counted_like_the_others(tokenizer):
    (tokens,) = tokenizer(["red " * 100 + "dog"])
    assert (tokens.truncated, tokens.unknown_words) == (True, 1)


@pytest.fixture(scope="module")
def tokenize(tiny_checkpoint):
    """The tokens of one prompt in so many windows."""

    def run(prompt, windows):
        (tokens,) = Tokenizer(tiny_checkpoint / "tokenizer", cases.VOCABULARY_SIZE, LENGTH, windows)([prompt])
        return tokens

    return run


@pytest.mark.parametrize(
    ("words", "windows", "truncated"),
    [(0, 1, False), (1, 1, False), (75, 1, False), (76, 2, False), (150, 2, False), (225, 3, False), (226, 3, True)],
)
def test_a_prompt_takes_as_many_windows_as_it_needs_of_those_there_are(words, windows, truncated, tokenize):
    tokens = tokenize("red " * words, windows=3)
    assert tokens.ids.shape == (3, LENGTH)
    assert (tokens.count, tokens.windows, tokens.truncated) == (words + 2, windows, truncated)
    assert tokens.cut == max(0, words - 3 * ROOM)


def test_windows_hold_the_prompt_end_to_end_each_with_its_own_begin_and_end(tokenize):
    prompt = "a red circle left of a large blue square, " * 12
    (whole,) = tokenize(prompt, windows=1).ids
    tokens = tokenize(prompt, windows=3)
    assert tokens.windows == 2
    (empty,) = tokenize("", windows=1).ids
    begin, end = empty[:2]
    assert (tokens.ids[:, 0] == begin).all()
    assert np.array_equal(tokens.ids[0], whole)  # cut in one window, it is the first of several
    rest = tokens.count - 2 - ROOM
    assert tokens.ids[1, rest + 1] == end and not (tokens.ids[1, 1 : rest + 1] == end).any()
    assert np.array_equal(tokens.ids[2], empty)
