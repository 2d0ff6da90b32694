"""Whatever is wrong with an output is found, each by its own line, and nothing is touched."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.options import UsageError
from pipeline.output import write_recipe
from pipeline.report import write_report
from pipeline.verify import verify
from tests.fakes import RECIPE, FakeHandler, run, tree, write_jsonl
from transforms.formats import FORMATS, OutputFormat

PROMPTS: list[dict] = [
    {"prompt": f"p{number}", "negative_prompt": "bad" if number % 2 else None} for number in range(10)
]
PROMPTS[3] |= {"clip_skip": 1, "timesteps": [999, 499], "original_size": [9, 8]}


@pytest.fixture(scope="module", params=list(FORMATS))
def whole(request, tmp_path_factory):
    """An output with two whole shards and one short one, and a reject."""
    folder = tmp_path_factory.mktemp("verify")
    output_format = OutputFormat(request.param)
    write_recipe(str(folder / "out"), RECIPE, output_format)
    handler = FakeHandler(rejected=["p7"])
    run(write_jsonl(folder / "a.jsonl", PROMPTS), folder / "out", handler, output_format=output_format)
    write_report(str(folder / "out"), fresh=True, output_format=output_format)
    return folder / "out"


@pytest.fixture
def output(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "out"))


def problems(output):
    before = tree(output)
    found = list(verify(str(output)))
    assert tree(output) == before
    return found


def first(output, pattern):
    """A file of a shard that has images."""
    return sorted(output.glob(pattern))[0]


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_whole_output_has_no_problem_and_the_command_says_so(output, capsys):
    assert problems(output) == []
    assert main(["verify", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}: whole\n"


def test_a_missing_commit_record_leaves_strays_and_counts_that_do_not_hold(output, capsys):
    shard = first(output, "commits/*.json")
    shard.unlink()
    found = problems(output)
    assert any(f"files of {shard.stem}, which was not committed" in problem for problem in found)
    assert any(problem.startswith("counts.json: the commit records hold") for problem in found)
    assert main(["verify", str(output)]) == 1
    assert capsys.readouterr().out.splitlines() == [*found, f"{output}: {len(found)} problems"]


def test_a_commit_record_that_was_edited_is_noticed(output):
    edit(first(output, "commits/*.json"), lambda commit: commit["images"][0].update(sha256="0" * 64))
    (problem,) = problems(output)
    assert problem.endswith(".png has other bytes than were committed")
    edit(first(output, "commits/*.json"), lambda commit: commit.update(shard="x"))
    assert any("is not a commit record" in problem for problem in problems(output))


def test_an_image_in_two_shards_is_noticed(output):
    one, two, *_ = sorted(output.glob("commits/*.json"))
    image = json.loads(one.read_text())["images"][0]
    edit(two, lambda commit: commit["images"].append(image))
    found = problems(output)
    assert any("is an image in another shard too" in problem for problem in found)
    assert any(f"{image['key']} is committed and has no row" in problem for problem in found)
    assert any(f"{image['key']}.png is committed and missing" in problem for problem in found)


def test_lists_of_rejects_and_commit_records_must_agree(output):
    (listed,) = output.glob("rejects/*.jsonl")
    listed.rename(listed.with_name("f" * 20 + ".jsonl"))
    found = problems(output)
    assert any("belongs to no shard" in problem for problem in found)
    assert any("is rejected and not listed" in problem for problem in found)


def test_files_of_a_killed_run_and_of_another_format_are_noticed(output):
    for name in (".tmp/x", "images/mine/x", "shards/x"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    found = problems(output)
    assert any(problem.startswith(".tmp holds files") for problem in found)
    assert any("does not belong to an output of this format" in problem for problem in found)


def test_without_a_recipe_nothing_can_be_said(output, capsys):
    edit(output / "recipe.json", lambda content: content["recipe"].update(seed=1))
    assert problems(output) == []  # it decides no pixel of these rows: their seeds stand in them
    edit(output / "recipe.json", lambda content: content["recipe"].update(dtype="bfloat16"))
    assert any("does not have the digest of its columns" in problem for problem in problems(output))
    (output / "recipe.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a recipe"):
        list(verify(str(output)))
    (output / "recipe.json").unlink()
    assert main(["verify", str(output)]) == 2
    assert "is not an output of this program" in capsys.readouterr().err


# By file: what is done to it, and a part of the line that says so.
DAMAGE = {
    "a missing picture": ("images/*/*.png", Path.unlink, "is committed and missing"),
    "another picture": ("images/*/*.png", lambda path: path.write_bytes(b"x"), "has other bytes than were committed"),
    "missing rows": ("images/*/metadata.jsonl", Path.unlink, "cannot be read"),
    "a picture too many": (
        "images/*/*.png",
        lambda path: shutil.copy(path, path.with_name("x.png")),
        "x.png is a file that is not committed",
    ),
    "a shard too many": (
        "images/*/metadata.jsonl",
        lambda path: shutil.copytree(path.parent, path.parent.with_name("b" * 20)),
        "which was not committed",
    ),
    "a row too few": (
        "images/*/metadata.jsonl",
        lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[1:])),
        "is committed and has no row",
    ),
    "another prompt": (
        "images/*/metadata.jsonl",
        lambda path: path.write_text(path.read_text().replace('"prompt": "p', '"prompt": "q', 1)),
        "does not have the digest of its columns",
    ),
    "other settings": (
        "images/*/metadata.jsonl",
        lambda path: path.write_text(path.read_text().replace('"settings": "{', '"settings": "{}', 1)),
        "has settings that are none",
    ),
    "another id": (
        "images/*/metadata.jsonl",
        lambda path: path.write_text(path.read_text().replace('"id": "a', '"id": "b', 1)),
        "does not have the key of its id",
    ),
    "a cut tar": ("shards/*.tar", lambda path: path.write_bytes(path.read_bytes()[:700]), "cannot be read"),
    "a cut table": ("shards/*.parquet", lambda path: path.write_bytes(path.read_bytes()[:700]), "cannot be read"),
}


_FORMAT = {"images": "folder", ".tar": "webdataset", ".parquet": "parquet"}
CASES = [(kind, name) for name, (glob, *_) in DAMAGE.items() for part, kind in _FORMAT.items() if part in glob]


@pytest.mark.parametrize(("whole", "damage"), CASES, indirect=["whole"])
def test_damage_is_found(output, damage):
    pattern, harm, message = DAMAGE[damage]
    harm(first(output, pattern))
    assert any(message in problem for problem in problems(output))


def test_a_key_that_was_rejected_and_made_later_is_no_problem(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", PROMPTS)
    write_recipe(str(tmp_path / "out"), RECIPE, OutputFormat())
    run(path, tmp_path / "out", FakeHandler(rejected=["p7", "p8"]))
    run(path, tmp_path / "out", FakeHandler(rejected=["p8"]), retry_rejected=True)
    assert [problem.split(": ")[1][33:] for problem in problems(tmp_path / "out")] == ["has been made"]
    write_report(str(tmp_path / "out"))  # which drops it from the list
    assert problems(tmp_path / "out") == []
