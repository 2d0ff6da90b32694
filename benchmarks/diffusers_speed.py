"""Times diffusers on PyTorch for `benchmarks.bench`; runs in the environment of `make parity`.

    python -m benchmarks.diffusers_speed CHECKPOINT BATCH STEPS REPEATS

Prints one JSON line: seconds of each warm batch.
"""

import json
import sys
import time

import torch
from diffusers import StableDiffusionXLPipeline


def main(checkpoint: str, batch: int, steps: int, repeats: int) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    prompts = [f"a red circle left of a blue square, number {i}" for i in range(batch)]

    def run() -> float:
        generators = [torch.Generator().manual_seed(i) for i in range(batch)]
        started = time.perf_counter()
        # "np" leaves out the making of PIL images, which is not the model's work.
        pipeline(prompts, num_inference_steps=steps, guidance_scale=5.0, generator=generators, output_type="np")
        return time.perf_counter() - started

    run()
    print(json.dumps([run() for _ in range(repeats)]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
