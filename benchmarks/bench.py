"""Prints the figures of benchmarks/README.md, as ratios within one run: `make bench`.

    python -m benchmarks.bench [job] [reference]

All on the machine's CPU, with the built-in checkpoint at 64 x 64 pixels, 20 Euler steps, guidance 5.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import jax

from model_handlers import checkpoint, fetch
from model_handlers.handler import ModelSpec, load_programs
from model_handlers.recipe import ImageRequest
from pipeline.__main__ import main as lightmill
from transforms.counts import read_counts

BATCH, STEPS, SIDE = 8, 20, 64
PARITY_PYTHON = Path(".venv-parity/bin/python")


def request(i: int) -> ImageRequest:
    square = (SIDE, SIDE)
    prompt = f"a red circle left of a blue square, number {i}"
    return ImageRequest(f"{i}", 0, prompt, None, i, SIDE, SIDE, STEPS, 5.0, square, (0, 0), square)


def seconds_of_model(batches: int) -> list[float]:
    """Seconds of each warm batch of the compiled program, nothing else in between."""
    root = fetch.checkpoint_folder(fetch.EMBEDDED)
    scheduler = "EulerDiscreteScheduler"
    programs = load_programs(ModelSpec(fetch.EMBEDDED, checkpoint.identity(root), scheduler, "float32", BATCH))
    inputs, _ = programs.prepare([request(i) for i in range(BATCH)])
    programs.compile(SIDE, SIDE, inputs)
    jax.block_until_ready(programs(inputs, SIDE, SIDE))
    seconds = []
    for _ in range(batches):
        started = time.perf_counter()
        jax.block_until_ready(programs(inputs, SIDE, SIDE))
        seconds.append(time.perf_counter() - started)
    return seconds


def bench_job(images: int = 3000) -> None:
    """The job's whole wall time, from reading to the report, over the model's time for the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.txt")
        prompts.write_text("".join(f"{request(i).prompt}\n" for i in range(images)))
        before = seconds_of_model(5)
        started = time.perf_counter()
        status = lightmill(
            ["generate", "--input", str(prompts), "--output", f"{folder}/out", "--per_device_batch_size", str(BATCH)]
        )
        wall = time.perf_counter() - started
        after = seconds_of_model(5)
        if status or read_counts(f"{folder}/out").written != images:
            raise SystemExit("the job did not make its images")
    # The machine's speed drifts, so the model is timed on either side of the job.
    model = statistics.mean(before + after) * -(-images // BATCH)
    print(f"job: {images} images in {wall:.1f} s, of the model alone {model:.1f} s: ratio {wall / model:.3f}")


def bench_reference(repeats: int = 5) -> None:
    """Our images/s over diffusers' on PyTorch, same checkpoint, batch and steps, both warm, on all cores."""
    command = [str(PARITY_PYTHON), "-m", "benchmarks.diffusers_speed", str(fetch.checkpoint_folder(fetch.EMBEDDED))]
    ours, theirs = [], []
    for _ in range(2):  # in turns, because the machine's speed drifts
        ours += seconds_of_model(repeats)
        run = subprocess.run([*command, *map(str, (BATCH, STEPS, repeats))], check=True, capture_output=True, text=True)
        theirs += json.loads(run.stdout)
    our_rate, their_rate = (BATCH / statistics.median(seconds) for seconds in (ours, theirs))
    print(f"reference: {our_rate:.2f} images/s, diffusers {their_rate:.2f} images/s: ratio {our_rate / their_rate:.2f}")


def main() -> None:
    benches = {"job": bench_job, "reference": bench_reference}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(benches))
    for name in parser.parse_args().names or benches:
        benches[name]()


if __name__ == "__main__":
    main()
