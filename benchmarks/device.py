"""Whether a device ever waits for the host: the whole graph on a device that takes a fixed time for each batch.

    python -m benchmarks.device [IMAGES_PER_SECOND ...] [--minutes 4] [--batch 8]

The device is a clock; all else is real: the handler, the tokenizers, pictures of 1024 x 1024 that cost an encoder what
photographs do, encoding, hashing, files that are synced to the disk, commit records. For each speed, the wall time of
the job, from building the graph to its end, over the device's time; and where the rest went: before the first batch,
between batches, after the last. Other flags go to Beam.
"""

import argparse
import functools
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from PIL import Image

from model_handlers import checkpoint, fetch
from model_handlers.handler import DiffusionModelHandler, LoadedModel, ModelSpec, load_programs
from model_handlers.metrics import DeviceClock
from model_handlers.program import Programs
from tests.fakes import run
from transforms.counts import read_counts

SIDE, STEPS, IMAGES_PER_SHARD = 1024, 20, 64
# What is published of the four chips of v5e-4, 8 images in 4.99 s; then faster ones, until two cores fall behind.
SPEEDS = (1.6, 3.0, 4.0, 5.0, 6.0, 8.0)


def photograph(seed: int, side: int = SIDE) -> np.ndarray:
    """Noise with the spectrum of a photograph and a little of a sensor's, (side, side, 3)."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = 1

    def field(slope: float) -> np.ndarray:
        spectrum = draw.standard_normal(frequency.shape) + 1j * draw.standard_normal(frequency.shape)
        values = np.fft.irfft2(spectrum / frequency**slope, (side, side))
        return values / values.std()

    light = 128 + 45 * field(1.8)
    colours = np.stack([light + 20 * field(2.4) for _ in range(3)], axis=-1)
    return np.clip(colours + draw.standard_normal(colours.shape), 0, 255).astype(np.uint8)


# Made once, before the job of which they are no part.
@functools.cache
def photographs() -> list[np.ndarray]:
    return [photograph(seed) for seed in range(8)]


@functools.cache
def programs(batch: int) -> Programs:
    identity = checkpoint.identity(fetch.checkpoint_folder(fetch.EMBEDDED))
    return load_programs(ModelSpec(fetch.EMBEDDED, identity, "EulerDiscreteScheduler", "float32", batch))


class Awaited:
    """An array that will be there at a moment of time.monotonic(), as those that JAX returns."""

    def __init__(self, value: np.ndarray, ready: float):
        self._value, self._ready = value, ready

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._value


class ClockDevice:
    """The interface of `Programs`: batches that take a fixed time, one after the other, and nothing of the host.

    Attributes:
      begun: when the first batch started, by time.monotonic().
      free: when the last one ends.
      idle: seconds without work between the two.
    """

    def __init__(self, batch: int, seconds: float):
        self.batch_size = batch
        self.clock = DeviceClock()
        self.prepare = programs(batch).prepare
        self.begun = self.free = self.idle = 0.0
        self._seconds = seconds

    def compile(self, height: int, width: int, like: object) -> bool:
        return False

    def __call__(self, inputs, height: int, width: int) -> tuple[Awaited, Awaited]:
        now = time.monotonic()
        self.begun = self.begun or now
        self.idle += max(0.0, now - (self.free or now))
        self.free = max(self.free, now) + self._seconds
        images = np.stack([photographs()[int(low) % len(photographs())] for _, low in inputs.seeds])
        return Awaited(images, self.free), Awaited(np.ones(len(images), bool), self.free)


class ClockHandler(DiffusionModelHandler):
    """Loads a `ClockDevice`, and tells it to whoever runs the job in this process."""

    devices: list[ClockDevice] = []  # noqa: RUF012  # of the class, since Beam copies its instances

    def __init__(self, batch: int, seconds: float):
        super().__init__(None)  # type: ignore[arg-type]  # there is no checkpoint
        self._device = batch, seconds

    def load_model(self) -> LoadedModel:
        self.devices.append(ClockDevice(*self._device))
        return LoadedModel(self.devices[-1])  # type: ignore[arg-type]


def measure(images: int, batch: int, seconds: float, folder: Path, flags: list[str]) -> tuple[float, ...]:
    """Seconds of the job's wall, of the device's work, and before, between and after batches."""
    source, output = folder / "prompts.jsonl", folder / "out"
    square = {"width": SIDE, "height": SIDE, "num_inference_steps": STEPS}
    records = [{"prompt": f"a photograph of object number {number}", **square} for number in range(images)]
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    programs(batch), photographs()
    started = time.monotonic()
    settings = {"images_per_shard": IMAGES_PER_SHARD, "batch_size": batch, "options": PipelineOptions(flags)}
    run(source, output, ClockHandler(batch, seconds), **settings)
    ended = time.monotonic()
    if read_counts(str(output)).written != images:
        raise SystemExit("the job did not make its images")
    device = ClockHandler.devices.pop()
    work = images / batch * seconds
    return ended - started, work, device.begun - started, device.idle, ended - device.free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speeds", nargs="*", type=float, default=SPEEDS)
    parser.add_argument("--minutes", type=float, default=4, help="of the device's work, for each speed")
    parser.add_argument("--batch", type=int, default=8)
    arguments, flags = parser.parse_known_args()
    file = io.BytesIO()
    Image.fromarray(photographs()[0]).save(file, "PNG")
    print(f"PNG files of {file.tell() / 1e6:.1f} MB; seconds:")
    print("images/s   wall  device  wall/device  before  between  after  processor/image")
    for speed in arguments.speeds:
        images = round(arguments.minutes * 60 * speed / arguments.batch) * arguments.batch
        with tempfile.TemporaryDirectory() as folder:
            cpu = time.process_time()
            wall, work, before, between, after = measure(
                images, arguments.batch, arguments.batch / speed, Path(folder), flags
            )
            cpu = time.process_time() - cpu
        print(
            f"{speed:8.1f} {wall:6.1f} {work:7.1f} {wall / work:12.3f} {before:7.2f} {between:8.2f} {after:6.2f} "
            f"{cpu / images:16.3f}",
            flush=True,
        )


if __name__ == "__main__":
    from benchmarks.device import main as of_the_module  # whose classes Beam finds again by name

    of_the_module()
