"""`lightmill plan`: what a job will take on a kind of TPU, estimated by compiling its programs for it, on any machine.

No weight is read and nothing is run. Memory is what the compiler lays out; time is what it estimates, with loops
counted as often as they run (see `costs`). Reading, encoding, writing and starting workers come on top of it.
"""

import dataclasses
import functools
import importlib.metadata
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from model_handlers import executables, fetch, program, sampling
from model_handlers import mesh as meshes
from model_handlers.checkpoint import CheckpointError
from model_handlers.config import ConfigError
from model_handlers.costs import Costs, Work, matmul_flops
from model_handlers.families import family_of
from model_handlers.mesh import MeshError
from model_handlers.recipe import ImageRequest, Recipe
from model_handlers.stable_diffusion.model import TEXT_ENCODERS, StableDiffusion
from model_handlers.topologies import Chip, TopologyError, chip_of, devices_of
from pipeline.job import settle_recipe
from pipeline.options import PlanOptions, UsageError
from pipeline.workers import TPUS
from transforms import storage
from transforms.read import InputError, match_inputs, read_file
from transforms.records import PromptRecord, RecordError, Reject
from transforms.requests import expand
from transforms.rows import Columns

log = logging.getLogger("lightmill")

GIB = 2**30
NOT_RUN = "These are estimates by a compiler on this machine: nothing was run on a TPU."
Size = tuple[int, int]  # height and width in pixels


@dataclass(frozen=True)
class Demand:
    """Pictures of one size, with all their steps and all the evaluations of the network that these take."""

    images: int = 0
    steps: int = 0
    evaluations: int = 0

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.images + other.images, self.steps + other.steps, self.evaluations + other.evaluations)


class Prompts(NamedTuple):
    """What is to be made: by size, with a request of each size; and what of the input gives nothing."""

    demands: dict[Size, Demand]
    examples: dict[Size, ImageRequest]
    rejected: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class Estimate:
    """What one program takes on one chip.

    Attributes:
      problem: why it cannot be; "" if it fits, and otherwise the rest is empty.
      memory: bytes by their use, in the order of the table.
      image: the work of one image of the demand, and `floor` the seconds that its matrix products take at the chip's
        peak; without seconds on a CPU.
      unknown_calls: as of `Costs`.
    """

    batch: int
    size: Size
    problem: str = ""
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    image: Work = dataclasses.field(default_factory=Work)
    floor: float = 0.0
    unknown_calls: int = 0


def plan(options: PlanOptions) -> str:
    """Compiles the programs of a job for a topology, saves them if asked to, and returns the report.

    Raises:
      UsageError: something that the user gave cannot work.
    """
    topology = TPUS[options.tpu].topology if options.tpu else options.topology
    assert topology is not None  # one of the two flags is required
    # Or JAX would look for a TPU of this machine, which only the compiler for TPUs is wanted of.
    jax.config.update("jax_platforms", "cpu")
    try:
        chip, mesh = chip_of(topology), meshes.make_mesh(devices_of(topology), options.mesh)
        if options.price_per_chip_hour is not None and not chip:
            raise UsageError("--price_per_chip_hour: there are no estimates of time for a CPU, only for TPUs")
        root = fetch.checkpoint_folder(options.checkpoint, config=options.config, weights=False)
        recipe, sampler = settle_recipe(
            options, root, checkpoint="", device="tpu" if chip else "cpu", per_device_batch_size=1
        )
        prompts = _read(options, recipe, sampler) if options.input else _one_picture(recipe, sampler)
        model = _outline(root, recipe, mesh, TEXT_ENCODERS if options.offload_encoders else ())
        floors = _floors(root, recipe, chip, prompts) if chip else {}
        estimates = [
            _estimate(options, model, mesh, chip, batch, prompts.demands[size], request, floors.get(size, 0.0))
            for batch in sorted(set(options.per_device_batch_size))
            for size, request in prompts.examples.items()
        ]
    except (CheckpointError, ConfigError, InputError, MeshError, TopologyError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--save={options.save}: {error}") from error
    return "\n".join(_report(options, topology, mesh.size, chip, recipe, prompts, estimates))


def _outline(root: Path, recipe: Recipe, mesh: jax.sharding.Mesh, on_host: Sequence[str] = ()) -> StableDiffusion:
    """The model as shapes, which lie on a mesh."""
    place = meshes.of_weights(mesh, on_host)
    return family_of(root).outline(root, prompt_windows=recipe.prompt_windows, dtype=recipe.dtype, place=place)


def _one_picture(recipe: Recipe, sampler: sampling.Sampler) -> Prompts:
    request = expand(PromptRecord("", 1, "", ""), recipe, sampler)[0]
    size = request.height, request.width
    return Prompts({size: _demand(request, sampler)}, {size: request})


def _read(options: PlanOptions, recipe: Recipe, sampler: sampling.Sampler) -> Prompts:
    """Reads the input as `generate` does, and adds up what it asks for."""
    demands: dict[Size, Demand] = {}
    examples: dict[Size, ImageRequest] = {}
    seen: set[str] = set()
    rejected = duplicates = 0
    for file in match_inputs(options.input, options.prompt_column, options.id_column):
        for record in read_file(file, Columns(options.prompt_column, options.id_column)):
            try:
                requests = [] if isinstance(record, Reject) else expand(record, recipe, sampler)
            except RecordError:
                requests = []
            rejected += not requests
            for request in requests:
                size = request.height, request.width
                if request.key in seen:
                    duplicates += 1
                    continue
                seen.add(request.key)
                demands[size] = demands.get(size, Demand()) + _demand(request, sampler)
                examples.setdefault(size, request)
    if not demands:
        raise UsageError(f"--input: none of {rejected:,} records gives a picture; `generate` says why")
    return Prompts(demands, examples, rejected, duplicates)


def _demand(request: ImageRequest, sampler: sampling.Sampler) -> Demand:
    steps = _steps(request.num_inference_steps, request.settings, sampler)
    start, stop = sampling.guided(request, sampler)
    return Demand(1, steps, steps + max(0, min(stop, steps) - start))


@functools.lru_cache(maxsize=1024)
def _steps(num_inference_steps, settings, sampler):
    return sum(map(len, sampling.tables_of(num_inference_steps, settings, sampler)))


def _estimate(
    options: PlanOptions,
    model: StableDiffusion,
    mesh: jax.sharding.Mesh,
    chip: Chip | None,
    batch: int,
    demand: Demand,
    request: ImageRequest,
    floor: float,
) -> Estimate:
    """Compiles the program for one batch a chip, saves it if asked to, and estimates what it takes."""
    size = request.height, request.width
    lowered = _trace(model, mesh, batch, request).lower()
    started = time.monotonic()
    try:
        compiled = executables.compile_anew(lowered, program.compiler_options(mesh))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise UsageError(f"{_named(size)}, batch {batch}: the program does not compile: {error}") from error
        return Estimate(batch, size, str(error).removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0])
    log.info("compiled %s pixels, batch %d a chip, in %.1f s", _named(size), batch, time.monotonic() - started)
    if options.save:
        key = executables.key_of(lowered, mesh, program.compiler_options(mesh))
        about = f"{_named(size)} pixels at batch {batch} on each of {mesh.size}"
        for name, data in executables.pack(compiled, key, about).items():
            storage.write_file(options.save, name, data)
    costs = Costs(compiled, chip)
    # A chip has its rows to itself, or shares them with others along context.
    image = (options.mesh.context / batch) * _of_one_image([costs(trips) for trips in _TRIPS], demand)
    return Estimate(batch, size, "", _memory(compiled, chip), image, floor, costs.unknown_calls)


def _trace(model: StableDiffusion, mesh: jax.sharding.Mesh, batch: int, request: ImageRequest) -> jax.stages.Traced:
    inputs, _ = model.prepare([request] * (batch * meshes.ways("batch", mesh)))
    return program.trace(nnx.split(model.networks), inputs, mesh, request.height, request.width)


def _floors(root: Path, recipe: Recipe, chip: Chip, prompts: Prompts) -> dict[Size, float]:
    """By size, the least seconds that an image can take on a chip, in whatever batch."""
    plain = meshes.make_mesh(jax.devices("cpu")[:1])
    model, floors = _outline(root, recipe, plain), {}
    for size, request in prompts.examples.items():
        traced = _trace(model, plain, 1, request).jaxpr
        works = [Work(flops=matmul_flops(traced, trips)) for trips in _TRIPS]
        floors[size] = _of_one_image(works, prompts.demands[size]).flops / chip.flops
    return floors


# The program is a loop over steps around a loop over the passes of guidance: how often they run, for the three terms of
# what it costs, which is what no step needs, what each step adds and what each evaluation of the network adds.
_TRIPS = ((0, 0), (1, 0), (1, 1))


def _of_one_image(works: Sequence[Work], demand: Demand) -> Work:
    none, step, evaluation = works
    steps, evaluations = demand.steps / demand.images, demand.evaluations / demand.images
    return none + steps * (step - none) + evaluations * (evaluation - step)


def _memory(compiled: jax.stages.Compiled, chip: Chip | None) -> dict[str, float]:
    stats: Any = compiled.memory_analysis()
    used: dict[str, float] = {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    return {**used, "left over": chip.memory - sum(used.values())} if chip else used


def _report(
    options: PlanOptions,
    topology: str,
    chips: int,
    chip: Chip | None,
    recipe: Recipe,
    prompts: Prompts,
    estimates: Sequence[Estimate],
) -> list[str]:
    compiler = f"JAX {jax.__version__}"
    if chip:
        compiler += f", libtpu {importlib.metadata.version('libtpu')}"
    lines = [f"{options.checkpoint} in {recipe.dtype} on {topology}, {chips} device(s); compiled by {compiler}"]
    if options.input:
        lines.append(
            f"{', '.join(options.input)}: {_total(prompts).images:,} images, {prompts.duplicates:,} duplicates, "
            f"{prompts.rejected:,} records rejected"
        )
    for size, demand in prompts.demands.items():
        each = f"{demand.steps / demand.images:.1f} steps, {demand.evaluations / demand.images:.1f} evaluations"
        lines.append(f"  {demand.images:,} of {_named(size)} pixels: on average {each} of the UNet each")
    lines += ["", *_table(estimates, chip, options.price_per_chip_hour)]
    for estimate in estimates:
        if estimate.problem:
            lines.append(f"batch {estimate.batch}, {_named(estimate.size)}: {estimate.problem}")
    lines += [
        "",
        *_legend(chip, max(estimate.unknown_calls for estimate in estimates)),
        "",
        *_choice(options, chips, chip, prompts, estimates),
    ]
    return lines


def _table(estimates: Sequence[Estimate], chip: Chip | None, price: float | None) -> list[str]:
    """A line for each program; memory in GiB a chip, the rest for one image."""
    uses = next((list(estimate.memory) for estimate in estimates if estimate.memory), [])
    rows = [["batch", "pixels", *uses, "TFLOP", "GB"]]
    if chip:
        rows[0] += ["seconds", "floor", "images/hour/chip"]
    if price is not None:
        rows[0].append("1,000 cost")
    for estimate in estimates:
        row = [str(estimate.batch), _named(estimate.size)]
        if estimate.problem:
            rows.append([*row, "does not fit"])
            continue
        row += [f"{used / GIB:.2f}" for used in estimate.memory.values()]
        row += [f"{estimate.image.flops / 1e12:.3g}", f"{estimate.image.bytes / 1e9:.3g}"]
        if chip:
            row += [f"{estimate.image.seconds:.3g}", f"{estimate.floor:.3g}", f"{3600 / estimate.image.seconds:,.0f}"]
        if price is not None:
            row.append(f"{1000 * estimate.image.seconds / 3600 * price:.4g}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _legend(chip: Chip | None, unknown_calls: int) -> list[str]:
    lines = ["Batch: --per_device_batch_size. Memory in GiB a chip; operations, bytes and seconds for one image."]
    if chip:
        lines += [
            f"A chip has {chip.flops / 1e12:,.0f} TFLOP/s, {chip.bandwidth / 1e9:,.0f} GB/s and "
            f"{chip.memory / GIB:.2f} GiB for programs ({chip.source}).",
            "Seconds: the compiler's own estimate, its loops counted as often as they run. Floor: the matrix products "
            "and convolutions alone, at peak.",
            NOT_RUN,
        ]
    if unknown_calls:
        lines.append(f"Up to {unknown_calls} calls, of which the compiler knows no time, are counted as taking none.")
    return lines


def _choice(
    options: PlanOptions, chips: int, chip: Chip | None, prompts: Prompts, estimates: Sequence[Estimate]
) -> list[str]:
    """The batch of the least time for all that is to be made, and what that takes."""
    seconds: dict[int, float] = {}
    for batch in {estimate.batch for estimate in estimates}:
        of_batch = [estimate for estimate in estimates if estimate.batch == batch]
        if not any(estimate.problem for estimate in of_batch):
            seconds[batch] = sum(prompts.demands[e.size].images * e.image.seconds for e in of_batch)
    if not seconds:
        return ["None of these batches fits."]
    lines = [f"Saved: give --executables={options.save} to `generate` with the same settings."] if options.save else []
    if not chip:
        return [*lines, "Which batch is best cannot be told for a CPU."]
    best = min(seconds, key=lambda batch: (seconds[batch], batch))
    hours, images = seconds[best] / 3600, _total(prompts).images
    lines.append(f"Best: --per_device_batch_size={best}, about {images / hours:,.0f} images an hour and chip.")
    if options.input:
        cost = f", for {hours * options.price_per_chip_hour:.4g}" if options.price_per_chip_hour is not None else ""
        lines.append(f"All of the input: {hours:.3g} chip-hours, {hours / chips:.3g} h on {chips} chip(s){cost}.")
    return lines


def _total(prompts: Prompts) -> Demand:
    return functools.reduce(Demand.__add__, prompts.demands.values())


def _named(size: Size) -> str:
    height, width = size
    return f"{width} x {height}"
