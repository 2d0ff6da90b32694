"""One run of `generate`: check everything that can be checked, build the graph, watch it, account for it."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import jax
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineState

from model_handlers import checkpoint, fetch
from model_handlers.checkpoint import CheckpointError
from model_handlers.config import ConfigError
from model_handlers.families import family_of
from model_handlers.handler import DiffusionModelHandler, ModelSpec
from model_handlers.lora import Adapter
from model_handlers.mesh import MeshError
from model_handlers.recipe import Recipe, Settings
from model_handlers.sampling import Sampler
from pipeline import report, unchanged
from pipeline.again import model_flags_of
from pipeline.dataflow import is_template, settle_workers
from pipeline.generate import build, prepare
from pipeline.lock import hold
from pipeline.options import WINDOWS, GenerateOptions, ModelOptions, UsageError
from pipeline.output import find_output, write_recipe
from pipeline.presets import settle_sampling
from pipeline.throughput import describe, measured, throughput
from pipeline.watch import watch
from pipeline.workers import Worker
from transforms import storage
from transforms.commits import CommitError
from transforms.counts import AccountingError, Counts, read_counts
from transforms.formats import OutputFormat
from transforms.read import InputError
from transforms.records import PromptRecord, RecordError
from transforms.requests import OF_REFINER, expand

IMAGES_PER_SHARD = 64  # about 200 MB of pixels at 1024 x 1024, and some tens of seconds of work to lose
GO_ON = "the same command goes on from the last finished shard"
WORKER_LOST = "a worker's process ended in the middle of its work: killed, or out of memory"


class JobError(RuntimeError):
    """The job failed after it had begun; what it had committed stays, and the same command goes on."""


def generate(options: GenerateOptions, beam_options: PipelineOptions) -> int:
    """Runs the job and returns its exit status, see `options.EXIT_STATUS`.

    Raises:
      UsageError: something that the user gave cannot work; nothing was made.
      JobError: the job failed underway.
    """
    try:
        worker = settle_workers(options, beam_options)
        spec, recipe, sampler = _resolve_model(options, worker)
        batch_size = spec.per_device_batch_size * spec.mesh.rows(worker.devices)
        output_format = _output_format(options)
        output = find_output(options.output, recipe, output_format, options.on_recipe_change)
        pipeline = _pipeline(beam_options)
        build(
            pipeline,
            patterns=options.input,
            output=output.path,
            recipe=recipe,
            sampler=sampler,
            model_handler=DiffusionModelHandler(spec),
            batch_size=batch_size,
            images_per_shard=_images_per_shard(options, batch_size),
            output_format=output_format,
            retry_rejected=options.retry_rejected,
            prompt_column=options.prompt_column,
            id_column=options.id_column,
        )
    except (CheckpointError, ConfigError, CommitError, InputError, MeshError) as error:
        raise UsageError(str(error)) from error
    if output.new:
        write_recipe(output.path, recipe, output_format)
    try:
        with hold(output.path):
            if is_template(beam_options):
                return _describe(pipeline, output.path)
            started = time.monotonic()
            inputs = unchanged.inputs_hash(options.input, options.prompt_column, options.id_column)
            summary = unchanged.still_finished(output.path, inputs, options.retry_rejected)
            if not summary:
                values = _run(pipeline, output.path)
                seconds = time.monotonic() - started
                run = {
                    "seconds": round(seconds, 1),
                    "inputs": inputs,
                    "shards": unchanged.shards_hash(output.path),
                    "model_flags": model_flags_of(options),
                    **throughput(read_counts(output.path).written, seconds, values, options.price_per_hour),
                    **values,
                }
                summary = report.write_report(output.path, run, output.fresh, output_format, recipe)
            seconds = time.monotonic() - started
    except (AccountingError, CommitError, OSError) as error:
        raise JobError(str(error)) from error
    return _conclude(options, output.path, summary, seconds)


def _run(pipeline: beam.Pipeline, output: str) -> dict[str, float]:
    """Runs the graph to its end and gives what was measured."""
    with _failing_in_one_line():
        prepare(output)
        with watch() as follow:
            result = pipeline.run()
            follow(result)
            state = result.wait_until_finish()
        values = measured(result)
    if state != PipelineState.DONE:
        raise JobError(f"the job ended as {state}; {GO_ON}")
    return values


def _describe(pipeline: beam.Pipeline, output: str) -> int:
    """Only writes the job's description: the launcher of a Flex Template submits it after this program has ended."""
    with _failing_in_one_line():
        prepare(output)
        pipeline.run()
    print(f"The job is described and not run yet; when it has ended, `lightmill verify {output}` accounts for it.")
    return 0


@contextlib.contextmanager
def _failing_in_one_line() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever failed, on whichever runner, the user gets one line
        raise JobError(f"{_cause(error)}; {GO_ON}") from error


def _resolve_model(options: GenerateOptions, worker: Worker) -> tuple[ModelSpec, Recipe, Sampler]:
    """Reads everything of the checkpoint but its weights, whose names it checks, and settles the recipe."""
    root = fetch.checkpoint_folder(options.checkpoint, options.variant, options.config)
    sampling = settle_sampling(options)
    refiner = fetch.checkpoint_folder(options.refiner, options.variant) if options.refiner else None
    adapters = tuple(Adapter.find(source, weight, options.allow_partial_lora) for source, weight in options.lora)
    family_of(root).check(root, options.variant, sampling.scheduler, sampling.scheduler_options, adapters, refiner)
    recipe, sampler = settle_recipe(
        options,
        root,
        checkpoint=checkpoint.identity(root, options.variant),
        device=worker.device or jax.default_backend(),
        per_device_batch_size=options.per_device_batch_size,
        lora=json.dumps([[adapter.sha256, adapter.weight] for adapter in adapters]),
        refiner=refiner,
        refiner_identity=checkpoint.identity(refiner, options.variant) if refiner else "",
    )
    spec = ModelSpec(
        checkpoint=options.checkpoint,
        identity=recipe.checkpoint,
        scheduler=recipe.scheduler,
        scheduler_options=recipe.scheduler_options,
        prompt_windows=recipe.prompt_windows,
        dtype=recipe.dtype,
        per_device_batch_size=recipe.per_device_batch_size,
        variant=options.variant,
        config=options.config,
        device=worker.device,
        environment=tuple(worker.environment.items()),
        jax_cache_dir=options.jax_cache_dir,
        adapters=adapters,
        executables=options.executables,
        mesh=options.mesh,
        offload_encoders=options.offload_encoders,
        refiner=options.refiner,
        refiner_identity=recipe.refiner,
    )
    return spec, recipe, sampler


def settle_recipe(
    options: ModelOptions,
    root: Path,
    *,
    checkpoint: str,
    device: str,
    per_device_batch_size: int,
    lora: str = "[]",
    refiner: Path | None = None,
    refiner_identity: str = "",
) -> tuple[Recipe, Sampler]:
    """The recipe of the flags and of a checkpoint folder's configs, and its sampler.

    Args:
      checkpoint, per_device_batch_size, lora: as in the recipe.
      refiner, refiner_identity: the refiner's folder, and what the recipe calls it.
      device: which decides what --dtype=auto is.

    Raises:
      UsageError: no picture can be made with these settings.
      CheckpointError, ConfigError: the checkpoint is not supported.
    """
    sampling = settle_sampling(options)
    description = family_of(root).describe(root, sampling.scheduler, sampling.scheduler_options, refiner)
    width, height = options.width or description.side, options.height or description.side
    context = options.mesh.context
    height_multiple = description.coarsest * context if context > 1 else description.size_multiple
    for name, value, multiple in (("width", width, description.size_multiple), ("height", height, height_multiple)):
        if value % multiple:
            raise UsageError(f"--{name} must be a multiple of {multiple}, not {value}")
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    recipe = Recipe(
        checkpoint=checkpoint,
        family=description.family,
        scheduler=description.scheduler,
        dtype=dtype,
        per_device_batch_size=per_device_batch_size,
        size_multiple=description.size_multiple,
        seed=options.seed,
        width=width,
        height=height,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        negative_prompt=options.negative_prompt,
        num_images_per_prompt=options.num_images_per_prompt,
        scheduler_options=sampling.scheduler_options,
        lora=lora,
        prompt_windows=_prompt_windows(options),
        max_clip_skip=description.max_clip_skip,
        context=context,
        height_multiple=height_multiple,
        settings=_settings(options),
        refiner=refiner_identity,
    )
    _check_defaults(options, recipe, description.sampler)
    return recipe, description.sampler


def _prompt_windows(options: ModelOptions) -> int:
    if options.long_prompts == "chunk":
        return options.prompt_windows or WINDOWS
    if options.prompt_windows:
        raise UsageError("--prompt_windows needs --long_prompts=chunk")
    return 1


def _settings(options: ModelOptions) -> str:
    if not getattr(options, "refiner", None) and (
        given := [name for name in OF_REFINER if getattr(options, name) is not None]
    ):
        raise UsageError(f"--{given[0]} needs --refiner")
    values = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(Settings)}
    settings = Settings.of({name: value for name, value in values.items() if value is not None})
    return json.dumps(settings.chosen, sort_keys=True)


def _check_defaults(options: ModelOptions, recipe: Recipe, sampler: Sampler) -> None:
    """What the run asks for on behalf of records that set nothing must be possible; UsageError if it is not."""
    record = PromptRecord("", 1, "", "")
    if options.num_inference_steps is not None:
        record.fields["num_inference_steps"] = options.num_inference_steps
    try:
        expand(record, recipe, sampler)
    except RecordError as error:
        raise UsageError(f"with these settings no picture can be made: {error}") from error


def _images_per_shard(options: GenerateOptions, batch_size: int) -> int:
    if options.images_per_shard is None:
        return -(-IMAGES_PER_SHARD // batch_size) * batch_size
    if options.images_per_shard % batch_size:
        raise UsageError(f"--images_per_shard must be a multiple of the batch of {batch_size}, or be left out")
    return options.images_per_shard


def _output_format(options: GenerateOptions) -> OutputFormat:
    try:
        return OutputFormat(options.format, options.image_format, options.image_quality)
    except ValueError as error:
        raise UsageError(f"--image_quality: {error}") from error


def _pipeline(options: PipelineOptions) -> beam.Pipeline:
    try:
        # DirectRunner would end here too, after an attempt to download another runner.
        return beam.Pipeline(options.view_as(StandardOptions).runner or FnApiRunner(), options)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error


def _cause(error: Exception) -> str:
    """The one line that says what went wrong: Beam wraps it in the tracebacks of its workers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("File ", "Traceback", "[while running", "^", "~"))]
    cause = (lines[-1] if lines else type(error).__name__).split(" [while running")[0]
    return WORKER_LOST if cause == "Channel closed prematurely." else cause


def _conclude(options: GenerateOptions, output: str, summary: dict[str, Any], seconds: float) -> int:
    counts = Counts(**summary["counts"])
    rejected = counts.records_rejected + counts.rejected + counts.rejected_before
    total = counts.records_rejected + counts.images_requested
    print(
        f"{counts.records_read:,} records: {counts.written:,} images written in {seconds:,.1f} s, "
        f"{counts.finished_before:,} there before, {counts.duplicates:,} duplicates, {rejected:,} rejected; "
        f"see {Path(output) / 'index.html' if storage.is_local(output) else output}"
    )
    if speed := describe(summary["run"]):
        print(speed)
    if options.checkpoint == fetch.EMBEDDED:
        print("Drawn by the built-in demonstration model of a few coloured shapes; --checkpoint names a real one.")
    if counts.unknown_words:
        print(
            f"{counts.unknown_words:,} prompts have words the model does not know; see unknown_words in the metadata."
        )
    if total and rejected / total > options.max_reject_fraction:
        print(f"{rejected / total:.1%} rejected, more than --max_reject_fraction; reasons are in rejects/")
        return 3
    return 0
