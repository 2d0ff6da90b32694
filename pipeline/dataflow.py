"""Who does a job's work: this machine, or machines of Dataflow, whose flags are checked and filled in here.

A job that could not work there is refused before anything is submitted, since it would say so an hour later.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import jax
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)

from model_handlers.fetch import EMBEDDED
from pipeline.options import LOCAL_RUNNERS, GenerateOptions, UsageError
from pipeline.workers import GPUS, TPUS, Worker
from transforms import storage

DATAFLOW = "DataflowRunner"
# Where the Dockerfile puts a checkpoint that is baked into the image.
BAKED_CHECKPOINT = "/opt/lightmill/checkpoint"
# Beam's and Google's own images, which hold neither JAX nor this package.
_STOCK_IMAGE = re.compile(r"(docker\.io/)?apache/beam_|gcr\.io/(cloud-dataflow|apache-beam)")
_ONE_PROCESS = "no_use_multiple_sdk_containers"
_MANY_PROCESSES = "use_multiple_sdk_containers"
# Each has one shard in hand: one draws, the others write. Google's page on TPU trouble advises against the default,
# which grows with the machine.
_HARNESS_THREADS = 4
# The image has several GB and a checkpoint as many again; Dataflow's 25 GB are too small for either.
_DISK_GB = 200
_MIN_DISK_GB = 50  # https://docs.cloud.google.com/dataflow/docs/gpu/gpu-support


def settle_workers(options: GenerateOptions, beam_options: PipelineOptions) -> Worker:
    """Finds what the workers are; for Dataflow, checks the whole command and fills in what follows from the worker.

    Raises:
      UsageError: if they cannot be known from here, or could not do the job.
    """
    runner = _runner(beam_options)
    accelerator = _chosen(options)
    if runner == DATAFLOW:
        return _on_dataflow(options, beam_options, accelerator)
    if accelerator:
        raise UsageError(f"--tpu and --gpu choose machines of --runner={DATAFLOW}; with {runner}, give --device")
    if runner in LOCAL_RUNNERS:
        return Worker(options.device, options.devices_per_worker or _local_devices(options.device))
    if not options.device:
        raise UsageError("name the workers' --device (tpu, gpu or cpu): this machine cannot see it")
    if not options.devices_per_worker:
        raise UsageError("say how many chips a worker has with --devices_per_worker: this machine cannot see it")
    return Worker(options.device, options.devices_per_worker)


def is_template(beam_options: PipelineOptions) -> bool:
    """Whether the job is only described, for a service that starts it later: what the launcher of a template does."""
    return bool(beam_options.view_as(GoogleCloudOptions).template_location)


def _runner(beam_options: PipelineOptions) -> str:
    name = (beam_options.view_as(StandardOptions).runner or LOCAL_RUNNERS[0]).rpartition(".")[2]
    # Beam takes a runner's name in any case, and without its last word.
    known = {runner.lower().removesuffix("runner"): runner for runner in (*LOCAL_RUNNERS, DATAFLOW)}
    return known.get(name.lower().removesuffix("runner"), name)


def _chosen(options: GenerateOptions) -> Worker | None:
    if options.tpu and options.gpu:
        raise UsageError("--tpu and --gpu exclude each other: the workers of a job are all of one kind")
    return TPUS[options.tpu] if options.tpu else GPUS[options.gpu] if options.gpu else None


def _local_devices(device: str | None) -> int:
    if device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(device, device))
    try:
        return jax.local_device_count()
    except RuntimeError as error:
        raise UsageError(f"--device {device}: this machine has none that JAX can use ({error})") from error


def _on_dataflow(options: GenerateOptions, beam_options: PipelineOptions, accelerator: Worker | None) -> Worker:
    if not accelerator and options.device != "cpu":
        raise UsageError(f"--runner={DATAFLOW} needs --tpu or --gpu, such as --tpu=v5e-4, or --device=cpu")
    worker = accelerator or Worker("cpu", options.devices_per_worker or 1)
    _check_place(beam_options, worker)
    _check_files(options)
    _check_image(beam_options, worker)
    _agree("--device", options.device, worker.device)
    _agree("--devices_per_worker", options.devices_per_worker, worker.devices)
    _fill_in(beam_options, worker)
    return worker


def _check_place(beam_options: PipelineOptions, worker: Worker) -> None:
    cloud = beam_options.view_as(GoogleCloudOptions)
    machines = beam_options.view_as(WorkerOptions)
    for name in ("project", "region", "temp_location"):
        if not getattr(cloud, name):
            raise UsageError(f"--runner={DATAFLOW} needs --{name}")
    for name in ("temp_location", "staging_location"):
        _need_cloud_storage(name, getattr(cloud, name))
    if worker.device == "tpu" and not machines.worker_zone:
        raise UsageError("--tpu needs --worker_zone, the zone of the reservation or quota, such as us-west1-c")
    if machines.worker_zone and machines.worker_zone.rpartition("-")[0] != cloud.region:
        raise UsageError(f"--worker_zone={machines.worker_zone} is not in --region={cloud.region}")


def _check_files(options: GenerateOptions) -> None:
    for pattern in options.input:
        _need_cloud_storage("input", pattern)
    _need_cloud_storage("output", options.output)
    _need_cloud_storage("jax_cache_dir", options.jax_cache_dir)
    _need_cloud_storage("executables", options.executables)
    weights = [("checkpoint", options.checkpoint), ("config", options.config)]
    for name, source in [*weights, *[("lora", file) for file, _ in options.lora]]:
        if source not in (None, EMBEDDED, BAKED_CHECKPOINT) and Path(source).exists():
            raise UsageError(
                f"--{name}={source} is on this machine, where the workers do not see it: copy it to gs://, or bake a "
                f"checkpoint into the image and give --checkpoint={BAKED_CHECKPOINT}"
            )


def _need_cloud_storage(name: str, path: str | None) -> None:
    if path and storage.is_local(path):
        raise UsageError(f"--{name}={path} is on this machine, where Dataflow does not see it: it must be on gs://")


def _check_image(beam_options: PipelineOptions, worker: Worker) -> None:
    image = beam_options.view_as(WorkerOptions).sdk_container_image
    if image and worker.accelerator and _STOCK_IMAGE.match(image):
        raise UsageError(
            f"--sdk_container_image={image} has no JAX for a {worker.device}: build one by docs/dataflow.md"
        )
    if not image and (worker.accelerator or not beam_options.view_as(SetupOptions).setup_file):
        raise UsageError("the workers need --sdk_container_image, an image with Lightmill in it: see docs/dataflow.md")


def _fill_in(beam_options: PipelineOptions, worker: Worker) -> None:
    setup = beam_options.view_as(SetupOptions)
    debug = beam_options.view_as(DebugOptions)
    # Of `__main__`, in which nothing of the graph is.
    setup.save_main_session = False
    if beam_options.view_as(WorkerOptions).sdk_container_image:
        # The Beam of the image is the one that runs; without this another would be staged and installed over it.
        _agree("--sdk_location", _unset(setup.sdk_location, "default"), "container")
        setup.sdk_location = "container"
    if _MANY_PROCESSES in (debug.experiments or []):
        raise UsageError(f"--experiments={_MANY_PROCESSES} would load a model in each of a worker's processes")
    # A device belongs to one process, which has one model.
    debug.experiments = _including(debug.experiments, _ONE_PROCESS)
    debug.number_of_worker_harness_threads = debug.number_of_worker_harness_threads or _HARNESS_THREADS
    if worker.accelerator:
        _attach(beam_options, worker)


def _attach(beam_options: PipelineOptions, worker: Worker) -> None:
    machines = beam_options.view_as(WorkerOptions)
    cloud = beam_options.view_as(GoogleCloudOptions)
    _agree("--machine_type", machines.machine_type, worker.machine_type)
    machines.machine_type = worker.machine_type
    machines.disk_size_gb = machines.disk_size_gb or _DISK_GB
    if machines.disk_size_gb < _MIN_DISK_GB:
        raise UsageError(f"--disk_size_gb={machines.disk_size_gb} is too small for the image: at least {_MIN_DISK_GB}")
    given = cloud.dataflow_service_options or []
    if worker.device == "tpu" and "enable_prime" in given:
        raise UsageError("--dataflow_service_options=enable_prime: Dataflow Prime does not support TPUs")
    for other in given:
        if other.startswith("worker_accelerator="):
            _agree("--dataflow_service_options", other, f"worker_accelerator={worker.accelerator}")
    cloud.dataflow_service_options = _including(given, f"worker_accelerator={worker.accelerator}")


def _including(values: Sequence[str] | None, value: str) -> list[str]:
    values = list(values or [])
    return values if value in values else [*values, value]


def _unset(value: str | None, default: str) -> str | None:
    return None if value == default else value


def _agree(flag: str, given: str | int | None, needed: str | int | None) -> None:
    if given is not None and given != needed:
        raise UsageError(f"{flag}={given} contradicts --tpu, --gpu or --device, of which it is {needed}: leave it out")
