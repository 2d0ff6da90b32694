"""What a run says of itself in the end, and what its page lets a person do."""

import html
import json
import re
import shlex
import shutil
import subprocess

from tests import fakes
from tests.end_to_end import command
from tests.end_to_end.conftest import RECORDS


def test_the_commands_on_the_page_make_every_picture_again(finished_output, jax_cache_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"<pre>(.*?)</pre>", (finished_output / "index.html").read_text(), re.DOTALL)
    assert len(commands) == len(RECORDS)
    records = ""
    for text in commands:
        record, flags = html.unescape(text).split("\n")
        subprocess.run(["sh", "-c", record], check=True)
        records += (tmp_path / "again.jsonl").read_text()
    # All at once, which changes no picture and saves 21 runs.
    (tmp_path / "again.jsonl").write_text(records)
    program, *arguments = shlex.split(flags)
    finished = command.run(*arguments, f"--jax_cache_dir={jax_cache_dir}")
    assert (program, finished.status) == ("lightmill", 0), finished.stderr
    hashes = [{row["sha256"] for row in fakes.rows(output)} for output in (finished_output, tmp_path / "again")]
    assert hashes[0] == hashes[1] and len(hashes[0]) == len(RECORDS)


def test_a_run_says_how_fast_it_was_and_what_it_cost_and_one_that_made_nothing_does_not(generate, jsonl, tmp_path):
    first = generate(jsonl(RECORDS[:3]), tmp_path / "out", "--price_per_hour=3.6")
    run = json.loads((tmp_path / "out/summary.json").read_text())["run"]
    assert run["compiles"] == 1 and run["tokens_truncated"] == 0 and run["bytes_written"] > 0
    assert 0 < run["device_busy_fraction"] < 1 and run["encode_seconds"] >= 0 and run["compile_seconds"] > 0
    assert f"\n{run['images_per_hour']:,.0f} images/hour; device busy " in first.stdout
    assert f"; 1,000 images cost {run['cost_per_1000_images']:,}\n" in first.stdout
    # Of a program compiled, and of progress if it took minutes; nothing of what libraries have to say of themselves.
    assert [line for line in first.stderr.splitlines() if not line.startswith("lightmill: ")] == []
    second = generate(jsonl(RECORDS[:3]), tmp_path / "out", "--price_per_hour=3.6")
    assert "images/hour" not in second.stdout and "cost" not in second.stdout
    assert (
        json.loads((tmp_path / "out/summary.json").read_text())["run"]
        .keys()
        .isdisjoint({"compiles", "images_per_hour"})
    )


def test_report_and_show_are_commands(finished_output, tmp_path):
    output = shutil.copytree(finished_output, tmp_path / "out")
    page = (output / "index.html").read_text()
    (output / "index.html").unlink()
    assert command.run("report", output) == command.Finished(0, f"{output}/index.html\n", "")
    assert (output / "index.html").read_text() == page
    row = fakes.rows(output)[0]
    shown = command.run("show", row["path"])
    assert shown.status == 0 and json.loads(shown.stdout)["digest"] == row["digest"]
    for arguments in (("report", tmp_path), ("show", output / "recipe.json")):
        finished = command.run(*arguments)
        assert (finished.status, finished.stdout) == (2, "")
        assert re.fullmatch(r"lightmill: error: [^\n]+\n", finished.stderr)
