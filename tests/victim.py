"""A process that is there to be killed: the whole graph on a slow fake model.

python -m tests.victim INPUT OUTPUT MODE     MODE: in_memory, or multi_processing for workers in other processes
"""

import sys
import time

from apache_beam.options.pipeline_options import PipelineOptions

from tests.fakes import FakeHandler, run

SETTINGS = {"images_per_shard": 4, "batch_size": 4}


class SlowHandler(FakeHandler):
    """So that a kill has a chance to come while shards are made."""

    def run_inference(self, batch, model, inference_args=None):
        time.sleep(0.15)
        yield from super().run_inference(batch, model, inference_args)


def main() -> None:
    source, output, mode = sys.argv[1:]
    print("ready", flush=True)
    options = PipelineOptions([f"--direct_running_mode={mode}", "--direct_num_workers=2"])
    run(source, output, SlowHandler(rejected=["p7"]), options=options, **SETTINGS)


if __name__ == "__main__":
    main()
