"""`lightmill plan`: what it counts, what it says, and what it saves is what `generate` loads."""

import dataclasses
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from model_handlers import program, topologies
from pipeline import plan as plan_module
from pipeline.options import PlanOptions
from pipeline.workers import TPUS
from tests.end_to_end import command
from tests.topologies import needs_libtpu

RECORDS = [
    {"id": "a", "prompt": "a red circle", "num_images_per_prompt": 3},
    {"id": "b", "prompt": "a red circle", "guidance_scale": 1},
    {"id": "c", "prompt": "a red circle", "num_inference_steps": 7, "guidance_interval": [1, 5]},
    {"id": "d", "prompt": "a red circle", "width": 24, "num_inference_steps": 1},
    {"id": "a", "prompt": "a red circle", "num_images_per_prompt": 3},
    {"id": "e", "prompt": "a red circle", "width": 23},
    {"id": "f", "prompt": 42},
]


def tiny_program(networks, inputs, loop, *, height, width):
    """In the place of the model's program, one that is compiled in a moment."""
    batch = len(inputs.seeds)
    return jnp.zeros((batch, height, width, 3), jnp.uint8), jnp.ones(batch, bool)


@pytest.fixture
def plan(tiny_checkpoint):
    """Runs `plan` and gives what it prints."""

    def run(*flags):
        finished = command.run("plan", f"--checkpoint={tiny_checkpoint}", "--width=32", "--height=32", *flags)
        assert finished.status == 0, finished.stderr
        return finished.stdout

    return run


def test_the_input_is_counted_as_it_would_be_made(plan, jsonl, monkeypatch):
    monkeypatch.setattr(program, "generate", tiny_program)
    flags = ("--num_inference_steps=2", "--per_device_batch_size=2")
    lines = plan("--topology=cpu", "--input", jsonl(RECORDS), *flags).splitlines()
    assert lines[1].endswith("input.jsonl: 6 images, 3 duplicates, 2 records rejected")
    # Three of two steps and two passes, one of two steps and one, one of seven steps of which three are guided.
    assert lines[2] == "  5 of 32 x 32 pixels: on average 3.0 steps, 4.8 evaluations of the UNet each"
    assert lines[3] == "  1 of 24 x 32 pixels: on average 1.0 steps, 2.0 evaluations of the UNet each"
    header, *rows = [line.split() for line in lines if line.startswith(("batch", "    2"))]
    assert header == ["batch", "pixels", "arguments", "temporaries", "outputs", "code", "TFLOP", "GB"]
    assert [row[:4] for row in rows] == [["2", "32", "x", "32"], ["2", "24", "x", "32"]]
    assert lines[-1] == "Which batch is best cannot be told for a CPU."


def test_what_a_plan_saved_is_loaded_and_draws_the_same_pictures(plan, arguments, jsonl, tmp_path):
    settings, saved = ["--per_device_batch_size=2"], tmp_path / "executables"
    assert f"give --executables={saved} to `generate`" in plan("--topology=cpu", *settings, f"--save={saved}")
    records = jsonl(RECORDS[:1])
    loaded = command.run(*arguments(records, tmp_path / "loaded", *settings, f"--executables={saved}"))
    assert "loaded program 1" in loaded.stderr and "compiled program" not in loaded.stderr
    compiled = command.run(*arguments(records, tmp_path / "compiled", *settings))
    assert "compiled program 1" in compiled.stderr
    assert command.hashes(tmp_path / "loaded") == command.hashes(tmp_path / "compiled")


def test_a_plan_reads_configs_only(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "generate", tiny_program)
    ignore = shutil.ignore_patterns("*.safetensors", "tokenizer*")
    root = shutil.copytree(tiny_checkpoint, tmp_path / "configs", ignore=ignore)
    for flags in ([root], ["nowhere/model.safetensors", "--config", root]):
        finished = command.run("plan", "--topology=cpu", "--per_device_batch_size=1", "--checkpoint", *flags)
        assert finished.status == 0, finished.stderr


def test_the_help_names_every_flag():
    finished = command.run("plan", "--help")
    assert finished.status == 0
    for field in dataclasses.fields(PlanOptions):
        assert f"--{field.name}" in finished.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --tpu --topology is required"),
        (["--topology=v9:2x2"], "v9:2x2: a topology is cpu, or one of v5e, v5p, v6e with its sides, as v5e:2x2"),
        (
            ["--topology=cpu", "--price_per_chip_hour=1"],
            "--price_per_chip_hour: there are no estimates of time for a CPU",
        ),
        (["--topology=cpu", "--width=33"], "--width must be a multiple of 2, not 33"),
        (["--topology=cpu", "--mesh=context=2"], "--mesh=context=2: the product must be the number of devices of a"),
        (["--topology=cpu", "--checkpoint=nowhere"], "nowhere: no such folder"),
        (["--topology=cpu", "--input=nowhere.txt"], "nowhere.txt: no such file"),
        (["--topology=cpu", "--guidance_interval=5,1"], "with these settings no picture can be made"),
    ],
)
def test_what_cannot_be_planned_is_one_line(flags, message, tiny_checkpoint):
    finished = command.run("plan", f"--checkpoint={tiny_checkpoint}", *flags)
    assert finished.status == 2
    assert len(finished.stderr.splitlines()) == 1 and message in finished.stderr


def test_without_libtpu_a_plan_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    finished = command.run("plan", "--tpu=v5e-4")
    assert finished.status == 2
    assert finished.stderr == (
        "lightmill: error: v5e:2x2: the compiler for TPUs is not installed: pip install 'lightmill[tpu]'\n"
    )


@needs_libtpu
@pytest.mark.parametrize("name", TPUS)
def test_every_tpu_of_the_table_has_a_topology_with_as_many_chips(name):
    devices = topologies.devices_of(TPUS[name].topology)
    assert len(devices) == TPUS[name].devices
    assert {device.platform for device in devices} == {"tpu"}


@needs_libtpu
def test_a_batch_that_does_not_fit_is_a_row_and_the_best_of_the_others_is_chosen(plan, jsonl, monkeypatch):
    """With products of which libtpu finds that they do not fit, in the place of the model's."""

    def products(networks, inputs, loop, *, height, width):
        side = 2**15
        square = inputs.seeds[:, :1, None] + jax.lax.iota(jnp.uint32, side)[:, None] * jax.lax.iota(jnp.uint32, side)
        square = square.astype(jnp.bfloat16)  # 2 GB a row
        product = square @ square @ square
        images, finite = tiny_program(networks, inputs, loop, height=height, width=width)
        return images, finite & jnp.isfinite(product).all((1, 2))

    monkeypatch.setattr(program, "generate", products)
    flags = ("--per_device_batch_size", 1, 64, "--price_per_chip_hour=1.2")
    lines = plan("--tpu=v5e-4", "--input", jsonl(RECORDS[1:2]), *flags).splitlines()
    (header,) = [line.split() for line in lines if line.startswith("batch  ")]
    assert header[-7:] == ["left", "over", "TFLOP", "GB", "seconds", "floor", "images/hour/chip", "1,000", "cost"][-7:]
    (row,) = [line for line in lines if line.endswith("does not fit")]
    assert row.split()[0] == "64"
    assert any(line.startswith("batch 64, 32 x 32: Ran out of memory") for line in lines)
    assert plan_module.NOT_RUN in lines
    best, total = lines[-2:]
    # Two products of 2^15 on each side, at 197 TFLOP/s.
    hours = 4 * 2**45 / 197e12 / 3600
    found = float(re.search(r"[(]?([\d,]+) images an hour and chip", best)[1].replace(",", ""))
    assert best.startswith("Best: --per_device_batch_size=1, ") and found == pytest.approx(1 / hours, rel=0.2)
    assert re.fullmatch(r"All of the input: [\d.e-]+ chip-hours, [\d.e-]+ h on 4 chip\(s\), for [\d.e-]+\.", total)
