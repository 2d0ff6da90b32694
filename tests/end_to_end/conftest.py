"""One small checkpoint, one compilation cache and one finished run for all tests of this folder."""

import functools
import random
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.end_to_end import command
from tests.fakes import write_jsonl

PROMPTS = ("a red circle left of a blue square", "a green star", "a purple triangle above a black square", "")
# Of every kind: with and without seed, negative prompt, guidance and its interval; different steps side by side.
RECORDS = [
    {
        "id": f"r{number}",
        "prompt": PROMPTS[number % 4],
        **({"seed": number} if number % 3 else {}),
        **({"negative_prompt": ["", "a zebra"][number % 2]} if number % 4 > 1 else {}),
        **({"guidance_scale": [0, 1, 7.5][number % 3]} if number % 5 else {}),
        **({"num_inference_steps": 1 + number % 4} if number % 2 else {}),
        **({"guidance_interval": [0.5, 20]} if number % 7 == 2 else {}),
    }
    for number in range(22)
]


@pytest.fixture(scope="session")
def jax_cache_dir(tmp_path_factory):
    """A compilation cache of JAX for all runs, which makes every run but the first of a shape start in a moment."""
    folder = tmp_path_factory.mktemp("jax_cache")
    compilation_cache.reset_cache()  # else JAX stays with what it decided at the first compilation of this process
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def arguments(tiny_checkpoint, jax_cache_dir):
    """Gives the arguments of a quick `generate`; flags that are added at the end win over those that stand here."""

    def make(files, output, *flags) -> list[object]:
        files = files if isinstance(files, list) else [files]
        settings = {
            "checkpoint": tiny_checkpoint,
            "jax_cache_dir": jax_cache_dir,
            "width": 32,
            "height": 32,
            "num_inference_steps": 2,
        }
        given = [f"--{name}={value}" for name, value in settings.items()]
        return ["generate", "--input", *files, "--output", output, *given, *flags]

    return make


@pytest.fixture(scope="session")
def generate(arguments) -> command.Generate:
    """Runs `generate` in this process: input, output, more flags; `check` says that it has to succeed."""

    def run(files, output, *flags, check=True) -> command.Finished:
        finished = command.run(*arguments(files, output, *flags))
        assert finished.status == 0 or not check, finished.stderr
        return finished

    return run


@pytest.fixture(scope="session")
def records_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("input") / "records.jsonl", RECORDS)


@pytest.fixture(scope="session")
def finished_output(generate, records_file, tmp_path_factory) -> Path:
    """The output of a run over RECORDS in the order of the file; not to be changed."""
    output = tmp_path_factory.mktemp("finished") / "out"
    generate(records_file, output)
    return output


@pytest.fixture(scope="session")
def expected(finished_output) -> dict[tuple[str, int], str]:
    """The hash of each picture of RECORDS."""
    return command.hashes(finished_output)


@pytest.fixture(scope="session")
def shuffled() -> list[dict]:
    return random.Random(1).sample(RECORDS, len(RECORDS))


@pytest.fixture
def jsonl(tmp_path):
    """Writes records to a file of this test."""
    return functools.partial(write_jsonl, tmp_path / "input.jsonl")
