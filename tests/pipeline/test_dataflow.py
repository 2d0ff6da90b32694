"""What is submitted to Dataflow is what the table says, and what could not work there is refused before.

The committed jobs are what Beam's own client describes, without what differs from one submission to the next;
`python -m tests.pipeline.test_dataflow` writes them again.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    WorkerOptions,
)
from apache_beam.portability.api import beam_runner_api_pb2

from pipeline import dataflow
from pipeline.options import GenerateOptions, UsageError, add_generate_flags, beam_options
from pipeline.workers import GPUS, TPUS, Worker
from tests import cloud
from tests.end_to_end import command

JOBS = Path(__file__).parent / "jobs"
IMAGE = "us-west1-docker.pkg.dev/project/images/lightmill:1"
PLACE = ("--runner=DataflowRunner", "--project=lightmill-test", "--region=us-west1")
FILES = ("--input", "gs://bucket/prompts.jsonl", "--output", "gs://bucket/out")
SUBMITTED = {
    "v5e-4": ("--tpu=v5e-4", "--worker_zone=us-west1-c", "--max_num_workers=16"),
    "l4": ("--gpu=l4", "--disk_size_gb=100", "--number_of_worker_harness_threads=6"),
}
COMPLETE = (*PLACE, "--temp_location=gs://bucket/tmp", f"--sdk_container_image={IMAGE}", "--worker_zone=us-west1-c")


def described(flags) -> dict:
    """The job that a command describes for Dataflow, with its graph, from which the volatile fields are left out."""
    with (
        tempfile.TemporaryDirectory() as folder,
        cloud.emulator("fake-gcs-server") as port,
        cloud.use(port) as bucket,
    ):
        with FileSystems.create(f"{bucket}/prompts.jsonl") as file:
            file.write(b'{"prompt": "a fox in the snow"}\n')
        place = (f"--temp_location={bucket}/tmp", f"--sdk_container_image={IMAGE}", "--job_name=lightmill-nightly")
        offline = ("--no_auth", f"--template_location={folder}/job.json")
        files = ("--input", f"{bucket}/prompts.jsonl", "--output", f"{bucket}/out")
        finished = command.run("generate", *files, *PLACE, *place, *offline, *flags)
        assert finished.status == 0 and "described and not run yet" in finished.stdout, finished.stderr
        job = json.loads(Path(folder, "job.json").read_text())
        with FileSystems.open(job["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"]) as file:
            graph = beam_runner_api_pb2.Pipeline.FromString(file.read())
    return {"job": _lasting(job), "transforms": _top_level(graph)}


def _lasting(job: dict) -> dict:
    # The folder of a submission is named after the moment.
    job = json.loads(re.sub(r"lightmill-nightly\.\d+\.\d+", "lightmill-nightly.TIME", json.dumps(job)))
    del job["clientRequestId"], job["environment"]["userAgent"]
    for image in job["environment"]["workerPools"][0]["sdkHarnessContainerImages"]:
        del image["capabilities"]
    options = job["environment"]["sdkPipelineOptions"]
    del options["display_data"]
    ordinary = PipelineOptions([]).get_all_options()
    volatile = {"pipelineProtoHash", "template_location", "beam_plugins", "gcp_oauth_scopes"}
    options["options"] = {
        name: value
        for name, value in options["options"].items()
        if name not in volatile and ordinary.get(name) != value
    }
    return job


def _top_level(graph: beam_runner_api_pb2.Pipeline) -> list[str]:
    names = (transform.unique_name for transform in graph.components.transforms.values())
    return sorted({name.split("/")[0] for name in names if not name.startswith("ref_")})  # which is the root


@pytest.mark.parametrize("worker", SUBMITTED)
def test_the_job_that_is_submitted_is_the_committed_one(worker):
    assert described(SUBMITTED[worker]) == json.loads((JOBS / f"{worker}.json").read_text())


def settle(*flags) -> tuple[Worker, PipelineOptions]:
    parser = argparse.ArgumentParser()
    add_generate_flags(parser)
    known, others = parser.parse_known_args([*FILES, *flags])
    options = beam_options(others, [])
    return dataflow.settle_workers(GenerateOptions(**vars(known)), options), options


@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_every_worker_of_the_table_settles_its_flags_together(name):
    worker, options = settle(*COMPLETE, f"--{'tpu' if name in TPUS else 'gpu'}={name}")
    assert worker is {**TPUS, **GPUS}[name]
    assert options.view_as(WorkerOptions).machine_type == worker.machine_type
    assert options.view_as(GoogleCloudOptions).dataflow_service_options == [f"worker_accelerator={worker.accelerator}"]
    assert options.view_as(DebugOptions).experiments == ["no_use_multiple_sdk_containers"]
    assert options.view_as(DebugOptions).number_of_worker_harness_threads == 4
    assert options.view_as(SetupOptions).sdk_location == "container"
    assert options.view_as(WorkerOptions).disk_size_gb == 200


@pytest.mark.parametrize("name", TPUS)
def test_chips_machine_topology_and_container_of_a_tpu_agree(name):
    tpu = TPUS[name]
    assert tpu.machine_type.endswith(f"-{tpu.devices}t")
    bounds = [int(bound) for bound in tpu.environment["TPU_CHIPS_PER_HOST_BOUNDS"].split(",")]
    assert len(bounds) == 3 and bounds[0] * bounds[1] * bounds[2] == tpu.devices
    topology = [int(side) for side in tpu.accelerator.partition("topology:")[2].split("x")]
    assert (*topology, 1)[:3] == tuple(bounds)


def test_workers_without_an_accelerator_get_one_process_and_are_otherwise_left_alone():
    worker, options = settle(*PLACE, "--temp_location=gs://b/t", "--setup_file=./setup.py", "--device=cpu")
    assert (worker.device, worker.devices) == ("cpu", 1)
    assert options.view_as(DebugOptions).experiments == ["no_use_multiple_sdk_containers"]
    assert options.view_as(WorkerOptions).machine_type is None


def without(name) -> list[str]:
    return [flag for flag in COMPLETE if not flag.startswith(f"--{name}=")]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (COMPLETE, "needs --tpu or --gpu, such as --tpu=v5e-4, or --device=cpu"),
        ((*COMPLETE, "--runner=dataflow"), "needs --tpu or --gpu"),
        ((*COMPLETE, "--device=tpu"), "needs --tpu or --gpu"),
        ((*COMPLETE, "--tpu=v5e-4", "--gpu=l4"), "--tpu and --gpu exclude each other"),
        ((*COMPLETE, "--tpu=v5e-4", "--device=gpu"), "--device=gpu contradicts"),
        ((*COMPLETE, "--tpu=v5e-4", "--devices_per_worker=8"), "--devices_per_worker=8 contradicts"),
        ((*without("project"), "--tpu=v5e-4"), "needs --project"),
        ((*without("region"), "--tpu=v5e-4"), "needs --region"),
        ((*without("temp_location"), "--tpu=v5e-4"), "needs --temp_location"),
        ((*without("worker_zone"), "--tpu=v5e-4"), "--tpu needs --worker_zone"),
        ((*COMPLETE, "--tpu=v5e-4", "--worker_zone=us-east5-a"), "is not in --region=us-west1"),
        ((*COMPLETE, "--tpu=v5e-4", "--machine_type=ct5lp-hightpu-8t"), "of which it is ct5lp-hightpu-4t"),
        (
            (*COMPLETE, "--tpu=v5e-4", "--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1"),
            "contradicts",
        ),
        ((*COMPLETE, "--tpu=v5e-4", "--dataflow_service_options=enable_prime"), "does not support TPUs"),
        ((*COMPLETE, "--tpu=v5e-4", "--experiments=use_multiple_sdk_containers"), "in each of a worker's processes"),
        ((*COMPLETE, "--tpu=v5e-4", "--disk_size_gb=25"), "at least 50"),
        ((*COMPLETE, "--tpu=v5e-4", "--sdk_location=default.tar.gz"), "of which it is container"),
        ((*without("sdk_container_image"), "--tpu=v5e-4"), "need --sdk_container_image"),
        ((*without("sdk_container_image"), "--device=cpu"), "need --sdk_container_image"),
        (
            (*COMPLETE, "--gpu=l4", "--sdk_container_image=apache/beam_python3.11_sdk:2.77.0"),
            "has no JAX for a gpu",
        ),
        ((*COMPLETE, "--tpu=v5e-4", "--temp_location=/tmp"), "--temp_location=/tmp is on this machine"),
        ((*COMPLETE, "--tpu=v5e-4", "--output=out"), "--output=out is on this machine"),
        ((*COMPLETE, "--tpu=v5e-4", "--input=a.csv"), "--input=a.csv is on this machine"),
        ((*COMPLETE, "--tpu=v5e-4", "--jax_cache_dir=/c"), "--jax_cache_dir=/c is on this machine"),
        ((*COMPLETE, "--tpu=v5e-4", "--lora", f"{__file__}:0.5"), f"--lora={__file__} is on this machine"),
        ((*COMPLETE, "--tpu=v5e-4", f"--checkpoint={JOBS}"), f"give --checkpoint={dataflow.BAKED_CHECKPOINT}"),
        (("--tpu=v5e-4",), "choose machines of --runner=DataflowRunner; with FnApiRunner, give --device"),
        (("--runner=PortableRunner",), "name the workers' --device"),
        (("--runner=PortableRunner", "--device=cpu"), "--devices_per_worker"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(flags, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        settle(*flags)


def test_a_refusal_is_one_line_of_the_command_and_nothing_is_submitted():
    finished = command.run("generate", *FILES, *COMPLETE, "--tpu=v5e-4", "--machine_type=n1-standard-4")
    assert (finished.status, finished.stdout) == (2, "")
    assert finished.stderr == (
        "lightmill: error: --machine_type=n1-standard-4 contradicts --tpu, --gpu or --device, of which it is "
        "ct5lp-hightpu-4t: leave it out\n"
    )


if __name__ == "__main__":
    JOBS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or SUBMITTED:
        text = json.dumps(described(SUBMITTED[name]), indent=1, sort_keys=True)
        (JOBS / f"{name}.json").write_text(text + "\n")
