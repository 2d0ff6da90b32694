"""WriteShard: images and rejects of a shard to files, then its commit record.

The order is the contract: pictures, metadata, rejects, and last the commit record, each file whole. A run that is
killed anywhere leaves a shard that does not count yet and is written over by the next run.
"""

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
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

# Shards that wait for encoding and writing while the device makes the next one. Each holds its images in memory.
_SHARDS_IN_FLIGHT = 2
# Encoding releases the GIL and uploads wait for the network, so more threads than shards.
_IMAGE_THREADS = 8


@dataclass(frozen=True)
class WrittenShard:
    """What a shard came to, once its commit record stands.

    Attributes:
      bytes: of its image files.
      encode_seconds, write_seconds: that pictures took to become files, and files to be stored; threads added up.
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
class _Stored:
    """One image file; fields as in `WrittenShard`."""

    sha256: str
    bytes: int
    encode_seconds: float
    write_seconds: float


class WriteShard(beam.PTransform):
    """Writes the shards that come from RunInference; gives one WrittenShard for each.

    Takes PredictionResult(example=Shard, inference=list of ImageResult).
    """

    def __init__(self, output: str, recipe: Recipe, output_format: OutputFormat):
        super().__init__()
        self._write = _WriteShard(output, recipe, output_format)

    def expand(self, predictions):
        return predictions | beam.ParDo(self._write)


class _WriteShard(beam.DoFn):
    """Hands shards to threads, so that the device makes the next one while they are encoded and written.

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
        self._in_flight.append(
            self._shard_pool.submit(
                write_shard,
                self._output,
                self._recipe,
                cast(Shard, prediction.example),
                cast(Sequence[ImageResult], prediction.inference),
                self._format,
                self._image_pool.map,
            )
        )

    def finish_bundle(self):
        while self._in_flight:
            yield WindowedValue(self._finished(), GlobalWindow().max_timestamp(), (GlobalWindow(),))

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
    results: Sequence[ImageResult],
    output_format: OutputFormat = FOLDER_OF_PNG,
    run_all: Callable = map,
) -> WrittenShard:
    """Writes and commits one shard. Written twice, also by two workers at once, it has the same bytes.

    Args:
      results: one for each request, in any order.
      run_all: a `map`, which may use threads.

    Raises:
      ValueError: if the results do not answer the shard's requests one to one.
    """
    with storage.writing(output):
        written = _write(output, recipe, _match(shard, results), shard.name, output_format, run_all)
    progress.add(done=written.written, rejected=written.rejected)
    return written


def _write(
    output: str,
    recipe: Recipe,
    pairs: list[tuple[ImageRequest, ImageResult]],
    shard: str,
    output_format: OutputFormat,
    run_all: Callable,
) -> WrittenShard:
    made = [(request, result) for request, result in pairs if result.image is not None]
    failed = [(request, result) for request, result in pairs if result.image is None]
    image_format = IMAGE_FORMATS[output_format.image_format]
    writer = FORMATS[output_format.format].writer(output, shard)

    def write_image(pair: tuple[ImageRequest, ImageResult]) -> _Stored:
        request, result = pair
        assert result.image is not None
        started = time.monotonic()
        text = metadata.recipe_text(request, recipe, image_format.max_text)
        data = image_format.encode(result.image, text, output_format.image_quality)
        sha256 = hashlib.sha256(data).hexdigest()
        encoded = time.monotonic()
        writer.add(request.key + output_format.suffix, data)
        return _Stored(sha256, len(data), encoded - started, time.monotonic() - encoded)

    files: list[_Stored] = list(run_all(write_image, made))
    stored = time.monotonic()
    writer.close(
        [
            metadata.row(request, result, recipe, request.key + output_format.suffix, file.sha256)
            for (request, result), file in zip(made, files, strict=True)
        ]
    )
    if failed:
        storage.write_file(output, rejects.path_of(shard), jsonl(_reject_row(*pair) for pair in failed))
    else:
        # Of an earlier, unfinished attempt at this shard.
        storage.delete_files(output, [rejects.path_of(shard)])
    storage.make_durable(output, rejects.FOLDER)
    commit = Commit(
        shard=shard,
        images=tuple(
            CommittedImage(request.key, file.sha256, file.bytes) for (request, _), file in zip(made, files, strict=True)
        ),
        rejected=tuple(CommittedReject(request.key, str(result.reject_reason)) for request, result in failed),
    )
    storage.write_file(output, commits.path_of(shard), commit.to_json())
    storage.make_durable(output, commits.FOLDER)
    results = [result for _, result in made]
    return WrittenShard(
        shard,
        written=len(made),
        rejected=len(failed),
        truncated=sum(result.truncated for result in results),
        unknown_words=sum(result.unknown_words > 0 for result in results),
        bytes=sum(file.bytes for file in files),
        encode_seconds=sum(file.encode_seconds for file in files),
        write_seconds=sum(file.write_seconds for file in files) + time.monotonic() - stored,
    )


def _match(shard: Shard, results: Sequence[ImageResult]) -> list[tuple[ImageRequest, ImageResult]]:
    """Pairs requests with their results by key: order proves nothing, and Beam does not count."""
    by_key = {result.key: result for result in results}
    wanted = {request.key for request in shard.requests}
    if len(by_key) != len(results) or by_key.keys() != wanted or len(wanted) != len(shard.requests):
        raise ValueError(
            f"shard {shard.name}: {len(results)} results for {len(by_key)} keys do not answer its "
            f"{len(shard.requests)} requests one to one"
        )
    pairs = []
    for request in shard.requests:
        result = by_key[request.key]
        if (result.image is None) == (result.reject_reason is None):
            raise ValueError(f"shard {shard.name}: {request.key} must have an image or a reason, and not both")
        shape = (request.height, request.width, 3)
        if result.image is not None and (result.image.shape != shape or result.image.dtype != np.uint8):
            found = f"{result.image.dtype} {result.image.shape}"
            raise ValueError(f"shard {shard.name}: the image of {request.key} must be uint8 {shape}, not {found}")
        pairs.append((request, result))
    return pairs


def _reject_row(request: ImageRequest, result: ImageResult) -> dict[str, object]:
    place = (request.source, request.position, request.id)
    values = {**vars(request), **request.settings.chosen}
    fields = {name: values[name] for name in FIELDS if values.get(name) is not None}
    record = PromptRecord(*place, request.prompt, fields, request.extra).as_input()
    reject = Reject(*place, "generate", str(result.reject_reason), record)
    return {**dataclasses.asdict(reject), "image_index": request.image_index, "key": request.key}
