"""The command line of `generate`: what a user may say, checked before anything is read or made."""

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apache_beam.options.pipeline_options import PipelineOptions

from model_handlers.fetch import EMBEDDED
from model_handlers.mesh import ALL_ON_DATA, MeshError, MeshShape
from model_handlers.recipe import MAX_SEED, MAX_SIDE, MAX_STEPS
from pipeline.workers import GPUS, TPUS
from transforms.formats import FORMATS
from transforms.pictures import DEFAULT_QUALITY, IMAGE_FORMATS
from transforms.records import FIELDS, RecordError, Value

# Runners whose workers are this machine, and mostly this process.
LOCAL_RUNNERS = ("FnApiRunner", "DirectRunner", "PrismRunner", "BundleBasedDirectRunner")
DEVICES = ("tpu", "gpu", "cpu")
PRESETS = ("turbo", "lightning", "lcm")
WINDOWS = 4
# Fields of a record that are flags as they stand: what their values are called, and what they are.
SETTINGS = {
    "guidance_rescale": ("SHARE", "of the guided output that is scaled back, 0 to 1 (default 0)"),
    "guidance_interval": ("LOW,HIGH", "guide only where LOW < sigma <= HIGH, which saves the rest (default: always)"),
    "clip_skip": ("N", "layers left out at the end of the text encoders (default 0)"),
    "negative_original_size": ("HEIGHT,WIDTH", "default: the prompt's; only together with --negative_target_size"),
    "negative_target_size": ("HEIGHT,WIDTH", "default: the prompt's"),
    "negative_crops_coords_top_left": ("TOP,LEFT", "default 0,0"),
    "eta": ("ETA", "share of fresh noise, 0 to 1, with DDIM and TCD (default 0)"),
    "timesteps": ("T,T,...", "a schedule instead of --num_inference_steps, such as 999,749,499,249"),
    "sigmas": ("S,S,...", "likewise, with the level at which sampling ends as the last one"),
    "denoising_end": ("F", "share of the training timesteps that come before the refiner's, 0 to 1 (default 0.8)"),
    "aesthetic_score": ("SCORE", "that the refiner is told, 0 to 10 (default 6)"),
    "negative_aesthetic_score": ("SCORE", "likewise for the negative prompt (default 2.5)"),
}
EXIT_STATUS = """
exit status:
  0  every record is accounted for: an image, made before, a duplicate, or rejected with its reason in OUTPUT/rejects
  1  the job failed; the same command goes on from the last finished shard
  2  the command cannot be carried out as given; nothing was made
  3  as 0, but more than --max_reject_fraction of the records were rejected

Flags that are not listed go to Apache Beam, such as --runner=DataflowRunner --project=... --region=...
"""


class UsageError(ValueError):
    """What the user asked for cannot be done; the message says what to change."""


@dataclass(frozen=True)
class ModelOptions:
    """What `generate` and `plan` are told alike; each flag is described in --help.

    None stands for a value that the checkpoint gives.
    """

    prompt_column: str | None
    id_column: str | None
    checkpoint: str
    config: str | None
    scheduler: str | None
    scheduler_options: Sequence[str]
    preset: str | None
    long_prompts: str
    prompt_windows: int | None
    dtype: str
    tpu: str | None
    mesh: MeshShape
    offload_encoders: bool
    seed: int
    width: int | None
    height: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    negative_prompt: str | None
    num_images_per_prompt: int
    clip_skip: int | None
    guidance_rescale: float | None
    guidance_interval: tuple[float, float] | None
    negative_original_size: tuple[int, int] | None
    negative_crops_coords_top_left: tuple[int, int] | None
    negative_target_size: tuple[int, int] | None
    eta: float | None
    timesteps: tuple[float, ...] | None
    sigmas: tuple[float, ...] | None
    denoising_end: float | None
    aesthetic_score: float | None
    negative_aesthetic_score: float | None
    verbose: bool


@dataclass(frozen=True)
class GenerateOptions(ModelOptions):
    """The parsed flags of `generate`."""

    input: Sequence[str]
    output: str
    retry_rejected: bool
    max_reject_fraction: float
    format: str
    image_format: str
    image_quality: int | None
    on_recipe_change: str
    variant: str | None
    refiner: str | None
    lora: Sequence[tuple[str, float]]
    allow_partial_lora: bool
    device: str | None
    per_device_batch_size: int
    devices_per_worker: int | None
    gpu: str | None
    jax_cache_dir: str | None
    executables: str | None
    images_per_shard: int | None
    price_per_hour: float | None


@dataclass(frozen=True)
class PlanOptions(ModelOptions):
    """The parsed flags of `plan`."""

    input: Sequence[str]
    topology: str | None
    per_device_batch_size: Sequence[int]
    price_per_chip_hour: float | None
    save: str | None


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `generate`; every one becomes a field of `GenerateOptions`."""
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="jsonl, json, csv, tsv, parquet or txt, also .gz, .bz2, .xz, .zst; globs and gs://; or a folder of .txt "
        "files, each one prompt with its name as id",
    )
    files.add_argument("--output", required=True, metavar="DIR", help="folder or gs://bucket/folder; resumed if begun")
    files.add_argument(
        "--format", choices=tuple(FORMATS), default="folder", help="a file an image, or a tar or a table a shard"
    )
    files.add_argument("--image_format", choices=tuple(IMAGE_FORMATS), default="png", help="default png")
    files.add_argument(
        "--image_quality", type=_percent, metavar="Q", help=f"of jpeg and webp, 1 to 100 (default {DEFAULT_QUALITY})"
    )
    files.add_argument(
        "--on_recipe_change",
        choices=("refuse", "new"),
        default="refuse",
        help="if DIR holds pictures of another recipe: refuse (default), or a new folder, DIR/recipes/<hash>",
    )
    _add_column_flags(files)
    files.add_argument("--retry_rejected", action="store_true", help="try again what the model rejected before")
    files.add_argument(
        "--max_reject_fraction", type=_fraction, default=1.0, metavar="F", help="exit with 3 above it (default 1)"
    )

    model = parser.add_argument_group("model")
    _add_model_flags(model)
    model.add_argument("--variant", metavar="NAME", help="of the weight files, such as fp16")
    model.add_argument(
        "--refiner",
        metavar="DIR",
        help="of SDXL: folder or hub id of a checkpoint that ends, from --denoising_end on, what the other one begins",
    )
    model.add_argument(
        "--lora",
        nargs="+",
        action="extend",
        default=[],
        type=_lora,
        metavar="FILE[:WEIGHT]",
        help="merged into the checkpoint, each times its weight (default 1): .safetensors, a file, gs://... or on the "
        "hub, OWNER/NAME/FILE",
    )
    model.add_argument(
        "--allow_partial_lora", action="store_true", help="leave out what of them fits nothing (default: refuse)"
    )
    model.add_argument("--device", choices=DEVICES, help="must be there (default: the best that is)")
    model.add_argument("--per_device_batch_size", type=_positive, default=4, metavar="N", help="default 4")
    model.add_argument(
        "--devices_per_worker", type=_positive, metavar="N", help="chips of a worker (default: those of this machine)"
    )
    model.add_argument(
        "--tpu", choices=tuple(TPUS), help="of Dataflow's workers; sets their machines and container too"
    )
    model.add_argument("--gpu", choices=tuple(GPUS), help="likewise")
    model.add_argument("--jax_cache_dir", metavar="DIR", help="JAX's compilation cache, a folder or gs:// folder")
    model.add_argument(
        "--executables",
        metavar="DIR",
        help="folder or gs:// folder of `plan --save`: a program that is there is loaded, not compiled; it runs as it "
        "stands, so DIR must be one that only you can write to",
    )

    _add_record_flags(parser)

    job = parser.add_argument_group("job")
    job.add_argument(
        "--images_per_shard", type=_positive, metavar="N", help="committed together (default: whole batches, about 64)"
    )
    job.add_argument(
        "--price_per_hour",
        type=_price,
        metavar="P",
        help="of all workers together, in any currency: adds what 1,000 images cost to the report",
    )
    job.add_argument("--verbose", action="store_true", help="log what Beam and JAX say, and tracebacks")


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `plan`; every one becomes a field of `PlanOptions`."""
    device = parser.add_argument_group("device").add_mutually_exclusive_group(required=True)
    device.add_argument("--tpu", choices=tuple(TPUS), help="as of `generate`")
    device.add_argument(
        "--topology", metavar="NAME", help="such as v5e:2x2, v6e:2x2 or v5p:2x2x1; or cpu, for this machine"
    )
    model = parser.add_argument_group("model")
    _add_model_flags(model)
    model.add_argument(
        "--per_device_batch_size",
        type=_positive,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="each is compiled (default 1 2 4 8)",
    )
    _add_record_flags(parser)
    job = parser.add_argument_group("job")
    job.add_argument("--input", nargs="+", default=[], metavar="FILE", help="prompts to plan for, as of `generate`")
    _add_column_flags(job)
    job.add_argument(
        "--price_per_chip_hour", type=_price, metavar="P", help="in any currency: adds what the images would cost"
    )
    job.add_argument(
        "--save",
        metavar="DIR",
        help="folder or gs:// folder for the compiled programs, which workers load by --executables=DIR",
    )
    job.add_argument("--verbose", action="store_true", help="log more, and tracebacks")


def _add_column_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt_column", metavar="NAME", help="default: prompt, caption, text or prompt_en")
    group.add_argument("--id_column", metavar="NAME", help="default: id; without one, FILE:ROW is the record's id")


def _add_model_flags(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--checkpoint",
        default=EMBEDDED,
        metavar="DIR",
        help="folder in diffusers' layout or FILE.safetensors in the original one, local, gs:// or on the hub "
        "(default: the small one in this package)",
    )
    model.add_argument(
        "--config", metavar="DIR", help="of a single file: folder or hub id that its configs and tokenizers come from"
    )
    model.add_argument("--scheduler", metavar="CLASS", help="diffusers' name of a sampler (default: the checkpoint's)")
    model.add_argument(
        "--scheduler_options",
        nargs="+",
        default=(),
        metavar="NAME=VALUE",
        help="take the place of those in the checkpoint's scheduler_config.json, such as use_karras_sigmas=true",
    )
    model.add_argument(
        "--preset", choices=PRESETS, help="scheduler, its options, steps and guidance of a few-step checkpoint"
    )
    model.add_argument(
        "--long_prompts",
        choices=("cut", "chunk"),
        default="cut",
        help="cut after 75 tokens as diffusers does (default), or read in windows of 75, each by itself",
    )
    model.add_argument(
        "--prompt_windows", type=_windows, metavar="N", help=f"of a prompt with chunk, at most (default {WINDOWS})"
    )
    model.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: float32 on CPU, else bfloat16"
    )
    model.add_argument(
        "--mesh",
        type=_mesh,
        default=ALL_ON_DATA,
        metavar="AXIS=N,...",
        help="how the chips of a worker share the work: data (rows of the batch), fsdp (rows, and the weights too), "
        "context (the height of each picture), such as data=2,fsdp=2 (default: all on data)",
    )
    model.add_argument(
        "--offload_encoders",
        action="store_true",
        help="keep the text encoders in the host's memory; each batch brings them to the chips for as long as it reads "
        "its prompts",
    )


def _add_record_flags(parser: argparse.ArgumentParser) -> None:
    records = parser.add_argument_group("defaults for records that do not say otherwise")
    records.add_argument(
        "--seed", type=_seed, default=0, help="of the run; a record without a seed gets its own, derived from it"
    )
    records.add_argument("--width", type=_side, metavar="PIXELS", help="default: the checkpoint's")
    records.add_argument("--height", type=_side, metavar="PIXELS", help="default: the checkpoint's")
    records.add_argument("--num_inference_steps", type=_steps, metavar="N", help="default 20, or the preset's")
    records.add_argument("--guidance_scale", type=_guidance, metavar="G", help="default 5, or the preset's; 1 is none")
    records.add_argument(
        "--negative_prompt", metavar="TEXT", help="default: none, which is not the same as an empty one"
    )
    records.add_argument("--num_images_per_prompt", type=_positive, default=1, metavar="N", help="default 1")
    for name, (metavar, text) in SETTINGS.items():
        records.add_argument(f"--{name}", type=_field(name), metavar=metavar, help=text)


def add_verify_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `verify`."""
    parser.add_argument("output", metavar="DIR", help="an output of generate or pack, a folder or gs://bucket/folder")
    parser.add_argument("--verbose", action="store_true", help="log more, and tracebacks")


def add_pack_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `pack`."""
    parser.add_argument("source", metavar="DIR", help="an output of generate, a folder or gs://bucket/folder")
    parser.add_argument("--format", choices=tuple(FORMATS), required=True, help="of the output")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder or gs://bucket/folder of its own")
    parser.add_argument(
        "--samples_per_shard", type=_positive, default=256, metavar="N", help="in memory at a time (default 256)"
    )
    parser.add_argument("--verbose", action="store_true", help="log more, and tracebacks")


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `report`."""
    parser.add_argument("output", metavar="DIR", help="an output of generate, a folder or gs://bucket/folder")
    parser.add_argument("--verbose", action="store_true", help="log more, and tracebacks")


def add_show_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `show`."""
    parser.add_argument("picture", metavar="PICTURE", help="a png, jpeg or webp file of generate, local or gs://")
    parser.add_argument("--verbose", action="store_true", help="log more, and tracebacks")


def add_selftest_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `selftest`."""
    parser.add_argument("--device", choices=DEVICES, help="must be there (default: the best that is)")
    parser.add_argument("--tpu", choices=tuple(TPUS), help="whose container variables are set, as on Dataflow")
    parser.add_argument("--verbose", action="store_true", help="log more, and tracebacks")


def beam_options(arguments: Sequence[str], own_flags: Sequence[str]) -> PipelineOptions:
    """Beam's options from the flags that are not ours.

    Raises:
      UsageError: for a flag that Beam does not know either; Beam itself would drop it without an error.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for kind in PipelineOptions.__subclasses__():
        # Beam declares some flags in two of its classes.
        declared = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
        kind._add_argparse_args(declared)  # type: ignore[arg-type]  # Beam's own parser only adds a check
        for action in declared._actions:
            if not set(action.option_strings) & set(parser._option_string_actions):
                parser._add_action(action)
    try:
        _, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [*own_flags, *parser._option_string_actions]
        near = difflib.get_close_matches(flag, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{flag} is neither a flag of lightmill nor of Apache Beam{hint}")
    return PipelineOptions(list(arguments))


def _lora(text: str) -> tuple[str, float]:
    source, colon, weight = text.rpartition(":")
    if not colon or "/" in weight:  # the colon of gs:// or of a folder's name
        return text, 1.0
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not source or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:WEIGHT, as {weight!r} is not a finite number")
    return source, number


def _mesh(text: str) -> MeshShape:
    try:
        return MeshShape.parse(text)
    except MeshError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _field(name: str) -> Callable[[str], Value]:
    """The parser of a record's field, for a flag of the same name."""

    def parse(text: str) -> Value:
        try:
            return FIELDS[name](name, text)
        except RecordError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _positive(text: str) -> int:
    return _whole(text, 1, 10**6)


def _percent(text: str) -> int:
    return _whole(text, 1, 100)


def _side(text: str) -> int:
    return _whole(text, 1, MAX_SIDE)


def _windows(text: str) -> int:
    return _whole(text, 2, 32)


def _steps(text: str) -> int:
    return _whole(text, 1, MAX_STEPS)


def _seed(text: str) -> int:
    return _whole(text, 0, MAX_SEED)


def _whole(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return int(text)


def _guidance(text: str) -> float:
    return _number(text, 1000.0)


def _fraction(text: str) -> float:
    return _number(text, 1.0)


def _price(text: str) -> float:
    return _number(text, 1e6)


def _number(text: str, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {high:g}")
    return value
