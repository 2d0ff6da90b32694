"""`lightmill selftest`: whether this machine, or this container, can make a picture at all."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from PIL import Image

from pipeline.job import JobError, generate
from pipeline.options import GenerateOptions, add_generate_flags
from pipeline.workers import TPUS

PROMPT = "a drawing of a large blue diamond against a beige background"


def self_test(device: str | None, tpu: str | None) -> str:
    """Makes one picture by the whole pipeline with the checkpoint in the package, and says what drew it.

    Args:
      device: "tpu", "gpu" or "cpu", which must be there.
      tpu: a name in `workers.TPUS`, whose container variables are set as they are on Dataflow.

    Raises:
      UsageError: the device is not there.
      JobError: there is another number of chips than the TPU has, or the picture is not one.
    """
    if tpu:
        device = "tpu"
        os.environ.update(TPUS[tpu].environment)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "prompts.txt")
        source.write_text(PROMPT + "\n")
        flags = ["--input", str(source), "--output", f"{folder}/out", *([f"--device={device}"] if device else [])]
        parser = argparse.ArgumentParser()
        add_generate_flags(parser)
        generate(GenerateOptions(**vars(parser.parse_args(flags))), PipelineOptions([]))
        pictures = list(Path(folder).glob("out/images/*/*.png"))
        if len(pictures) != 1:
            raise JobError(f"selftest: {len(pictures)} pictures instead of one")
        pixels = np.asarray(Image.open(pictures[0]))
    if pixels.std() < 1:
        raise JobError("selftest: the picture is of one colour")
    devices = jax.local_devices()
    if tpu and len(devices) != TPUS[tpu].devices:
        raise JobError(f"selftest: {len(devices)} chips instead of the {TPUS[tpu].devices} of {tpu}")
    height, width, _ = pixels.shape
    return (
        f"selftest: a picture of {width} x {height} in {time.monotonic() - started:.1f} s "
        f"on {len(devices)} x {devices[0].device_kind} ({devices[0].platform}), JAX {jax.__version__}"
    )
