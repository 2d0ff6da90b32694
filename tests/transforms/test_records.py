"""What a record may hold, and with which reason the rest is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.recipe import MAX_SEED
from transforms.records import FIELDS, MAX_TEXT, RecordError, parse


def fields(**columns):
    return parse("a.jsonl", 1, {"prompt": "a cat", **columns}).fields


def reason(**columns):
    with pytest.raises(RecordError) as error:
        parse("a.jsonl", 1, {"prompt": "a cat", **columns})
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "seed"),
    [(0, 0), (MAX_SEED, MAX_SEED), ("7", 7), (" 7 ", 7), (7.0, 7), ("7.0", 7), (str(MAX_SEED), MAX_SEED)],
)
def test_a_seed_is_taken_exactly(value, seed):
    assert fields(seed=value) == {"seed": seed}


@pytest.mark.parametrize("value", [True, 7.5, "7.5", "seven", "", "1_000", "\u0667", [7], {}, float(2**60), "1e3"])
def test_a_seed_that_is_no_whole_number_is_refused_by_name_and_value(value):
    assert "seed must be a whole number" in reason(seed=value)


@pytest.mark.parametrize("value", [-1, "-1", MAX_SEED + 1, 10**400])
def test_a_seed_beyond_the_range_is_refused_and_never_folded(value):
    assert f"seed must be from 0 to {MAX_SEED}" in reason(seed=value)


def test_null_means_not_set_and_an_empty_negative_prompt_does_not():
    assert fields(seed=None, negative_prompt=None, width=None) == {}
    assert fields(negative_prompt="") == {"negative_prompt": ""}


@pytest.mark.parametrize("value", [[512, 768], "512,768", "512x768", " 512 X 768 ", "[512, 768]"])
def test_a_size_pair_is_a_list_or_text(value):
    assert fields(original_size=value) == {"original_size": (512, 768)}


@pytest.mark.parametrize("value", [512, "512", [512], [1, 2, 3], [True, 2], "512,", {"h": 1}])
def test_anything_else_is_no_size_pair(value):
    assert reason(target_size=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", "inf", True, "5,0", [], 10**400])
def test_a_guidance_scale_must_be_a_finite_number(value):
    assert "guidance_scale must be a number" in reason(guidance_scale=value)


def test_other_columns_are_kept_as_text_whatever_their_nesting():
    record = parse("a.jsonl", 1, {"prompt": "p", "b": {"x": [None, 1.5]}, "a": "ü"})
    assert record.extra == '{"a": "\\u00fc", "b": {"x": [null, 1.5]}}'


def test_the_columns_of_a_scraped_set_are_no_wishes():
    record = parse("a.jsonl", 1, {"TEXT": "p", "WIDTH": 333, "HEIGHT": 500})
    assert record.fields == {} and json.loads(record.extra) == {"WIDTH": 333, "HEIGHT": 500}


@pytest.mark.parametrize("name", ["prompt", "Prompt", "caption", "TEXT", "prompt_en"])
def test_the_prompt_column_is_found_by_convention(name):
    assert parse("a.csv", 1, {"category": "x", name: "a cat"}).prompt == "a cat"


def test_a_named_prompt_column_goes_before_the_convention():
    record = parse("a.csv", 1, {"prompt": "old", "better": "new", "n": "5"}, "better", "n")
    assert (record.prompt, record.id, record.extra) == ("new", "5", '{"prompt": "old"}')


def test_a_record_without_a_prompt_says_which_columns_it_has():
    with pytest.raises(RecordError, match=r"no column 'prompt'; found: 'promt', 'x'"):
        parse("a.jsonl", 1, {"promt": "a cat", "x": 1})


@pytest.mark.parametrize("value", [42, True, ["a"], {"a": 1}])
def test_a_prompt_that_is_not_text_is_refused(value):
    assert "prompt must be text" in reason(prompt=value)


@pytest.mark.parametrize("value", [[0.28, 5.42], "0.28,5.42", "[0.28, 5.42]", " (0.28, 5.42) "])
def test_an_interval_and_a_schedule_are_lists_or_such_as_a_table_writes_them(value):
    fields = parse("a.jsonl", 1, {"prompt": "p", "guidance_interval": value, "sigmas": value}).fields
    assert fields == {"guidance_interval": (0.28, 5.42), "sigmas": (0.28, 5.42)}


@pytest.mark.parametrize("value", [[1], [1, 2, 3], "1", 1, {"low": 1}, [None, 1], ["x", 1], [True, 1], "1;2"])
def test_anything_else_is_no_interval(value):
    assert reason(guidance_interval=value).startswith("guidance_interval must be ")


@pytest.mark.parametrize("value", [[], "", 1, {}, [None], "a,b", [[1]], [1.0] * 1002])
def test_anything_else_is_no_schedule(value):
    assert reason(timesteps=value).startswith("timesteps must be ")


@pytest.mark.parametrize("value", ["a\0b", "\x1b[31m", "\x7f", "\x92"])
def test_control_characters_are_refused_with_their_place(value):
    assert "prompt holds the control character U+" in reason(prompt=value)
    assert "negative_prompt holds the control character U+" in reason(negative_prompt=value)


@pytest.mark.parametrize(
    "value", ["", "   ", "two\nlines", "tab\t", "👩‍🚀", "一只猫", "قطة", "a\u2028b", "x" * MAX_TEXT]
)
def test_any_other_text_is_a_prompt_as_it_stands(value):
    assert parse("a.jsonl", 1, {"prompt": value}).prompt == value


def test_half_a_surrogate_pair_and_a_megabyte_are_refused():
    assert "surrogate" in reason(prompt="\ud800")
    assert "surrogate" in reason(id="\ud800")
    assert "1000000 characters, more than" in reason(prompt="x" * 1_000_000)


@pytest.mark.parametrize("value", ["../../x", "a/b.c", "x" * 1000, "a\0b", "\n"])
def test_an_id_may_hold_anything(value):
    assert parse("a.jsonl", 1, {"prompt": "p", "id": value}).id == value


def test_an_id_may_be_a_number_and_otherwise_is_the_place_in_the_file():
    assert parse("a.jsonl", 3, {"prompt": "p", "id": 7}).id == "7"
    assert parse("d/a.jsonl", 3, {"prompt": "p", "id": None}).id == "d/a.jsonl:3"


@pytest.mark.parametrize("value", ["", True, 1.5, [], "x" * 1001])
def test_any_other_id_is_refused(value):
    assert reason(id=value).startswith("id ")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["prompt", "Caption", "id", "note", *FIELDS]), _json, max_size=6))
def test_any_row_gives_a_record_or_a_reason(columns):
    try:
        record = parse("a.jsonl", 1, columns)
    except RecordError as error:
        assert str(error).encode() and "\n" not in str(error)
        return
    # Beam's coders stop at half a surrogate pair.
    assert record.id.encode() and (record.prompt + record.extra).encode() is not None
    json.loads(record.extra, parse_constant=pytest.fail)
    # What was accepted means the same when it is fed in again.
    again = parse("a.jsonl", 1, json.loads(record.as_input()))
    assert (again.id, again.prompt, again.fields, again.extra) == (
        record.id,
        record.prompt,
        record.fields,
        record.extra,
    )
