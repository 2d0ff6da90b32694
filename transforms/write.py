"""WriteShard: images and rejects of a shard to files, then its commit record.

The order is the contract: pictures, metadata, rejects, and last the commit record, each file whole. A run that is
killed anywhere leaves a shard that does not count yet and is written over by the next run.
"""

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import cast

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import PredictionResult
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from model_handlers import metrics
from model_handlers.recipe import ImageRequest, ImageResult, Recipe, Shard
from transforms import commits, metadata, progress, rejects, storage
from transforms.commits import Commit, CommittedImage, CommittedReject
from transforms.formats import FOLDER_OF_PNG, FORMATS, OutputFormat, jsonl
from transforms.pictures import IMAGE_FORMATS
from transforms.records import FIELDS, PromptRecord, Reject

# Shards that are still encoded or written while the device makes the next one. Each holds its images in memory.
_SHARDS_IN_FLIGHT = 2
# Encoding releases the GIL and uploads wait for the network, so more threads than shards.
_IMAGE_THREADS = 8


@dataclass(frozen=True)
class WrittenShard:
    """What a shard came to, once its commit record stands.

    Attributes:
      bytes: of its image files.
      encode_seconds: that pictures took to become files; threads added up.
      write_seconds: that files took to be stored.
    """

    name: str
    written: int
    rejected: int
    truncated: int
    unknown_words: int
    bytes: int = 0
    encode_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(frozen=True)
class _Encoded:
    """A request with its result, whose pixels have become the bytes of a file; none if there is no image."""

    request: ImageRequest
    result: ImageResult
    data: bytes = b""
    sha256: str = ""
    seconds: float = 0.0


class WriteShard(beam.PTransform):
    """Writes the shards that come from RunInference; gives one WrittenShard for each.

    Takes PredictionResult(example=Shard, inference=iterable of ImageResult). If the model makes its results while they
    are read, each image is encoded while it makes the next ones.
    """

    def __init__(self, output: str, recipe: Recipe, output_format: OutputFormat):
        super().__init__()
        self._write = _WriteShard(output, recipe, output_format)

    def expand(self, predictions):
        return predictions | beam.ParDo(self._write)


class _WriteShard(beam.DoFn):
    """Hands images and shards to threads, so that the device goes on while they are encoded and written.

    An error in a thread is raised by the next `process` or by `finish_bundle`: the bundle fails, as it should.
    """

    def __init__(self, output: str, recipe: Recipe, output_format: OutputFormat):
        self._output = output
        self._recipe = recipe
        self._format = output_format

    def setup(self):
        self._shard_pool = ThreadPoolExecutor(_SHARDS_IN_FLIGHT, "shard")
        self._image_pool = ThreadPoolExecutor(_IMAGE_THREADS, "image")
        self._in_flight: deque[Future[WrittenShard]] = deque()

    def start_bundle(self):
        # A bundle that failed left its other shard behind, and now may be tried again: not two writers at once.
        wait(self._in_flight)
        self._in_flight.clear()

    def process(self, prediction: PredictionResult):
        while len(self._in_flight) >= _SHARDS_IN_FLIGHT or (self._in_flight and self._in_flight[0].done()):
            yield self._finished()
        shard = cast(Shard, prediction.example)
        # The device is held during this loop, so nothing of ours waits in it.
        encoded = [
            self._image_pool.submit(_encode, self._recipe, shard, result, self._format)
            for result in cast(Iterable[ImageResult], prediction.inference)
        ]
        self._in_flight.append(self._shard_pool.submit(self._write, shard, encoded))

    def finish_bundle(self):
        while self._in_flight:
            yield WindowedValue(self._finished(), GlobalWindow().max_timestamp(), (GlobalWindow(),))

    def _write(self, shard: Shard, encoded: Sequence[Future[_Encoded]]) -> WrittenShard:
        images = [image.result() for image in encoded]
        return _write(self._output, self._recipe, shard, images, self._format, self._image_pool.map)

    def _finished(self) -> WrittenShard:
        shard = self._in_flight.popleft().result()
        metrics.count("bytes_written", shard.bytes)
        metrics.took("encode", shard.encode_seconds)
        metrics.took("write", shard.write_seconds)
        return shard

    def teardown(self):
        self._shard_pool.shutdown(cancel_futures=True)
        self._image_pool.shutdown(cancel_futures=True)


def write_shard(
    output: str,
    recipe: Recipe,
    shard: Shard,
    results: Iterable[ImageResult],
    output_format: OutputFormat = FOLDER_OF_PNG,
) -> WrittenShard:
    """Writes and commits one shard. Written twice, also by two workers at once, it has the same bytes.

    Args:
      results: one for each request, in any order.

    Raises:
      ValueError: if the results do not answer the shard's requests one to one.
    """
    encoded = [_encode(recipe, shard, result, output_format) for result in results]
    return _write(output, recipe, shard, encoded, output_format, map)


def _encode(recipe: Recipe, shard: Shard, result: ImageResult, output_format: OutputFormat) -> _Encoded:
    started = time.monotonic()
    request = _request_of(shard, result)
    if result.image is None:
        return _Encoded(request, result)
    image_format = IMAGE_FORMATS[output_format.image_format]
    text = metadata.recipe_text(request, recipe, image_format.max_text)
    data = image_format.encode(result.image, text, output_format.image_quality)
    sha256 = hashlib.sha256(data).hexdigest()
    return _Encoded(request, dataclasses.replace(result, image=None), data, sha256, time.monotonic() - started)


def _request_of(shard: Shard, result: ImageResult) -> ImageRequest:
    """The request that a result answers; raises ValueError if it is no answer to any."""
    request = next((request for request in shard.requests if request.key == result.key), None)
    if request is None:
        raise ValueError(f"shard {shard.name}: a result for {result.key}, which is not asked for")
    if (result.image is None) == (result.reject_reason is None):
        raise ValueError(f"shard {shard.name}: {request.key} must have an image or a reason, and not both")
    shape = (request.height, request.width, 3)
    if result.image is not None and (result.image.shape != shape or result.image.dtype != np.uint8):
        found = f"{result.image.dtype} {result.image.shape}"
        raise ValueError(f"shard {shard.name}: the image of {request.key} must be uint8 {shape}, not {found}")
    return request


def _in_order(shard: Shard, encoded: Sequence[_Encoded]) -> list[_Encoded]:
    """One for each request, by its key: order proves nothing, and Beam does not count."""
    by_key = {each.request.key: each for each in encoded}
    if not len(by_key) == len(encoded) == len(shard.requests):
        raise ValueError(
            f"shard {shard.name}: {len(encoded)} results for {len(by_key)} keys do not answer its "
            f"{len(shard.requests)} requests one to one"
        )
    return [by_key[request.key] for request in shard.requests]


def _write(
    output: str,
    recipe: Recipe,
    shard: Shard,
    encoded: Sequence[_Encoded],
    output_format: OutputFormat,
    run_all: Callable,
) -> WrittenShard:
    """Stores the files of a shard, and commits it; `run_all` is a `map`, which may use threads."""
    encoded = _in_order(shard, encoded)
    made, failed = ([each for each in encoded if bool(each.data) == kind] for kind in (True, False))
    started = time.monotonic()
    with storage.writing(output):
        _store(output, recipe, shard.name, made, output_format, run_all)
        _store_rejects(output, shard.name, failed)
        commit = Commit(
            shard=shard.name,
            images=tuple(CommittedImage(image.request.key, image.sha256, len(image.data)) for image in made),
            rejected=tuple(CommittedReject(each.request.key, str(each.result.reject_reason)) for each in failed),
        )
        storage.write_file(output, commits.path_of(shard.name), commit.to_json())
        storage.make_durable(output, commits.FOLDER)
    progress.add(done=len(made), rejected=len(failed))
    return WrittenShard(
        shard.name,
        written=len(made),
        rejected=len(failed),
        truncated=sum(image.result.truncated for image in made),
        unknown_words=sum(image.result.unknown_words > 0 for image in made),
        bytes=sum(len(image.data) for image in made),
        encode_seconds=sum(image.seconds for image in made),
        write_seconds=time.monotonic() - started,
    )


def _store(
    output: str,
    recipe: Recipe,
    shard: str,
    made: Sequence[_Encoded],
    output_format: OutputFormat,
    run_all: Callable,
) -> None:
    """Writes images, then their rows."""
    writer = FORMATS[output_format.format].writer(output, shard)

    def file_name(image: _Encoded) -> str:
        return image.request.key + output_format.suffix

    # A list, so that errors of threads are raised.
    list(run_all(lambda image: writer.add(file_name(image), image.data), made))
    writer.close([metadata.row(image.request, image.result, recipe, file_name(image), image.sha256) for image in made])


def _store_rejects(output: str, shard: str, failed: Sequence[_Encoded]) -> None:
    if failed:
        lines = jsonl(_reject_row(each.request, each.result) for each in failed)
        storage.write_file(output, rejects.path_of(shard), lines)
    else:
        # Of an earlier, unfinished attempt at this shard.
        storage.delete_files(output, [rejects.path_of(shard)])
    storage.make_durable(output, rejects.FOLDER)


def _reject_row(request: ImageRequest, result: ImageResult) -> dict[str, object]:
    place = (request.source, request.position, request.id)
    values = {**vars(request), **request.settings.chosen}
    fields = {name: values[name] for name in FIELDS if values.get(name) is not None}
    record = PromptRecord(*place, request.prompt, fields, request.extra).as_input()
    reject = Reject(*place, "generate", str(result.reject_reason), record)
    return {**dataclasses.asdict(reject), "image_index": request.image_index, "key": request.key}
