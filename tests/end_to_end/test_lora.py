"""A LoRA file from the command line to the pictures."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import fakes
from tests.end_to_end import command
from tests.parity import cases

QUERY = "unet.mid_block.attentions.0.transformer_blocks.1.attn1.to_q"
PROMPTS = [{"id": "a", "prompt": "a red circle", "seed": 1}]


def write(path, name="down"):
    down, up = cases.draw(name, (2, 32)), cases.draw("up", (32, 2))
    save_file({f"{QUERY}.lora_A.weight": down, f"{QUERY}.lora_B.weight": up}, path)
    return path


@pytest.fixture
def lora(tmp_path):
    return write(tmp_path / "lora.safetensors")


def test_a_lora_file_changes_pictures_and_is_in_their_recipe(generate, jsonl, lora, tmp_path):
    records = jsonl(PROMPTS)
    generate(records, tmp_path / "without")
    finished = generate(records, tmp_path / "with", f"--lora={lora}:0.5")
    assert f"lightmill: {lora}: 2 of 2 keys merged into 1 weights, times 0.5" in finished.stderr
    (before,), (after,) = (fakes.rows(tmp_path / name) for name in ("without", "with"))
    assert before["digest"] != after["digest"]
    assert not np.array_equal(command.pixels(before["path"]), command.pixels(after["path"]))
    ((sha256, weight),) = json.loads(command.recipe_inside(after["path"])["lora"])
    assert (len(sha256), weight) == (64, 0.5)
    assert "lora" not in command.recipe_inside(before["path"])


def test_a_run_goes_on_with_the_same_lora_file_only(generate, jsonl, lora, tmp_path):
    records, output = jsonl(PROMPTS), tmp_path / "out"
    generate(records, output, f"--lora={lora}")
    moved = lora.rename(tmp_path / "moved.safetensors")
    assert "1 there before" in generate(records, output, f"--lora={moved}").stdout
    for flag in (f"--lora={moved}:0.5", f"--lora={write(moved, 'other')}", "--seed=0"):
        refused = generate(records, output, flag, check=False)
        assert refused.status == 2
        assert "holds pictures of another recipe (lora was " in refused.stderr


def test_a_lora_file_that_does_not_fit_is_refused_before_anything_is_made(generate, jsonl, lora, tmp_path):
    save_file({"unet.x.lora_A.weight": np.zeros((2, 2), np.float32)}, lora)
    refused = generate(jsonl(PROMPTS), tmp_path / "out", f"--lora={lora}", check=False)
    assert (refused.status, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"lightmill: error: {lora}: none of its 1 keys belongs to a weight")
    assert not (tmp_path / "out").exists()
