"""What the tokenizer says about a prompt beside its ids."""

import pytest

from model_handlers.fetch import EMBEDDED, checkpoint_folder
from model_handlers.stable_diffusion.tokens import Tokenizer


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
