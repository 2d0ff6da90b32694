"""Makes the reference's checkpoints and outputs, with diffusers on torch; run in its own environment by `make parity`.

    python -m tests.parity.reference OUT                                  a folder for each case
    python -m tests.parity.reference --golden tests/parity                golden.npz and real_width.json in there

OUT/<case> is a checkpoint saved by `save_pretrained`, OUT/<case>.npz what diffusers makes of it. Arrays are channels
last, as ours are. OUT/<case>.safetensors is the same checkpoint as a single file in the original layout.
"""

import argparse
import contextlib
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.image_processor import VaeImageProcessor
from safetensors.numpy import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks.scenes.scenes import VOCABULARY
from benchmarks.scenes.tokenizer import write_tokenizers
from tests import layouts
from tests.parity import adapters, cases, sampling
from tests.parity.cases import Case, Picture
from tests.parity.sampling import Sampling, Trajectory

NETWORKS = {
    "text_encoder": lambda settings: CLIPTextModel(CLIPTextConfig(**settings)),
    "text_encoder_2": lambda settings: CLIPTextModelWithProjection(CLIPTextConfig(**settings)),
    "unet": lambda settings: UNet2DConditionModel(**settings),
    "vae": lambda settings: AutoencoderKL(**settings),
}
TEXT_SETTINGS = ("prompt_2", "negative_prompt_2", "clip_skip")
SCHEDULES = ("timesteps", "sigmas")
SIZES = ("original_size", "crops_coords_top_left", "target_size")
SCORES = ("aesthetic_score", "negative_aesthetic_score")


def build(case: Case) -> DiffusionPipeline:
    networks = {}
    for name, make in NETWORKS.items():
        if getattr(case, name) is None:
            continue
        network = make(getattr(case, name)).eval()
        state = network.state_dict()
        weights = {key: torch.from_numpy(cases.weight(name, key, tuple(state[key].shape))) for key in state}
        network.load_state_dict(weights)
        networks[name] = network
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizers(Path(folder), VOCABULARY)
        tokenizers = {name: CLIPTokenizer.from_pretrained(f"{folder}/{name}") for name in ("tokenizer", "tokenizer_2")}
    scheduler = getattr(diffusers, case.sampler)(**case.scheduler)
    if case.text_encoder is None:
        pipeline = StableDiffusionXLImg2ImgPipeline(
            **networks,
            text_encoder=None,
            tokenizer=None,
            tokenizer_2=tokenizers["tokenizer_2"],
            scheduler=scheduler,
            requires_aesthetics_score=True,
            force_zeros_for_empty_prompt=case.force_zeros_for_empty_prompt,
            add_watermarker=False,
        )
    elif case.text_encoder_2:
        pipeline = StableDiffusionXLPipeline(
            **networks,
            **tokenizers,
            scheduler=scheduler,
            force_zeros_for_empty_prompt=case.force_zeros_for_empty_prompt,
            add_watermarker=False,
        )
    else:
        pipeline = StableDiffusionPipeline(
            **networks,
            tokenizer=tokenizers["tokenizer"],
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def outputs(pipeline: DiffusionPipeline, case: Case, refiner: DiffusionPipeline | None = None) -> dict[str, np.ndarray]:
    given = {name: torch.from_numpy(value) for name, value in case.inputs.items()}
    results: dict[str, list] = {}

    def keep(**tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            value = tensor.numpy()
            results.setdefault(name, []).extend(value.transpose(0, 2, 3, 1) if value.ndim == 4 else value)

    keep(
        step=pipeline.unet(
            given["step_latents"],
            given["step_timesteps"],
            given["step_text"],
            added_cond_kwargs={"text_embeds": given["step_pooled"], "time_ids": given["step_time_ids"]}
            if case.text_encoder_2
            else None,
        ).sample
    )
    encoded = pipeline.vae.encode(given["images"]).latent_dist
    keep(mean=encoded.mean, log_variance=encoded.logvar, decoded=pipeline.vae.decode(given["latents"]).sample)
    # With clip_skip, the pipeline looks for the only child of its text encoder, which transformers 5 took away.
    with mock.patch.object(CLIPTextModel, "text_model", property(lambda self: self), create=True):
        for picture, noise in zip(case.pictures, given["noise"], strict=True):
            embedded = embed(pipeline, case, picture)
            keep(**embedded)
            if refiner:
                image = draw_refined(pipeline, refiner, case, picture, noise)
            else:
                image = draw(pipeline, case, picture, noise)
            keep(image=torch.from_numpy(image.transpose(0, 3, 1, 2)))
            rounded = np.asarray(VaeImageProcessor.numpy_to_pil(image)[0])
            results.setdefault("rounded", []).append(rounded)
    return {name: np.stack(values) for name, values in results.items()}


def embed(pipeline: DiffusionPipeline, case: Case, picture: Picture) -> dict[str, torch.Tensor]:
    settings = {name: picture.settings[name] for name in TEXT_SETTINGS if name in picture.settings}
    if not case.text_encoder_2:
        embedded = pipeline.encode_prompt(picture.prompt, "cpu", 1, True, picture.negative_prompt, **settings)
        return dict(zip(("text", "negative_text"), embedded, strict=True))
    names = ("text", "negative_text", "pooled", "negative_pooled")
    if case.prompt_windows == 1:
        embedded = pipeline.encode_prompt(picture.prompt, negative_prompt=picture.negative_prompt, **settings)
        return dict(zip(names, embedded, strict=True))
    skip = settings.get("clip_skip", 0)
    text, pooled = embed_windows(pipeline, (picture.prompt, settings.get("prompt_2", picture.prompt)), case, skip)
    if picture.negative_prompt is None:
        negative_text, negative_pooled = torch.zeros_like(text), torch.zeros_like(pooled)
    else:
        negative_text, negative_pooled = embed_windows(pipeline, (picture.negative_prompt,) * 2, case)
    return dict(zip(names, (text, negative_text, pooled, negative_pooled), strict=True))


def adapted(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Writes the files of `adapters` to the folder, and gives what becomes of their case with each load of them."""
    case = adapters.case()
    pipeline = build(case)
    shapes = {
        f"{network}.{_published(network, key)}": tuple(tensor.shape)
        for network in adapters.ALPHAS
        for key, tensor in getattr(pipeline, network).state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in adapters.FILES:
        noted = adapters.metadata(name)
        header = {"format": "pt", **({"lora_adapter_metadata": json.dumps(noted)} if noted else {})}
        save_file(adapters.tensors(name, shapes), folder / f"{name}.safetensors", header)
    for number, files in enumerate(adapters.LOADS.values()):
        for name, _ in files:
            pipeline.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)
        pipeline.set_adapters([name for name, _ in files], [weight for _, weight in files])
        yield f"lora_{number}", outputs(pipeline, case)
        pipeline.unload_lora_weights()


def windows_of(tokenizer: CLIPTokenizer, prompt: str) -> list[list[int]]:
    """A prompt's tokens in runs of 75, one at least."""
    ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
    return [ids[i : i + 75] for i in range(0, len(ids), 75)] or [[]]


def embed_windows(
    pipeline: DiffusionPipeline, prompts: tuple[str, str], case: Case, skip: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's encoders over windows of 77, as many as the case allows, end to end; pooled of the first."""
    states = []
    encoders = (pipeline.tokenizer, pipeline.text_encoder), (pipeline.tokenizer_2, pipeline.text_encoder_2)
    for prompt, (tokenizer, encoder) in zip(prompts, encoders, strict=True):
        windows = windows_of(tokenizer, prompt)
        windows += [[]] * (case.prompt_windows - len(windows))
        rows = [[tokenizer.bos_token_id, *window, tokenizer.eos_token_id] for window in windows]
        rows = [row + [tokenizer.pad_token_id] * (77 - len(row)) for row in rows]
        output = encoder(torch.tensor(rows), output_hidden_states=True)
        states.append(output.hidden_states[-2 - skip].flatten(0, 1)[None])
    return torch.cat(states, dim=-1), output[0][:1]


def draw(pipeline: DiffusionPipeline, case: Case, picture: Picture, noise: torch.Tensor) -> np.ndarray:
    settings = {name: list(value) if name in SCHEDULES else value for name, value in picture.settings.items()}
    first_scale, changes = picture.guidance_scale, contextlib.nullcontext()
    if interval := settings.pop("guidance_interval", None):
        # The pipeline has no interval; a scale of 1 is no guidance, once it is made to evaluate both prompts for it.
        pipeline.scheduler.set_timesteps(picture.num_inference_steps)
        sigmas = pipeline.scheduler.sigmas[:-1].tolist()
        scales = [picture.guidance_scale if interval[0] < sigma <= interval[1] else 1.0 for sigma in sigmas]

        def next_scale(pipeline, i, timestep, tensors):
            pipeline._guidance_scale = scales[min(i + 1, len(scales) - 1)]
            return tensors

        first_scale, settings["callback_on_step_end"] = scales[0], next_scale
        changes = mock.patch.object(type(pipeline), "do_classifier_free_guidance", True)
    if case.prompt_windows == 1:
        settings |= {"prompt": picture.prompt, "negative_prompt": picture.negative_prompt}
    else:
        # The pipeline attends to all that it gets, so it gets as many windows as the longer of the prompts has.
        prompts = [picture.prompt, *([picture.negative_prompt or ""] if picture.guidance_scale > 1 else [])]
        length = 77 * max(len(windows_of(pipeline.tokenizer, prompt)) for prompt in prompts)
        for name, value in embed(pipeline, case, picture).items():
            argument = name.replace("text", "prompt_embeds").replace("pooled", "pooled_prompt_embeds")
            settings[argument] = value[:, :length] if "text" in name else value
        settings = {name: value for name, value in settings.items() if name not in TEXT_SETTINGS}
    with changes:
        return _draw(pipeline, case, picture, noise, guidance_scale=first_scale, **settings)


def draw_refined(
    pipeline: DiffusionPipeline, refiner: DiffusionPipeline, case: Case, picture: Picture, noise: torch.Tensor
) -> np.ndarray:
    """As the documentation of diffusers joins base and refiner, an ensemble of experts."""
    settings = {"prompt": picture.prompt, "negative_prompt": picture.negative_prompt, **picture.settings}
    share = settings.pop("denoising_end", 0.8)
    scores = {name: settings.pop(name) for name in SCORES if name in settings}
    settings["guidance_scale"] = picture.guidance_scale
    latents = _draw(pipeline, case, picture, noise, output_type="latent", denoising_end=share, **settings)
    return refiner(
        image=latents,
        num_inference_steps=picture.num_inference_steps,
        denoising_start=share,
        **{name: getattr(picture, name) for name in SIZES},
        output_type="np",
        **scores,
        **settings,
    ).images


def _draw(
    pipeline: DiffusionPipeline,
    case: Case,
    picture: Picture,
    noise: torch.Tensor,
    output_type: str = "np",
    **settings,
) -> np.ndarray:
    sizes = SIZES if case.text_encoder_2 else ()
    return pipeline(
        height=case.height,
        width=case.width,
        num_inference_steps=picture.num_inference_steps,
        latents=noise[None],
        **{name: getattr(picture, name) for name in sizes},
        output_type=output_type,
        **settings,
    ).images


def write_single_file(pipeline: DiffusionPipeline, case: Case, folder: Path) -> None:
    """Writes `folder` as a single file and makes sure that diffusers reads the same weights from it."""
    path = folder.with_suffix(".safetensors")
    layouts.write_single_file(folder, path, cases.SINGLE_FILES[case.name], case.unet["layers_per_block"])
    again = type(pipeline).from_single_file(path, config=str(folder), local_files_only=True)
    for name in NETWORKS:
        if (network := getattr(pipeline, name, None)) is not None:
            torch.testing.assert_close(getattr(again, name).state_dict(), network.state_dict(), rtol=0, atol=0)


def sample(how: Sampling, count: int) -> Trajectory:
    """A loop as in the pipeline, with our own noise wherever the scheduler asks for some."""
    (scheduler, timesteps), *others = stages(how, count)
    takes_eta = "eta" in inspect.signature(scheduler.step).parameters
    trajectory = Trajectory()

    def noise(*_, **__):
        return torch.from_numpy(sampling.fresh_noise(len(trajectory.inputs) - 1))[None]

    latents = torch.from_numpy(sampling.initial_noise())[None] * scheduler.init_noise_sigma
    with mock.patch.object(sys.modules[type(scheduler).__module__], "randn_tensor", noise, create=True):
        for stage, its_timesteps in ((scheduler, timesteps), *others):
            for timestep in its_timesteps:
                scaled = stage.scale_model_input(latents, timestep).numpy()[0]
                output = torch.from_numpy(trajectory.see(timestep, scaled, how.kind))[None]
                latents = stage.step(output, timestep, latents, **({"eta": how.eta} if takes_eta else {})).prev_sample
    trajectory.final = latents.numpy()[0]
    return trajectory


def stages(how: Sampling, count: int) -> list[tuple[diffusers.SchedulerMixin, torch.Tensor]]:
    """The scheduler of each stage and the timesteps that it goes through, cut as the two pipelines of XL cut them."""

    def make() -> diffusers.SchedulerMixin:
        scheduler = getattr(diffusers, how.scheduler).from_config(how.options)
        custom = {name: list(getattr(how, name)) for name in ("timesteps", "sigmas") if getattr(how, name)}
        scheduler.set_timesteps(**(custom or {"num_inference_steps": count}))
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        return scheduler

    first = make()
    if how.denoising_end is None:
        return [(first, first.timesteps)]
    cutoff = round(1000 - how.denoising_end * 1000)
    second = make()
    left, _ = StableDiffusionXLImg2ImgPipeline.get_timesteps(
        SimpleNamespace(scheduler=second), 0, 0, "cpu", how.denoising_end
    )
    return [(first, first.timesteps[first.timesteps >= cutoff]), (second, left)]


def samples() -> dict[str, np.ndarray]:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # algorithms that are to be removed
        return sampling.join(sample(sampling.SAMPLINGS[name], count) for name, count in sampling.LOOPS)


def real_width() -> dict[str, dict]:
    """Parameters and tensor names of the real releases, from networks that never get memory."""
    found: dict[str, dict] = {release: {} for release in cases.RELEASES}
    for release, networks in cases.RELEASES.items():
        for name, settings in networks.items():
            with torch.device("meta"):
                network = NETWORKS[name](settings)
            shapes = {_published(name, key): tuple(tensor.shape) for key, tensor in network.state_dict().items()}
            count = sum(parameter.numel() for parameter in network.parameters())
            found[release][name] = {"parameters": count, "tensors": len(shapes), "digest": cases.digest(shapes)}
    return found


def _published(network: str, key: str) -> str:
    """The releases were saved by transformers 4, whose text encoders name their only child."""
    if network == "text_encoder" and not key.startswith("text_model."):
        return f"text_model.{key}"
    return key


def main() -> None:
    diffusers.utils.logging.set_verbosity_error()  # a cut prompt is part of the cases
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", nargs="?", type=Path, help="folder for checkpoints and outputs of all cases")
    parser.add_argument("--golden", type=Path, help="folder to write golden.npz, samplers.npz and real_width.json to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the networks are so small that a second thread costs more than it brings
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        for case in cases.CASES:
            pipeline, refiner = build(case), case.refiner and build(case.refiner)
            pipeline.save_pretrained(arguments.output / case.name)
            if refiner:
                refiner.save_pretrained(arguments.output / f"{case.name}_refiner")
            np.savez(arguments.output / f"{case.name}.npz", **outputs(pipeline, case, refiner))
            if case.name in cases.SINGLE_FILES:
                write_single_file(pipeline, case, arguments.output / case.name)
        unchanged = StableDiffusionXLPipeline.from_pretrained(cases.EMBEDDED, torch_dtype=torch.float32)
        unchanged.set_progress_bar_config(disable=True)
        np.savez(arguments.output / "embedded.npz", **outputs(unchanged, cases.embedded()))
        for name, made in adapted(arguments.output / "lora"):
            np.savez(arguments.output / f"{name}.npz", **made)
        np.savez(arguments.output / "samplers.npz", **samples())
        (arguments.output / "real_width.json").write_text(json.dumps(real_width(), indent=2) + "\n")
    if arguments.golden:
        loops = samples()
        loops.pop("inputs")  # the largest part, and of little use once the loops are known to agree
        np.savez_compressed(arguments.golden / "samplers.npz", **loops)
        golden = {}
        for case in cases.CASES:
            if case.name in cases.GOLDEN:
                made = outputs(build(case), case, case.refiner and build(case.refiner))
                golden |= {f"{case.name} {name}": cases.subsample(value) for name, value in made.items()}
        np.savez_compressed(arguments.golden / "golden.npz", **golden)
        (arguments.golden / "real_width.json").write_text(json.dumps(real_width(), indent=2) + "\n")


if __name__ == "__main__":
    main()
