"""Files of prompts as people really have them."""

import bz2
import datetime
import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.fakes import collect
from transforms import rows as ground
from transforms import tables
from transforms.read import Columns, InputError, InputFile, ReadPrompts, match_inputs, read_file, split
from transforms.records import MAX_RAW, PromptRecord, Reject
from transforms.tables import RowGroups


def rows(path, **columns):
    return list(read_file(InputFile(str(path), path.name), Columns(**columns)))


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def prompts(path, **columns):
    return [row.prompt for row in rows(path, **columns)]


def test_a_byte_order_mark_is_no_part_of_the_first_column_line_or_object(tmp_path):
    bom = b"\xef\xbb\xbf"
    assert prompts(write(tmp_path / "a.csv", bom + b"prompt,seed\na cat,7\n")) == ["a cat"]
    assert prompts(write(tmp_path / "a.txt", bom + b"a cat\n")) == ["a cat"]
    assert prompts(write(tmp_path / "a.jsonl", bom + b'{"prompt": "a cat"}\n')) == ["a cat"]


def test_windows_line_ends_and_a_missing_last_one_change_nothing(tmp_path):
    assert prompts(write(tmp_path / "a.txt", "a\r\nb\r\nc")) == ["a", "b", "c"]
    assert prompts(write(tmp_path / "a.csv", "prompt\r\na\r\nb")) == ["a", "b"]
    assert prompts(write(tmp_path / "a.jsonl", '{"prompt": "a"}\r\n{"prompt": "b"}')) == ["a", "b"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_blank_lines_are_no_records_but_keep_their_numbers(tmp_path, name):
    lines = ["a", "", "  ", "b"] if name == "a.txt" else ['{"prompt": "a"}', "", "  ", '{"prompt": "b"}']
    assert [(row.prompt, row.position) for row in rows(write(tmp_path / name, "\n".join(lines)))] == [
        ("a", 1),
        ("b", 4),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_line(tmp_path, separator):
    line = json.dumps({"prompt": "p", "note": f"a{separator}b"}, ensure_ascii=False)
    if separator < " ":
        line = json.dumps({"prompt": "p", "note": "a"}) + separator.replace("\x0b", " ")
    path = write(tmp_path / "a.jsonl", line + '\n{"prompt": "q"}\n')
    assert [row.position for row in rows(path)] == [1, 2]


def test_a_prompt_of_digits_is_text_in_a_table_and_refused_as_a_json_number(tmp_path):
    assert prompts(write(tmp_path / "a.csv", "prompt\n0\n42\n")) == ["0", "42"]
    (reject,) = rows(write(tmp_path / "a.jsonl", '{"prompt": 42}'))
    assert reject.reason == "prompt must be text, not 42"


def test_an_empty_cell_is_not_set_and_an_empty_prompt_is_a_prompt(tmp_path):
    (row,) = rows(write(tmp_path / "a.csv", "id,prompt,negative_prompt,seed,original_size,note\n,,,,,\n"))
    assert (row.prompt, row.id, row.fields, row.extra) == ("", "a.csv:1", {}, '{"note": ""}')
    assert prompts(write(tmp_path / "a.jsonl", '{"prompt": ""}')) == [""]


def test_a_quoted_cell_may_hold_commas_quotes_and_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'prompt,seed,target_size\n"a ""red"" cat,\nsitting",7,"512,768"\nb,8,512x768\n')
    first, second = rows(path)
    assert first.prompt == 'a "red" cat,\nsitting'
    assert first.fields == second.fields | {"seed": 7} == {"seed": 7, "target_size": (512, 768)}
    assert second.position == 2


def test_damaged_rows_of_a_table_are_rejected_one_by_one(tmp_path):
    path = write(
        tmp_path / "a.csv",
        b'prompt,seed\nok,1\na,b,c\n"bad"quote,2\n\xff\xfe cat,3\nshort\n\nnul\0,4\nlast,5\n"open,6\nx',
    )
    found = [row.prompt if isinstance(row, PromptRecord) else row.reason for row in rows(path)]
    assert found[0] == "ok" and found[4] == "short" and found[6] == "last"
    assert found[1].startswith("3 cells in a table of 2 columns")
    assert found[2].startswith("not CSV")
    assert found[3] == "not UTF-8: byte 0xff at place 1"
    assert "U+0000" in found[5]
    assert found[7].startswith("not CSV: unexpected end of data")
    assert [row.position for row in rows(path)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b'["a"]', "a line must be a JSON object, not list"),
        (b'"a"', "a line must be a JSON object, not str"),
        (b'{"prompt": "a", "n": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "n": 1e999}', "beyond the range"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"prompt": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at place 13"),
        (b'{"prompt": "a", "seed": true}', "seed must be a whole number, not true"),
    ],
)
def test_a_damaged_line_costs_one_record_and_says_why(tmp_path, line, reason):
    before, reject, after = rows(write(tmp_path / "a.jsonl", b'{"prompt": "x"}\n' + line + b'\n{"prompt": "y"}\n'))
    assert (before.prompt, after.prompt) == ("x", "y")
    assert reason in reject.reason and "\n" not in reject.reason
    assert (reject.position, reject.id, reject.stage) == (2, "a.jsonl:2", "read")
    assert reject.record == line[:MAX_RAW].decode("utf-8", "backslashreplace")


def test_an_endless_line_is_rejected_and_never_held_in_memory(tmp_path):
    path = write(tmp_path / "a.txt", b"first\n" + b"x" * 60_000_000 + b"\nlast\n")
    tracemalloc.start()
    first, reject, last = rows(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first.prompt, last.prompt, reject.position) == ("first", "last", 2)
    assert "longer than" in reject.reason
    assert peak < 30_000_000


def test_an_empty_file_has_no_records(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.csv"):
        assert rows(write(tmp_path / name, b"")) == []
    assert rows(write(tmp_path / "a.csv", b"prompt,seed\n")) == []


def test_a_record_is_known_by_its_place_below_the_fixed_part_of_the_pattern(tmp_path):
    for name in ("one/2024/a.txt", "two/2024/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        write(tmp_path / name, "a cat\n")
    for pattern in ("*/a.txt", "**/a.txt", "2024/*.txt", "2024/a.txt"):
        sources = {
            folder: [file.source for file in match_inputs([f"{tmp_path}/{folder}/{pattern}"])]
            for folder in ("one", "two")
        }
        assert sources["one"] == sources["two"] == ["2024/a.txt" if "/a" in pattern and "*" in pattern else "a.txt"]


def test_relative_patterns_and_brackets_in_names_are_found(tmp_path, monkeypatch):
    write(tmp_path / "p[1].txt", "a")
    monkeypatch.chdir(tmp_path)
    assert match_inputs(["p[1].txt"]) == [InputFile("p[1].txt", "p[1].txt")]
    assert [file.source for file in match_inputs(["*.txt"])] == ["p[1].txt"]


@pytest.mark.parametrize("space", ["", " ", "\n", "\r\n    "])
def test_an_array_of_objects_is_read_element_by_element(tmp_path, space):
    records = [{"id": "x", "caption": 'a "red" [cat], {sitting}\\', "n": [1, {"m": "]"}]}, {"id": 2, "caption": "ü"}]
    text = (
        f"[{space}"
        + f",{space}".join(json.dumps(record, ensure_ascii=False) for record in records)
        + f"{space}]{space}"
    )
    first, second = rows(write(tmp_path / "a.json", "\ufeff" + text))
    assert (first.id, first.prompt, first.position) == ("x", 'a "red" [cat], {sitting}\\', 1)
    assert (second.id, second.prompt, second.position) == ("2", "ü", 2)
    assert json.loads(first.extra) == {"n": [1, {"m": "]"}]}


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (b'{"prompt": NaN}', "NaN is not a JSON number"),
        (b'"a cat"', "an element must be a JSON object, not str"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff"),
        (b'{"prompt" "a"}', "not JSON"),
        (b'{"prompt": "' + b"x" * 4_000_001 + b'"}', "the element is longer than 4000000 bytes"),
        (b'{"prompt": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_damaged_element_costs_one_record(tmp_path, element, reason):
    path = write(tmp_path / "a.json", b'[{"prompt": "x"}, ' + element + b', {"prompt": "y"}]')
    before, reject, after = rows(path)
    assert (before.prompt, after.prompt, after.position) == ("x", "y", 3)
    assert reason in reject.reason and reject.position == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a"}, {"prompt', "ends within its array"),
        ('[{"prompt": "a"}', "ends within its array"),
        ('[{"prompt": "a}, {"prompt": "b"}]', "ends within its array"),
        ('[{"prompt": "a"}] , {"prompt": "b"}]', "goes on after the end of its array"),
        ('{\n "prompt": "a"\n}', "neither an array of objects nor an object a line"),
        ('"a"', "neither an array of objects nor an object a line"),
    ],
)
def test_an_array_that_is_broken_as_a_whole_stops_the_run(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        rows(write(tmp_path / "a.json", text))


def test_lines_of_json_may_be_called_json(tmp_path):
    assert prompts(write(tmp_path / "a.json", '{"prompt": "a"}\n\n{"prompt": "b"}\n')) == ["a", "b"]
    assert rows(write(tmp_path / "a.json", " \n")) == rows(write(tmp_path / "a.json", "[ ]")) == []


def test_memory_for_an_array_is_bounded_by_its_elements(tmp_path):
    path = tmp_path / "a.json"
    with path.open("w") as file:
        file.write("[" + json.dumps({"prompt": "x" * 90_000}))
        for number in range(400):
            file.write("," + json.dumps({"prompt": f"{number}" + "x" * 90_000}))
        file.write("]")
    tracemalloc.start()
    assert sum(1 for _ in read_file(InputFile(str(path), "a.json"), Columns())) == 401
    assert tracemalloc.get_traced_memory()[1] < 15_000_000 < path.stat().st_size
    tracemalloc.stop()


def test_quote_marks_of_a_tsv_are_part_of_the_prompt(tmp_path):
    path = write(
        tmp_path / "a.tsv",
        'Prompt\tseed\tNote\r\n"G I G G L E" in red, a\t\t"\r\n\r\n"open\t7\t\r\nshort\na\tb\tc\td\n',
    )
    first, second, short, long = rows(path)
    assert (first.prompt, first.fields, first.extra) == ('"G I G G L E" in red, a', {}, '{"Note": "\\""}')
    assert (second.prompt, second.fields, second.position) == ('"open', {"seed": 7}, 2)
    assert short.prompt == "short" and "is a tab inside of a cell?" in long.reason


def test_parquet_is_read_by_row_groups_without_its_pictures(tmp_path):
    path = tmp_path / "a.parquet"
    picture = {"bytes": b"\xff" * 1000, "path": "x"}
    table = pa.table(
        {
            "caption": ["a cat", None, "a dog"],
            "seed": pa.array([7.0, float("nan"), None], pa.float64()),
            "image": [picture] * 3,
            "made": [datetime.datetime(2024, 1, 2), None, None],
            "tags": [["a", "b"], [], None],
        }
    )
    parquet.write_table(table, path, row_group_size=2)
    first, reject, last = rows(path)
    assert (first.prompt, first.fields) == ("a cat", {"seed": 7})
    assert json.loads(first.extra) == {"made": "2024-01-02 00:00:00", "tags": ["a", "b"]}
    assert (last.prompt, last.fields, last.id) == ("a dog", {}, "a.parquet:3")
    assert (reject.reason, reject.position) == ("caption is not set", 2)


def test_the_row_groups_of_a_parquet_file_are_read_apart_as_they_are_together(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS_OF_PART", 4)
    path = tmp_path / "a.parquet"
    prompts = [f"prompt {number}" for number in range(17)]
    table = pa.table({"prompt": [*prompts[:9], None, *prompts[10:]], "seed": [-1, *range(16)]})
    parquet.write_table(table, path, row_group_size=3)
    write(tmp_path / "b.txt", "a cat")
    together = rows(path)
    assert [row.position for row in together] == list(range(1, 18))
    assert [row.position for row in together if isinstance(row, Reject)] == [1, 10]

    parts = split(match_inputs([str(tmp_path / "*")]))
    assert [(part.source, part.part) for part in parts] == [
        ("a.parquet", RowGroups(0, 2, 0)),
        ("a.parquet", RowGroups(2, 4, 6)),
        ("a.parquet", RowGroups(4, 6, 12)),
        ("b.txt", None),
    ]
    assert [row for part in parts[:3] for row in read_file(part, Columns())] == together

    read = collect(lambda pipeline: pipeline | ReadPrompts([str(path)]))
    assert sorted(read["records"] + read["rejects"], key=lambda row: row.position) == together
    assert sorted(read["fates"]) == [("records_read", 5), ("records_read", 6), ("records_read", 6)]


def test_a_parquet_file_without_rows_has_no_records(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert [row for part in split(match_inputs([str(path)])) for row in read_file(part, Columns())] == rows(path) == []


def test_damage_in_a_parquet_file_costs_a_record_or_stops_the_run(tmp_path):
    text = pa.array([b"a cat", b"\xff", b"a dog"]).view(pa.string())
    parquet.write_table(pa.table({"prompt": text}), tmp_path / "a.parquet")
    before, reject, after = rows(tmp_path / "a.parquet")
    assert (before.prompt, after.prompt) == ("a cat", "a dog") and "cannot be read" in reject.reason
    with pytest.raises(InputError, match="no prompt column; columns found: promt"):
        parquet.write_table(pa.table({"promt": ["a"], "b": [b""]}), tmp_path / "b.parquet")
        match_inputs([str(tmp_path / "b.parquet")])
    for name in ("a.parquet.gz", "c.parquet"):
        with pytest.raises(InputError, match=r"all but the parquet|is damaged"):
            match_inputs([str(write(tmp_path / name, b"PAR1"))])


def test_a_folder_stands_for_its_text_files_each_of_which_is_one_prompt(tmp_path):
    folder = tmp_path / "p[1]"
    folder.mkdir()
    for name, text in (("a.txt", "\ufeffa cat,\r\nsitting\n"), ("b.c.txt", "a dog"), ("LICENSE", "x"), (".txt", "x")):
        write(folder / name, text)
    write(folder / "d.txt", " \n")
    write(folder / "e.txt", b"\xff")
    files = match_inputs([f"{folder}/"])
    assert [file.source for file in files] == ["a.txt", "b.c.txt", "d.txt", "e.txt"]
    first, second, blank, damaged = (next(read_file(file, Columns())) for file in files)
    assert (first.id, first.prompt) == ("a", "a cat,\nsitting")
    assert (second.id, second.prompt) == ("b.c", "a dog")
    assert blank.reason == "the file holds no text" and "not UTF-8" in damaged.reason


def test_compressed_files_are_read_as_what_they_hold(tmp_path):
    zstd = pa.Codec("zstd")
    write(tmp_path / "a.txt.zst", b"".join(zstd.compress(text, asbytes=True) for text in (b"a cat\n", b"a dog\n")))
    assert prompts(tmp_path / "a.txt.zst") == ["a cat", "a dog"]
    write(tmp_path / "a.json.gz", gzip.compress(b'[{"prompt": "a cat"}]'))
    assert prompts(tmp_path / "a.json.gz") == ["a cat"]
    write(tmp_path / "a.csv.gz", gzip.compress(b"prompt\na cat\n") + gzip.compress(b"a dog\n"))
    write(tmp_path / "a.txt.bz2", bz2.compress(b"a cat\n"))
    assert prompts(tmp_path / "a.csv.gz") == ["a cat", "a dog"]
    assert prompts(tmp_path / "a.txt.bz2") == ["a cat"]


def test_a_compressed_file_that_was_cut_stops_the_run(tmp_path):
    whole = gzip.compress("".join(f"prompt {number}\n" for number in range(9000)).encode())
    path = write(tmp_path / "a.txt.gz", whole[:-100])
    with pytest.raises(InputError, match="compressed file is damaged"):
        rows(path)
    text = "".join(f"prompt {number}\n" for number in range(9000)).encode()
    with pytest.raises(InputError, match="Truncated"):
        rows(write(tmp_path / "a.txt.zst", pa.Codec("zstd").compress(text, asbytes=True)[:-9]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"promt,seed\na,1\n", "no prompt column; columns found: promt, seed"),
        ("a.csv", b'id,"pro\n\x1b[31mmpt"\n', "columns found: id, pro  .31mmpt;"),
        ("a.csv", b"prompt;seed\na;1\n", "no prompt column; columns found: prompt;seed"),
        ("a.csv", b"prompt,seed,seed\n", "stands twice"),
        ("a.csv", b'"prompt\na', "header is not CSV"),
        ("a.csv", b"prompt,cat\xe9gorie\na,b\n", "the header is not UTF-8: byte 0xe9"),
        ("a.txt", "a cat".encode("utf-16"), "is UTF-16"),
        ("a.txt.gz", b"no gzip", "damaged"),
        ("a.xml", b"", "not a known kind of file; known are .jsonl, .json, .csv, .tsv, .parquet, .txt"),
        ("a", b"", "not a known kind of file"),
    ],
)
def test_what_is_wrong_with_a_whole_file_shows_before_the_run(tmp_path, name, data, message):
    write(tmp_path / name, data)
    with pytest.raises(InputError, match=message) as error:
        match_inputs([str(tmp_path / name)])
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_named_columns_must_be_there(tmp_path):
    path = str(write(tmp_path / "a.csv", "prompt,n\na,1\n"))
    assert match_inputs([path], "prompt", "n")
    (reject,) = rows(write(tmp_path / "a.jsonl", '{"prompt": "a"}'), id="n")
    assert reject.reason == "no column 'n'"
    for columns in ({"prompt_column": "caption"}, {"id_column": "key"}):
        with pytest.raises(InputError, match="columns found: prompt, n"):
            match_inputs([path], **columns)


def test_a_pattern_that_finds_nothing_stops_the_run(tmp_path):
    for pattern, message in (
        ("a.txt", "no such file"),
        ("*.txt", "matches no file"),
        ("", "is a folder without .txt files: give"),
    ):
        with pytest.raises(InputError, match=message):
            match_inputs([f"{tmp_path}/{pattern}".rstrip("/")])


def test_a_wildcard_skips_hidden_files(tmp_path):
    write(tmp_path / ".DS_Store", b"\0")
    write(tmp_path / "a.txt", "a")
    assert [file.source for file in match_inputs([f"{tmp_path}/*"])] == ["a.txt"]


def test_two_files_of_one_name_are_not_mistaken_for_each_other(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.txt", "a cat")
    with pytest.raises(InputError, match=r"would both be called 'a.txt'"):
        match_inputs([f"{tmp_path}/x/a.txt", f"{tmp_path}/y/a.txt"])
    assert len(match_inputs([f"{tmp_path}/x/a.txt", f"{tmp_path}/x/*.txt"])) == 1


@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=200), suffix=st.sampled_from([".txt", ".jsonl", ".csv", ".tsv"]), chunk=st.integers(1, 9)
)
def test_no_bytes_crash_a_reader_and_reads_may_end_anywhere(tmp_path_factory, data, suffix, chunk):
    path = write(tmp_path_factory.getbasetemp() / f"fuzz{suffix}", b"prompt\n" + data)
    whole = rows(path)
    for row in whole:
        for value in vars(row).values():
            str(value).encode()  # as Beam's coders do, which fail at half a surrogate pair
    old, ground.CHUNK = ground.CHUNK, chunk
    try:
        assert rows(path) == whole
    finally:
        ground.CHUNK = old


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60), place=st.integers(0, 60), chunk=st.integers(1, 9))
def test_no_bytes_crash_the_reader_of_arrays(tmp_path_factory, data, place, chunk):
    text = b'[{"prompt": "a, \\"b\\" [c]"}, {"prompt": "d", "n": [{}]}]'
    path = write(tmp_path_factory.getbasetemp() / "fuzz.json", text[:place] + data + text[place:])
    results = []
    old = ground.CHUNK
    for size in (old, chunk):
        ground.CHUNK = size
        try:
            results.append(rows(path))
        except InputError as error:
            results.append(str(error))
        finally:
            ground.CHUNK = old
    assert results[0] == results[1]
