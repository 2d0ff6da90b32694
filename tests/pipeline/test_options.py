"""What a flag's text means."""

import argparse

import pytest

from pipeline.options import add_generate_flags


def lora(*texts):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_generate_flags(parser)
    return parser.parse_args(["--input", "a.txt", "--output", "out", *texts]).lora


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("ink.safetensors", ("ink.safetensors", 1.0)),
        ("ink.safetensors:0.8", ("ink.safetensors", 0.8)),
        ("ink.safetensors:-1", ("ink.safetensors", -1.0)),
        ("a:b.safetensors:1", ("a:b.safetensors", 1.0)),
        ("gs://bucket/ink.safetensors", ("gs://bucket/ink.safetensors", 1.0)),
        ("gs://bucket/ink.safetensors:.5", ("gs://bucket/ink.safetensors", 0.5)),
        ("org/name/ink.safetensors:2", ("org/name/ink.safetensors", 2.0)),
    ],
)
def test_a_lora_file_has_its_weight_behind_the_last_colon(text, meaning):
    assert lora("--lora", text) == [meaning]


def test_lora_files_are_taken_in_their_order_from_all_flags():
    assert lora("--lora", "a", "b:2", "--lora=c") == [("a", 1.0), ("b", 2.0), ("c", 1.0)]
    assert lora() == []


@pytest.mark.parametrize("text", ["ink.safetensors:", "ink.safetensors:much", "ink.safetensors:nan", ":1", "a:inf"])
def test_a_weight_that_is_no_finite_number_is_named(text):
    with pytest.raises(argparse.ArgumentError, match=f"--lora: '{text}' is not FILE:WEIGHT"):
        lora("--lora", text)
