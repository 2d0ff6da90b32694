"""Beam's side of the model: RunInference elements are whole shards, and one process holds one model.

A shard goes through the device as batches of one fixed shape. The device call is serialised, and the next batch is
started before the last one is fetched, so that the device does not wait for the host.
"""

import collections
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from model_handlers import checkpoint, fetch, mesh, metrics
from model_handlers.families import family_of
from model_handlers.lora import Adapter
from model_handlers.mesh import ALL_ON_DATA, MeshShape
from model_handlers.program import CompileError, Programs
from model_handlers.recipe import ImageRequest, ImageResult, Shard
from model_handlers.stable_diffusion.model import TEXT_ENCODERS

log = logging.getLogger("lightmill")

# Statuses of the runtime that pass by themselves: a device or a host of a slice that is being moved.
TRANSIENT = ("UNAVAILABLE", "ABORTED", "CANCELLED")
RETRY_DELAYS = (1.0, 4.0, 16.0)  # seconds
# What became of a batch: its results, or the error of the call.
Outcome = list[ImageResult] | Exception
NOT_FINITE = "the model gave numbers that are not finite (NaN or infinity) for this record"


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Which model a worker loads, and how; small and picklable, so it travels to the workers.

    Attributes:
      checkpoint: folder, gs:// folder, hub id or single file.
      config: where a single file's configs and tokenizers are.
      identity: what `checkpoint.identity` must find there: another would be another recipe.
      scheduler, dtype, per_device_batch_size, scheduler_options, prompt_windows: as in the recipe.
      variant: infix of the weight files, such as "fp16".
      device: "tpu", "gpu" or "cpu", which must then be there; None takes the best that JAX finds.
      jax_cache_dir: folder or gs:// folder of JAX's persistent compilation cache.
      executables: folder or gs:// folder of programs that were compiled before, see `executables`.
      mesh: how the chips share the work.
      offload_encoders: whether the text encoders stay in the host's memory, for as long as no prompt is read.
      adapters: LoRA files to merge into it.
      refiner, refiner_identity: of the checkpoint that ends what this one begins, as `checkpoint` and `identity`.
      environment: variables that the device's driver reads when it starts, as pairs.
    """

    checkpoint: str
    identity: str
    scheduler: str
    dtype: str
    per_device_batch_size: int
    variant: str | None = None
    device: str | None = None
    jax_cache_dir: str | None = None
    scheduler_options: str = "{}"
    config: str | None = None
    adapters: tuple[Adapter, ...] = ()
    prompt_windows: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    executables: str | None = None
    mesh: MeshShape = ALL_ON_DATA
    offload_encoders: bool = False
    refiner: str | None = None
    refiner_identity: str = ""


class LoadedModel:
    """What `load_model` returns: the programs, and the lock that makes calls to the device one at a time."""

    def __init__(self, programs: Programs):
        self.programs = programs
        self.lock = threading.Lock()


class LazyResults(Iterable[ImageResult]):
    """Results that are made while they are read: whoever reads has each batch before the shard is done.

    Read again, or pickled on the way to a step that is not fused with RunInference, it is all of them.
    """

    def __init__(self, results: Iterator[ImageResult]):
        self._made: list[ImageResult] = []
        self._rest = results

    def __iter__(self) -> Iterator[ImageResult]:
        yield from self._made
        for result in self._rest:
            self._made.append(result)
            yield result

    def __reduce__(self):
        return list, (list(self),)


class DiffusionModelHandler(ModelHandler[Shard, PredictionResult, LoadedModel]):
    """Generates shards: RunInference's example is a Shard, its inference one ImageResult a request, in any order.

    The device works when the results are read, so that the next step has pictures to encode meanwhile.
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self._spec = spec

    def load_model(self) -> LoadedModel:
        """Loads the checkpoint onto all local devices.

        Programs are compiled when the first shard of a size arrives: only then is it known which sizes occur.

        Raises:
          CheckpointError, ConfigError: the checkpoint does not fit, or is not the one of the recipe.
          RuntimeError: the device asked for is not there.
        """
        return LoadedModel(load_programs(self._spec))

    def run_inference(
        self, batch: Sequence[Shard], model: LoadedModel, inference_args: Mapping[str, Any] | None = None
    ) -> Iterable[PredictionResult]:
        """Generates shards, each when its results are read.

        A request whose batch fails is retried among ever fewer neighbours, at the same shape, until it is alone;
        one that fails alone becomes a rejected result. If every request of a shard fails it is not the requests'
        fault, and the error goes to the runner.
        """
        for shard in batch:
            yield PredictionResult(shard, LazyResults(_generate(shard, model)))

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        # A shard is a batch already; Beam's batching would depend on how bundles fall.
        return {"min_batch_size": 1, "max_batch_size": 1}

    def get_metrics_namespace(self) -> str:
        return metrics.NAMESPACE


def load_programs(spec: ModelSpec) -> Programs:
    """Loads a checkpoint onto the local devices and returns its `Programs`; errors as `load_model`."""
    # Here and not in the image, so that one image serves every kind of TPU.
    os.environ.update(spec.environment)
    if spec.device:
        # Otherwise JAX settles for the CPU, with a warning, if the accelerator is missing or busy.
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(spec.device, spec.device))
    if spec.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", spec.jax_cache_dir)
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise RuntimeError(f"this worker has no usable {spec.device or 'device'} ({error})") from error
    if spec.device and devices[0].platform != spec.device:  # JAX had started before and does not look again
        raise RuntimeError(f"this worker has no usable {spec.device} (JAX runs on {devices[0].platform} already)")
    root = _folder(spec.checkpoint, spec.variant, spec.config, spec.identity)
    refiner = _folder(spec.refiner, spec.variant, None, spec.refiner_identity) if spec.refiner else None
    devices_mesh = mesh.make_mesh(devices, spec.mesh)
    model = family_of(root).load(
        root,
        scheduler=spec.scheduler,
        scheduler_options=spec.scheduler_options,
        prompt_windows=spec.prompt_windows,
        dtype=spec.dtype,
        place=mesh.of_weights(devices_mesh, TEXT_ENCODERS if spec.offload_encoders else ()),
        variant=spec.variant,
        adapters=spec.adapters,
        refiner=refiner,
    )
    return Programs(model, devices_mesh, spec.per_device_batch_size, spec.executables)


def _folder(source: str, variant: str | None, config: str | None, identity: str) -> Path:
    root = fetch.checkpoint_folder(source, variant, config)
    if (found := checkpoint.identity(root, variant)) != identity:
        raise checkpoint.CheckpointError(
            f"{source}: the files here have identity {found[:12]}, those of the recipe {identity[:12]}; "
            "the checkpoint changed under the run, or the worker sees another one"
        )
    return root


def _generate(shard: Shard, model: LoadedModel) -> Iterator[ImageResult]:
    with model.lock:
        failed: list[tuple[Sequence[ImageRequest], Exception]] = []
        for requests, outcome in _pipelined(shard, model.programs):
            if isinstance(outcome, Exception):
                failed.append((requests, outcome))
            else:
                yield from outcome
        again = [result for batch in failed for result in _bisect(*batch, shard, model.programs)]
    if 1 < len(again) == len(shard.requests) and all(result.failed for result in again):
        raise failed[0][1]  # one culprit among many requests is a bad record; all of them are a bad worker
    yield from again


def _pipelined(shard: Shard, programs: Programs) -> Iterator[tuple[Sequence[ImageRequest], Outcome]]:
    """Runs a shard's batches, each started before the one before it is fetched."""
    waiting: collections.deque = collections.deque()
    for first in range(0, len(shard.requests), programs.batch_size):
        requests = shard.requests[first : first + programs.batch_size]
        waiting.append((requests, _attempt(_start, requests, shard, programs)))
        if len(waiting) > 1:
            yield _finished(*waiting.popleft())
    while waiting:
        yield _finished(*waiting.popleft())


def _finished(requests, started):
    return requests, started if isinstance(started, Exception) else _attempt(_fetch, started)


def _attempt(function, *args):
    """The function's result, or its exception as a value: a poison record must not take its neighbours along."""
    try:
        return function(*args)
    except CompileError:
        raise
    except Exception as error:
        return error


def _start(requests: Sequence[ImageRequest], shard: Shard, programs: Programs):
    """Starts one batch. Free slots repeat a request; None marks them, and what they give is never looked at."""
    slots = [*requests, *[None] * (programs.batch_size - len(requests))]
    inputs, tokens = programs.prepare([request or requests[0] for request in slots])
    if programs.compile(shard.height, shard.width, inputs):
        metrics.count("compiles")
    started = time.monotonic()
    outputs = programs(inputs, shard.height, shard.width)
    return slots, tokens, outputs, lambda: programs.clock.fetched(started)


def _fetch(started) -> list[ImageResult]:
    slots, tokens, (images, finite), fetched = started
    images, finite = np.asarray(images), np.asarray(finite)
    fetched()
    if not len(slots) == len(tokens) == len(images) == len(finite):
        raise RuntimeError(f"a batch of {len(slots)} gave {len(images)} images and {len(finite)} flags")
    used = [token for request, token in zip(slots, tokens, strict=True) if request is not None]
    metrics.count("tokens_truncated", sum(token.cut for token in used))
    return [
        ImageResult(
            request.key,
            image if ok else None,
            None if ok else NOT_FINITE,
            num_tokens=token.count,
            truncated=token.truncated,
            unknown_words=token.unknown_words,
        )
        for request, token, image, ok in zip(slots, tokens, images, finite, strict=True)
        if request is not None
    ]


def _bisect(
    requests: Sequence[ImageRequest], error: Exception, shard: Shard, programs: Programs
) -> Iterator[ImageResult]:
    if str(error).startswith(TRANSIENT):
        outcome = _retry(requests, error, shard, programs)
        yield from _bisect(requests, outcome, shard, programs) if isinstance(outcome, Exception) else outcome
        return
    if len(requests) == 1:
        reason = f"the model failed on this record: {type(error).__name__}: {error}"
        yield ImageResult(requests[0].key, None, reason, failed=True)
        return
    middle = len(requests) // 2
    for half in (requests[:middle], requests[middle:]):
        outcome = _attempt(lambda half=half: _fetch(_start(half, shard, programs)))
        yield from _bisect(half, outcome, shard, programs) if isinstance(outcome, Exception) else outcome


def _retry(requests: Sequence[ImageRequest], error: Exception, shard: Shard, programs: Programs) -> Outcome:
    """Tries a batch again and again while the device is away; raises the last error if it stays away."""
    for delay in RETRY_DELAYS:
        log.warning("the device failed and is tried again in %.0f s: %s", delay, error)
        time.sleep(delay)
        outcome = _attempt(lambda: _fetch(_start(requests, shard, programs)))
        if not isinstance(outcome, Exception) or not str(outcome).startswith(TRANSIENT):
            return outcome
        error = outcome
    raise error  # the device's fault: no record is rejected for it
