"""The same command goes on, and never mixes what does not belong together."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_handlers import handler
from tests import fakes
from tests.end_to_end import command
from tests.end_to_end.conftest import RECORDS


@pytest.fixture
def output(finished_output, tmp_path):
    """A finished output of RECORDS that a test may change."""
    return shutil.copytree(finished_output, tmp_path / "out")


def test_a_second_run_writes_no_picture_and_succeeds(generate, records_file, output):
    of_the_run = {".lock", "counts.json", "summary.json", "index.html", "README.md"}
    before = {name: file for name, file in command.everything(output).items() if name not in of_the_run}
    finished = generate(records_file, output)
    assert {name: file for name, file in command.everything(output).items() if name not in of_the_run} == before
    assert "0 images written in " in finished.stdout and f"{len(RECORDS)} there before" in finished.stdout
    assert "compiled" not in finished.stderr


def test_an_input_that_grew_makes_only_what_is_new(generate, jsonl, output, expected):
    new = [{"id": "new", "prompt": "a green star"}, {**RECORDS[0], "prompt": "another prompt for the same id"}]
    finished = generate(jsonl([RECORDS[0], *new, *RECORDS[1:]]), output)
    assert finished.stdout.startswith(f"{len(RECORDS) + 2} records: 2 images written")
    found = {(row["id"], row["prompt"]): row["sha256"] for row in fakes.rows(output)}
    for record in new:
        assert found.pop((record["id"], record["prompt"])) not in expected.values()
    assert found == {(record["id"], record["prompt"]): expected[record["id"], 0] for record in RECORDS}


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--num_inference_steps=3", "num_inference_steps was 2 and is 3"),
        ("--guidance_scale=1", "guidance_scale was 5.0 and is 1.0"),
        ("--seed=1", "seed was 0 and is 1"),
        ("--per_device_batch_size=2", "per_device_batch_size was 4 and is 2"),
        ("--dtype=bfloat16", "dtype was 'float32' and is 'bfloat16'"),
        ("--clip_skip=1", "settings was '{}' and is '{\"clip_skip\": 1}'"),
        ("--long_prompts=chunk", "prompt_windows was 1 and is 4"),
    ],
)
def test_a_changed_recipe_is_refused_by_the_name_of_what_changed(flag, named, generate, records_file, finished_output):
    before = command.everything(finished_output)
    refused = generate(records_file, finished_output, flag, check=False)
    assert (refused.status, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"lightmill: error: {finished_output} holds pictures of another recipe ({named}); take another --output, or "
        "--on_recipe_change=new\n"
    )
    assert command.everything(finished_output) == before


def test_changed_weights_are_another_recipe(generate, records_file, finished_output, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    path = checkpoint / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["decoder.conv_out.weight"] *= -1
    save_file(tensors, path)
    refused = generate(records_file, finished_output, f"--checkpoint={checkpoint}", check=False)
    assert refused.status == 2
    assert "holds pictures of another recipe (checkpoint was '" in refused.stderr


def test_a_checkpoint_that_moved_is_the_same_recipe(generate, records_file, output, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere")
    finished = generate(records_file, output, f"--checkpoint={checkpoint}")
    assert f"{len(RECORDS)} there before" in finished.stdout


def test_what_the_model_rejected_is_left_alone_until_it_is_to_be_tried_again(
    generate, jsonl, expected, tmp_path, monkeypatch
):
    records = jsonl(RECORDS[:6])
    real = handler._fetch

    def flaky(started):
        slots, tokens, (images, finite), fetched = started
        wanted = np.array([request is None or request.id not in ("r1", "r4") for request in slots])
        return real((slots, tokens, (images, np.asarray(finite) & wanted), fetched))

    with monkeypatch.context() as patch:
        patch.setattr(handler, "_fetch", flaky)
        generate(records, tmp_path / "out")
    assert {reject["id"]: reject["reason"] for reject in fakes.rejects(tmp_path / "out")} == {
        "r1": handler.NOT_FINITE,
        "r4": handler.NOT_FINITE,
    }
    generate(records, tmp_path / "out")
    assert command.counts(tmp_path / "out") == {
        "records_read": 6,
        "records_expanded": 6,
        "images_requested": 6,
        "finished_before": 4,
        "rejected_before": 2,
    }
    generate(records, tmp_path / "out", "--retry_rejected")
    assert command.counts(tmp_path / "out")["written"] == 2
    assert fakes.rejects(tmp_path / "out") == []
    assert command.hashes(tmp_path / "out") == {(record["id"], 0): expected[record["id"], 0] for record in RECORDS[:6]}
