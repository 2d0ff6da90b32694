"""What cannot work ends in one clear line and an exit status, before anything is made, and harms nothing."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_handlers import checkpoint as checkpoint_files
from model_handlers import handler
from tests import fakes
from tests.end_to_end import command
from tests.end_to_end.conftest import RECORDS


def the_error(finished: command.Finished, status: int) -> str:
    """The one line that a failed command says, beside those about its progress, and nothing else."""
    assert (finished.status, finished.stdout) == (status, "")
    lines = finished.stderr.splitlines()
    assert all(line.startswith("lightmill: ") for line in lines)
    (error,) = (line for line in lines if line.startswith("lightmill: error: "))
    return error.removeprefix("lightmill: error: ")


@pytest.fixture
def refused(generate, records_file, finished_output, tmp_path):
    """Runs what must be refused, into a finished output and into a new one: neither may change."""

    def run(*flags, files=records_file) -> str:
        before = command.everything(finished_output)
        line = the_error(generate(files, finished_output, *flags, check=False), 2)
        assert command.everything(finished_output) == before
        assert the_error(generate(files, tmp_path / "new", *flags, check=False), 2) == line
        assert not (tmp_path / "new").exists()
        return line

    return run


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.jsonl", None, "missing.jsonl: no such file"),
        ("*.jsonl", None, "*.jsonl: matches no file"),
        ("prompts.docx", b"x", "prompts.docx: not a known kind of file; known are .jsonl, "),
        ("table.csv", b"promt,seed\na cat,1\n", "no prompt column; columns found: promt, seed; name one with --prompt"),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00", "the compressed file is damaged"),
        ("wide.txt", "a cat".encode("utf-16"), "is UTF-16, as some Windows programs write it: save it as UTF-8"),
    ],
)
def test_an_input_that_cannot_be_read_is_named(name, content, complaint, refused, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert complaint in refused(files=tmp_path / name)


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--widht=32", "--widht is neither a flag of lightmill nor of Apache Beam; did you mean --width?"),
        ("--zzz", "--zzz is neither a flag of lightmill nor of Apache Beam"),
        ("--width=33", "--width must be a multiple of 2, not 33"),
        ("--height=-8", "--height: '-8' is not a whole number from 1 to 4096"),
        ("--num_inference_steps=2.5", "--num_inference_steps: '2.5' is not a whole number from 1 to 1000"),
        ("--seed=9223372036854775808", "--seed: '9223372036854775808' is not a whole number from 0 to"),
        ("--guidance_scale=nan", "--guidance_scale: 'nan' is not a number from 0 to 1000"),
        ("--mesh=chips=2", "--mesh: 'chips=2' in 'chips=2' is not one of data, fsdp, context, once, with a whole"),
        ("--mesh=data=2,fsdp=2", "--mesh=data=2,fsdp=2: the product must be the number of devices of a worker, 1"),
        ("--images_per_shard=6", "--images_per_shard must be a multiple of the batch of 4"),
        ("--dtype=float16", "--dtype: invalid choice: 'float16'"),
        ("--scheduler=DDIMScheduler2", "scheduler DDIMScheduler2 is not supported; --scheduler takes"),
        ("--checkpoint=no/such/folder", "no/such/folder: no such folder; --checkpoint takes a folder, gs://"),
        ("--eta=0.5", "no picture can be made: EulerDiscreteScheduler does not take eta, only DDIMScheduler, TCD"),
        ("--clip_skip=2", "no picture can be made: clip_skip must be from 0 to 1, not 2"),
        (
            "--timesteps=999,499,1",
            "num_inference_steps is 2, but timesteps or sigmas are for 3",
        ),
        ("--guidance_interval=5", "--guidance_interval: guidance_interval must be two numbers, such as 0.28,5.42"),
        ("--prompt_windows=3", "--prompt_windows needs --long_prompts=chunk"),
        ("--variant=fp16", "no weights (diffusion_pytorch_model|model.fp16.safetensors"),
    ],
)
def test_a_flag_that_cannot_work_is_named(flag, complaint, refused):
    assert complaint in refused(flag)


def test_a_command_without_its_files_says_what_is_missing():
    assert "the following arguments are required: --input, --output" in the_error(command.run("generate"), 2)
    assert "COMMAND" in the_error(command.run(), 2)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/lightmill"])
def test_an_output_that_cannot_be_written_is_named(place, generate, records_file, tmp_path):
    (tmp_path / "file").write_text("keep me")
    output = tmp_path / place  # an absolute place stays as it is
    line = the_error(generate(records_file, output, check=False), 2)
    assert line.startswith(f"--output {output} cannot be written: ")
    assert (tmp_path / "file").read_text() == "keep me"


def edit(path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def no_pickle(folder):
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / "diffusion_pytorch_model.bin")


def cut_short(folder):
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def another_tokenizer(folder):
    vocabulary = folder / "tokenizer" / "vocab.json"
    text = vocabulary.read_text().rstrip().removesuffix("}")
    vocabulary.write_text(text + ', "surplus": 70000, "more": 70001}')


BROKEN = {
    "without a tensor": (
        lambda folder: edit(
            folder / "unet" / "diffusion_pytorch_model.safetensors", lambda tensors: tensors.pop("conv_in.bias")
        ),
        "unet: the tensors do not fit the network; 1 missing: conv_in.bias",
    ),
    "with a tensor too many": (
        lambda folder: edit(
            folder / "vae" / "diffusion_pytorch_model.safetensors",
            lambda tensors: tensors.update(surplus=np.zeros(1, np.float32)),
        ),
        "vae: the tensors do not fit the network; 1 unused: surplus",
    ),
    "as a pickle": (no_pickle, "diffusion_pytorch_model.bin: a pickle can run code, so it is not read; convert it"),
    "cut short": (cut_short, "diffusion_pytorch_model.safetensors: not a readable safetensors file"),
    "without a vocabulary": (
        lambda folder: (folder / "tokenizer_2" / "vocab.json").unlink(),
        "tokenizer_2/vocab.json: no such file; a tokenizer is vocab.json and merges.txt",
    ),
    "with another tokenizer": (another_tokenizer, "but the text encoder's vocab_size is"),
    "of another family": (
        lambda folder: (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}'),
        "family 'FluxPipeline' is not supported, only FlaxStableDiffusionPipeline",
    ),
    "that is no checkpoint": (
        lambda folder: (folder / "model_index.json").unlink(),
        "model_index.json: no such file; a checkpoint is a folder in diffusers' layout",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_made(kind, refused, tiny_checkpoint, tmp_path):
    breaks, complaint = BROKEN[kind]
    breaks(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    assert complaint in refused(f"--checkpoint={tmp_path / 'checkpoint'}")


def test_a_tpu_that_is_not_there_stops_the_run_and_is_not_replaced_by_the_cpu(arguments, records_file, tmp_path):
    finished = command.run_process(*arguments(records_file, tmp_path / "out", "--device=tpu"))
    assert the_error(finished, 2).startswith("--device tpu: this machine has none that JAX can use")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_numbers_give_rejects_and_no_black_pictures(
    generate, records_file, tiny_checkpoint, tmp_path
):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    edit(
        checkpoint / "vae" / "diffusion_pytorch_model.safetensors",
        lambda tensors: tensors["decoder.conv_out.bias"].fill(np.nan),
    )
    finished = generate(
        records_file, tmp_path / "out", f"--checkpoint={checkpoint}", "--max_reject_fraction=0.5", check=False
    )
    assert finished.status == 3
    assert "100.0% rejected, more than --max_reject_fraction; reasons are in rejects/" in finished.stdout
    assert {reject["reason"] for reject in fakes.rejects(tmp_path / "out")} == {handler.NOT_FINITE}
    assert len(fakes.rejects(tmp_path / "out")) == len(RECORDS) == command.counts(tmp_path / "out")["rejected"]
    assert list(tmp_path.rglob("*.png")) == []


def test_one_poisoned_word_costs_its_own_records_and_no_other(generate, jsonl, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    vocabulary = checkpoint_files.read_json(checkpoint / "tokenizer" / "vocab.json")
    edit(
        checkpoint / "text_encoder" / "model.safetensors",
        lambda tensors: tensors["text_model.embeddings.token_embedding.weight"][vocabulary["ring</w>"]].fill(np.inf),
    )
    words = ["circle", "ring", "square", "circle", "triangle"]
    records = [{"id": f"{word} {number}", "prompt": f"a red {word}"} for number, word in enumerate(words)]
    generate(jsonl(records), tmp_path / "out", f"--checkpoint={checkpoint}")
    assert [reject["id"] for reject in fakes.rejects(tmp_path / "out")] == ["ring 1"]
    assert {row["id"] for row in fakes.rows(tmp_path / "out")} == {
        "circle 0", "square 2", "circle 3", "triangle 4",
    }  # fmt: skip


def test_a_run_that_fails_underway_is_one_line_and_goes_on(generate, jsonl, tmp_path, monkeypatch):
    def breaks(*_):
        raise RuntimeError("the device caught fire")

    records = jsonl([{"prompt": "a"}, {"prompt": "b"}])
    with monkeypatch.context() as patch:
        patch.setattr(handler, "_fetch", breaks)
        line = the_error(generate(records, tmp_path / "out", check=False), 1)
    assert "the device caught fire" in line and line.endswith("the same command goes on from the last finished shard")
    generate(records, tmp_path / "out")
    assert command.counts(tmp_path / "out")["written"] == 2


def test_a_worker_that_died_is_said_to_have_died(generate, jsonl, tmp_path, monkeypatch):
    def dies(*_):
        raise RuntimeError("Channel closed prematurely.")  # what Beam says

    monkeypatch.setattr("apache_beam.Pipeline.run", dies)
    line = the_error(generate(jsonl([{"prompt": "a"}]), tmp_path / "out", check=False), 1)
    assert line.startswith("a worker's process ended in the middle of its work: killed, or out of memory; ")
