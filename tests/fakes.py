"""Stand-ins for the model and for files of prompts."""

import hashlib
import json
from pathlib import Path

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult
from apache_beam.testing.test_pipeline import TestPipeline

from model_handlers.recipe import ImageRequest, ImageResult, Recipe, Shard
from model_handlers.samplers.karras import EulerDiscreteConfig
from pipeline import generate

RECIPE = Recipe(
    checkpoint="c" * 64,
    family="StableDiffusionXLPipeline",
    scheduler="EulerDiscreteScheduler",
    dtype="float32",
    per_device_batch_size=4,
    size_multiple=8,
    seed=0,
    width=8,
    height=8,
    max_clip_skip=2,
)
SAMPLER = (EulerDiscreteConfig(),)


def painted(digest: str, height: int, width: int) -> np.ndarray:
    """The picture that the fake model makes of a request: bytes that no other digest gives."""
    stream = hashlib.shake_256(digest.encode()).digest(height * width * 3)
    return np.frombuffer(stream, np.uint8).reshape(height, width, 3)


class FakeHandler(ModelHandler[Shard, PredictionResult, object]):
    """Paints each request's digest, and takes no more than one shard at a time.

    Args:
      rejected: prompts that the model cannot draw.
      answer: takes the results of a shard and gives those that are returned.
    """

    def __init__(self, rejected=(), answer=None):
        super().__init__(min_batch_size=1, max_batch_size=1)
        self._rejected = frozenset(rejected)
        self._answer = answer or (lambda results: results)

    def load_model(self):
        return _Weights()

    def run_inference(self, batch, model, inference_args=None):
        (shard,) = batch
        yield PredictionResult(shard, self._answer([self._draw(request) for request in shard.requests]))

    def _draw(self, request: ImageRequest) -> ImageResult:
        if request.prompt in self._rejected:
            return ImageResult(request.key, None, "the latents are not finite")
        image = painted(request.digest, request.height, request.width)
        return ImageResult(request.key, image, num_tokens=5, truncated=len(request.prompt) > 300)


class _Weights:
    """Beam holds models by weak references, which a plain object() does not take."""


def run(
    inputs,
    output,
    handler=None,
    recipe=RECIPE,
    images_per_shard=4,
    batch_size=4,
    fresh_start=True,
    options=None,
    runner=None,
    **settings,
) -> PipelineResult:
    """Runs the whole graph on the fake model, in this process unless options and runner say otherwise."""
    if fresh_start:
        generate.prepare(str(output))
    with TestPipeline(runner or FnApiRunner(), options=options) as pipeline:
        generate.build(
            pipeline,
            patterns=[str(path) for path in ([inputs] if isinstance(inputs, str | Path) else inputs)],
            output=str(output),
            recipe=recipe,
            sampler=SAMPLER,
            model_handler=handler or FakeHandler(),
            batch_size=batch_size,
            images_per_shard=images_per_shard,
            **settings,
        )
    return pipeline.result


def collect(build) -> dict[str, list]:
    """Runs a small pipeline, and gives the elements of its tagged outputs."""
    _collected.clear()
    with TestPipeline(runner=FnApiRunner()) as pipeline:
        outputs = build(pipeline)
        for tag in (outputs._main_tag, *outputs._tags):
            outputs[tag] | f"Collect {tag}" >> beam.Map(_collect, tag)
    return {tag: [element for other, element in _collected if other == tag] for tag, _ in _collected}


# Of the module and not of a closure: closures are copied when a pipeline is pickled.
_collected: list[tuple[str, object]] = []


def _collect(element, tag):
    _collected.append((tag, element))


def write_jsonl(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows(output) -> list[dict]:
    """All rows of metadata, each with the path of its image as `path`."""
    return [
        {**json.loads(line), "path": file.parent / json.loads(line)["file_name"]}
        for file in sorted(Path(output).glob("images/*/metadata.jsonl"))
        for line in file.read_text().splitlines()
    ]


def rejects(output) -> list[dict]:
    return [
        json.loads(line)
        for file in sorted(Path(output).glob("rejects/*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def tree(output) -> dict[str, bytes]:
    """Every file of an output but those that describe the last run, with its bytes."""
    of_the_run = {"counts.json", "summary.json", "index.html"}
    return {
        str(file.relative_to(output)): file.read_bytes()
        for file in sorted(Path(output).rglob("*"))
        if file.is_file() and file.name not in of_the_run
    }
