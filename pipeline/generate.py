"""The job's graph: prompts in, images out."""

from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, PredictionResult, RunInference

from model_handlers.recipe import Recipe, Shard
from model_handlers.sampling import Sampler
from transforms.counts import WriteCounts
from transforms.formats import FOLDER_OF_PNG, OutputFormat
from transforms.leftovers import clear_leftovers
from transforms.read import ReadPrompts
from transforms.rejects import WriteRejects, clear_input_rejects
from transforms.requests import ExpandRequests
from transforms.resume import SkipFinished
from transforms.shards import GroupIntoShards
from transforms.write import WriteShard, WrittenShard


def build(
    pipeline: beam.Pipeline,
    *,
    patterns: Sequence[str],
    output: str,
    recipe: Recipe,
    sampler: Sampler,
    model_handler: ModelHandler[Shard, PredictionResult, Any],
    batch_size: int,
    images_per_shard: int,
    output_format: OutputFormat = FOLDER_OF_PNG,
    retry_rejected: bool = False,
    prompt_column: str | None = None,
    id_column: str | None = None,
) -> None:
    """Adds the graph to a pipeline.

    Args:
      patterns: input files, local or gs://, with Beam's wildcards.
      output: folder or gs://bucket/folder. It belongs to one run at a time; call `prepare` before the run.
      sampler: the model's, by which records are checked and grouped before they reach it.
      model_handler: takes shards in batches of exactly one, and gives PredictionResult(shard, iterable of ImageResult).
      batch_size: rows of the compiled program over all chips of a worker.
      images_per_shard: images that are committed together, a multiple of batch_size.
      output_format: how pictures and metadata are stored.
      retry_rejected: whether to try again what the model rejected in an earlier run.
      prompt_column, id_column: columns of the input, if they are not called as usual.

    Raises:
      InputError: if an input cannot be read.
    """
    read = pipeline | "ReadPrompts" >> ReadPrompts(patterns, prompt_column, id_column)
    expanded = read.records | "ExpandRequests" >> ExpandRequests(recipe, sampler)
    unfinished = expanded.requests | "SkipFinished" >> SkipFinished(output, retry_rejected)
    grouped = unfinished.requests | "GroupIntoShards" >> GroupIntoShards(batch_size, images_per_shard, sampler)
    # With the type, for its coder.
    inference = RunInference(model_handler).with_output_types(PredictionResult)
    predictions = grouped.shards | "RunInference" >> inference
    written = predictions | "WriteShard" >> WriteShard(output, recipe, output_format)

    rejects = (read.rejects, expanded.rejects) | "Rejects" >> beam.Flatten()
    rejects | "WriteRejects" >> WriteRejects(output)

    fates = (
        read.fates,
        rejects | "CountRejects" >> beam.Map(lambda _: ("records_rejected", 1)),
        expanded.fates,
        unfinished.fates,
        grouped.fates,
        written | "CountWritten" >> beam.FlatMap(_fates),
    ) | "Fates" >> beam.Flatten()
    fates | "WriteCounts" >> WriteCounts(output)


def prepare(output: str) -> None:
    """Clears away what an earlier run left unfinished; to be called before each run, while nothing writes there."""
    clear_leftovers(output)
    clear_input_rejects(output)


def _fates(shard: WrittenShard) -> list[tuple[str, int]]:
    return [(name, getattr(shard, name)) for name in ("written", "rejected", "truncated", "unknown_words")]
