"""The checkpoints and pictures on which both implementations are compared, as data.

Read in two environments, by `reference` with torch and diffusers and by `ours` with JAX, so it imports neither. Weights
and inputs are numbers drawn from their names: both sides make the same ones, and none are committed.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scenes.scenes import VOCABULARY
from benchmarks.scenes.tokenizer import build_vocabulary, learn_merges

VOCABULARY_SIZE = len(build_vocabulary(learn_merges(VOCABULARY)))
END_OF_TEXT = VOCABULARY_SIZE - 1
LEGACY_END_OF_TEXT = 2  # what configs said before transformers 4.31
TIME_IDS = 6  # numbers of SDXL's micro-conditioning
SPACINGS = ("leading", "trailing", "linspace")

Settings = dict[str, Any]

EMBEDDED = Path(__file__).parents[2] / "model_handlers/embedded"


@dataclass(frozen=True)
class Picture:
    """What is asked of a pipeline; None for a size means the picture's own, as in diffusers.

    `settings` are further arguments by the names that they have on both sides, and guidance_interval.
    """

    prompt: str
    negative_prompt: str | None = None
    guidance_scale: float = 5.0
    num_inference_steps: int = 20
    original_size: tuple[int, int] | None = None
    crops_coords_top_left: tuple[int, int] = (0, 0)
    target_size: tuple[int, int] | None = None
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A checkpoint, by the arguments of the reference's classes, and pictures of one size to make with it.

    Without a second text encoder it is Stable Diffusion 1 or 2, else XL; without a first one it is a refiner.
    """

    name: str
    text_encoder: Settings | None
    text_encoder_2: Settings | None
    unet: Settings
    vae: Settings
    scheduler: Settings
    force_zeros_for_empty_prompt: bool
    height: int
    width: int
    pictures: tuple[Picture, ...]
    prompt_windows: int = 1
    sampler: str = "EulerDiscreteScheduler"
    refiner: "Case | None" = None  # which only ends what this one begins, so its pictures do not count

    @property
    def scale(self) -> int:
        """Pixels a side of one latent."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Inputs of single networks, in the reference's layout, channels first; `step_*` are the UNet's."""
        height, width = self.height // self.scale, self.width // self.scale
        shapes = {
            "step_latents": (2, 4, height, width),
            "step_text": (2, 77, self.unet["cross_attention_dim"]),
            "step_pooled": (2, self.text_encoder_2["projection_dim"] if self.text_encoder_2 else 0),
            "images": (1, 3, self.height, self.width),
            "latents": (1, 4, height, width),
            "noise": (len(self.pictures), 4, height, width),  # what sampling starts from, before init_noise_sigma
        }
        drawn = {name: draw(f"{self.name} {name}", shape) for name, shape in shapes.items()}
        return drawn | {
            "images": np.tanh(drawn["images"]),
            "step_timesteps": np.array([946.421, 1.0], np.float32),
            "step_time_ids": np.array([[1024, 1024, 0, 0, 1024, 1024], [480, 640, 32, 64, 768, 512]], np.float32),
        }


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal float32 numbers that depend on the name only; RandomState's stream is frozen (NEP 19)."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


# What writes to a feature map, or to CLIP's embeddings, before a norm reads it.
WRITES = re.compile(r"(conv_in|conv2|conv_shortcut|samplers\.0\.conv|proj_out|to_out\.0|\w_embedding)\.(weight|bias)$")
# Of these, what reads a feature map without a norm between: its input is small already.
READS_SMALL = re.compile(r"(conv_shortcut|samplers\.0\.conv)\.weight$")
SMALL = 1 / 32


def weight(network: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a checkpoint in torch's layout, scaled by its fan-in so that outputs are of order one.

    Feature maps are of order 1 / 32, so that the epsilon of the norm that reads them shows; not smaller, or float32
    itself takes up the limits (at 1 / 300 the reference is 1e-5 from its own float64).
    """
    # transformers 5 drops this part of the name for one of the two encoders when it saves.
    values = draw(f"{network} {name.removeprefix('text_model.')}", shape)
    writes = WRITES.search(name) and ".transformer_blocks." not in name
    size = SMALL if writes and not READS_SMALL.search(name) else 1
    if name.endswith(".bias"):
        return values * np.float32(0.1 * size)
    if len(shape) == 1:  # the scale of a norm
        return 1 + values * np.float32(0.1)
    if name.endswith("_embedding.weight"):
        return values * np.float32(size)
    return values * np.float32(size / math.sqrt(math.prod(shape[1:])))


def text_encoder(width: int, layers: int, heads: int, act: str, eos_token_id: int, projection_dim: int) -> Settings:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 77,
        "hidden_act": act,
        "layer_norm_eps": 1e-5,
        "projection_dim": projection_dim,
        "bos_token_id": VOCABULARY_SIZE - 2,
        "eos_token_id": eos_token_id,
        "pad_token_id": 1,
    }


def unet(widths: list[int], attention: list[bool], text_width: int, pooled_width: int, **settings: Any) -> Settings:
    """`attention` says for each level, from the outermost in, whether it attends to the text."""
    return {
        "block_out_channels": widths,
        "down_block_types": ["CrossAttnDownBlock2D" if has else "DownBlock2D" for has in attention],
        "up_block_types": ["CrossAttnUpBlock2D" if has else "UpBlock2D" for has in reversed(attention)],
        "cross_attention_dim": text_width,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": pooled_width + TIME_IDS * 8,
        "sample_size": 16,
        **settings,
    }


def plain_unet(widths: list[int], attention: list[bool], text_width: int, **settings: Any) -> Settings:
    """As `unet`, but told nothing beside text and time, as in Stable Diffusion 1 and 2."""
    xl = unet(widths, attention, text_width, pooled_width=0, **settings)
    return {name: value for name, value in xl.items() if not name.startswith(("addition_", "projection_class"))}


def vae(widths: list[int], **settings: Any) -> Settings:
    return {
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "latent_channels": 4,
        "scaling_factor": 0.13025,
        "sample_size": 64,
        **settings,
    }


def scheduler(**settings: Any) -> Settings:
    """SDXL base's, but for what a case changes."""
    return {
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "timestep_spacing": "leading",
        "steps_offset": 1,
        **settings,
    }


LONG_PROMPT = ", ".join(["a small red circle left of a large blue square on a white background"] * 8)  # over 77 tokens
PICTURES = (
    Picture("a red circle left of a blue square on a white background", None, 5.0),
    Picture("a yellow triangle above a green circle", "", 7.5, original_size=(480, 640)),
    Picture("a purple star", "a black square", 1.0, crops_coords_top_left=(16, 32), target_size=(768, 512)),
    Picture(LONG_PROMPT, "a zebra, naïve", 7.5, num_inference_steps=13),  # words that are no tokens of their own
    Picture("", None, 3.0, num_inference_steps=2),
)
# Without sizes, of which Stable Diffusion 1 and 2 know nothing.
PICTURES_OF_TEXT = (
    Picture("a red circle left of a blue square on a white background", None, 5.0),
    Picture("a yellow triangle above a green circle", "a black square", 7.5),
    Picture(LONG_PROMPT, "a zebra, naïve", 7.5, num_inference_steps=13),
    Picture("", None, 1.0, num_inference_steps=2),
    Picture("a red ring", "a zebra", 5.0, num_inference_steps=5, settings={"clip_skip": 1}),
)

CASES: tuple[Case, ...] = (
    Case(
        "uneven_depth",
        text_encoder(32, 2, 4, "quick_gelu", LEGACY_END_OF_TEXT, 32),
        text_encoder(48, 3, 6, "gelu", END_OF_TEXT, 24),
        unet(
            [32, 64, 64],
            [True, True, True],
            text_width=80,
            pooled_width=24,
            transformer_layers_per_block=[1, 2, 3],
            attention_head_dim=[2, 4, 8],
            layers_per_block=1,
            norm_num_groups=32,
            use_linear_projection=True,
        ),
        vae([16, 32, 32], layers_per_block=1, norm_num_groups=8),
        scheduler(),
        force_zeros_for_empty_prompt=True,
        height=48,
        width=64,
        pictures=PICTURES,
    ),
    Case(
        "as_sdxl",
        text_encoder(64, 3, 2, "quick_gelu", LEGACY_END_OF_TEXT, 64),
        text_encoder(32, 2, 2, "gelu", LEGACY_END_OF_TEXT, 32),
        unet(
            [32, 64, 128],
            [False, True, True],
            text_width=96,
            pooled_width=32,
            transformer_layers_per_block=[1, 2, 3],
            attention_head_dim=[1, 2, 4],
            layers_per_block=2,
            norm_num_groups=32,
            use_linear_projection=True,
        ),
        vae([32, 64, 64, 64], layers_per_block=2, norm_num_groups=32),
        scheduler(timestep_spacing="trailing"),
        force_zeros_for_empty_prompt=True,
        height=64,
        width=64,
        pictures=PICTURES[:3],
    ),
    Case(
        "odd_sides",  # latents of 5 x 7 are 3 x 4 and 2 x 2 on the lower levels
        text_encoder(32, 2, 2, "gelu", END_OF_TEXT, 16),
        text_encoder(32, 2, 2, "quick_gelu", END_OF_TEXT, 16),
        unet(
            [32, 48, 64],
            [True, False, True],
            text_width=64,
            pooled_width=16,
            attention_head_dim=4,
            layers_per_block=1,
            norm_num_groups=16,
            use_linear_projection=False,
        ),
        vae([16, 16, 32, 32], layers_per_block=1, norm_num_groups=16, use_quant_conv=False, use_post_quant_conv=False),
        scheduler(timestep_spacing="linspace", steps_offset=0),
        force_zeros_for_empty_prompt=False,
        height=40,
        width=56,
        pictures=PICTURES,
    ),
    Case(
        "layers_by_level",
        text_encoder(32, 2, 1, "quick_gelu", END_OF_TEXT, 32),
        text_encoder(16, 4, 2, "gelu", LEGACY_END_OF_TEXT, 40),
        unet(
            [16, 32, 32, 48],
            [False, True, False, True],
            text_width=48,
            pooled_width=40,
            transformer_layers_per_block=[1, 2, 1, 1],
            attention_head_dim=[1, 4, 1, 3],
            layers_per_block=[1, 2, 1, 2],
            norm_num_groups=8,
            norm_eps=1e-6,
            use_linear_projection=True,
        ),
        vae([8, 16], layers_per_block=2, norm_num_groups=8, mid_block_add_attention=False, scaling_factor=0.5),
        scheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02, timestep_spacing="trailing"),
        force_zeros_for_empty_prompt=False,
        height=24,
        width=40,  # latents of 12 x 20 are 6 x 10, 3 x 5 and 2 x 3 on the lower levels
        pictures=PICTURES,
    ),
    Case(
        "centred_latents",  # an SDXL whose VAE says where its latents lie
        text_encoder(32, 2, 2, "quick_gelu", END_OF_TEXT, 32),
        text_encoder(32, 2, 2, "gelu", END_OF_TEXT, 16),
        unet(
            [32, 64],
            [False, True],
            text_width=64,
            pooled_width=16,
            attention_head_dim=[2, 4],
            layers_per_block=1,
            norm_num_groups=32,
            use_linear_projection=True,
        ),
        vae(
            [16, 32],
            layers_per_block=1,
            norm_num_groups=8,
            scaling_factor=0.5,
            latents_mean=[-1.5, 0.25, 0.5, 2.0],
            latents_std=[2.0, 0.5, 3.0, 1.5],
        ),
        scheduler(),
        force_zeros_for_empty_prompt=True,
        height=16,
        width=24,
        pictures=PICTURES[:3],
    ),
    Case(
        "as_sd_1",
        text_encoder(32, 3, 4, "quick_gelu", LEGACY_END_OF_TEXT, 32),
        None,
        plain_unet(
            [32, 64, 64],
            [True, True, False],
            text_width=32,
            attention_head_dim=8,  # heads of every level, whatever it is called
            layers_per_block=2,
            norm_num_groups=32,
        ),
        vae([16, 32, 32], layers_per_block=2, norm_num_groups=16, scaling_factor=0.18215),
        # The offset is one that diffusers, and so the checkpoint that it saves, corrects to 1.
        scheduler(steps_offset=0, skip_prk_steps=True),
        force_zeros_for_empty_prompt=False,
        height=48,
        width=32,
        pictures=PICTURES_OF_TEXT,
        sampler="PNDMScheduler",
    ),
    Case(
        "as_sd_2_base",
        text_encoder(64, 2, 4, "gelu", LEGACY_END_OF_TEXT, 48),
        None,
        plain_unet(
            [32, 64, 128],
            [True, True, False],
            text_width=64,
            attention_head_dim=[1, 2, 4],
            layers_per_block=1,
            norm_num_groups=32,
            use_linear_projection=True,
        ),
        vae([32, 32], layers_per_block=1, norm_num_groups=32, scaling_factor=0.18215),
        scheduler(),
        force_zeros_for_empty_prompt=False,
        height=24,
        width=24,
        pictures=PICTURES_OF_TEXT,
    ),
    Case(
        "as_sd_2_1",
        text_encoder(32, 2, 2, "gelu", END_OF_TEXT, 32),
        None,
        plain_unet(
            [32, 32, 64],
            [True, True, False],
            text_width=32,
            attention_head_dim=[2, 2, 4],
            layers_per_block=1,
            norm_num_groups=16,
            use_linear_projection=True,
        ),
        vae([16, 32], layers_per_block=1, norm_num_groups=8, scaling_factor=0.18215),
        scheduler(prediction_type="v_prediction", timestep_spacing="trailing"),
        force_zeros_for_empty_prompt=False,
        height=24,
        width=16,
        pictures=PICTURES_OF_TEXT,
    ),
)
SINGLE_FILES = {"as_sdxl": "sdxl", "as_sd_1": "sd_1", "as_sd_2_base": "sd_2"}  # also written in the original layout
SCHEDULE = (981, 721, 501, 301, 141, 21)
LEVELS = (14.6, 6.1, 2.7, 1.3, 0.5, 0.1)
NEGATIVE_SIZES = {
    "negative_original_size": (512, 256),
    "negative_crops_coords_top_left": (8, 16),
    "negative_target_size": (96, 128),
}
SCENE = "a red circle left of a blue square on a white background"
CASES += (
    replace(
        CASES[0],
        name="conditioning",
        pictures=(
            Picture(SCENE, "a zebra", 7.5, 8, settings={"guidance_rescale": 0.7}),
            Picture(SCENE, "a zebra", 5.0, 8, settings={"prompt_2": "a green star", "negative_prompt_2": "a square"}),
            Picture(SCENE, None, 5.0, 8, settings={"clip_skip": 1}),
            Picture(SCENE, "a zebra", 5.0, 8, settings=NEGATIVE_SIZES),
            Picture(SCENE, "a zebra", 7.5, 8, settings={"guidance_interval": (0.5, 5.0)}),
            Picture(SCENE, None, 7.5, 9, settings={"guidance_interval": (1.0, 99.0), "guidance_rescale": 0.3}),
            Picture(SCENE, "a zebra", 0.0, 4, settings={"clip_skip": 1}),
            Picture(SCENE, None, 5.0, len(SCHEDULE), settings={"timesteps": SCHEDULE}),
            Picture(SCENE, None, 5.0, len(LEVELS) - 1, settings={"sigmas": LEVELS}),
        ),
    ),
)
VERY_LONG_PROMPT = ", ".join(["a small green ring below a large black star"] * 15)  # over 152 tokens
CASES += (
    replace(
        CASES[0],
        name="long_prompts",
        prompt_windows=3,
        pictures=(
            Picture(SCENE, "a zebra", 5.0, 4),
            Picture(LONG_PROMPT, "a zebra", 5.0, 4),
            Picture(VERY_LONG_PROMPT, None, 7.5, 4),
            Picture(SCENE, LONG_PROMPT, 5.0, 4, settings={"clip_skip": 1}),
            Picture(VERY_LONG_PROMPT, LONG_PROMPT, 5.0, 4, settings={"prompt_2": SCENE}),
            Picture(LONG_PROMPT, VERY_LONG_PROMPT, 0.0, 4),
        ),
    ),
)
CENTRED = next(case for case in CASES if case.name == "centred_latents")
REFINER = Case(
    "refiner",
    None,
    text_encoder(48, 3, 6, "gelu", END_OF_TEXT, 24),
    {
        **unet(
            [32, 48],
            [False, True],
            text_width=48,
            pooled_width=24,
            transformer_layers_per_block=[1, 2],
            attention_head_dim=[2, 3],
            layers_per_block=1,
            norm_num_groups=16,
            use_linear_projection=True,
        ),
        "projection_class_embeddings_input_dim": 24 + (TIME_IDS - 1) * 8,  # one score in place of a size
    },
    {**CENTRED.vae, "block_out_channels": [16, 16]},
    scheduler(),
    force_zeros_for_empty_prompt=False,
    height=CENTRED.height,
    width=CENTRED.width,
    pictures=(),
)
REFINED = (
    Picture(SCENE, None, 5.0, 10),
    Picture(SCENE, "a zebra", 7.5, 10, crops_coords_top_left=(16, 32), settings={"denoising_end": 0.55}),
    Picture(SCENE, "a zebra", 1.0, 5, settings={"denoising_end": 0.3, "aesthetic_score": 2.0, "clip_skip": 1}),
    Picture(SCENE, "", 5.0, 7, settings={"negative_aesthetic_score": 9.0, "prompt_2": "a star", **NEGATIVE_SIZES}),
    Picture("", None, 5.0, 4, settings={"denoising_end": 0.99, "guidance_rescale": 0.7}),  # leaves one step
)
DPM: Settings = {"sampler": "DPMSolverMultistepScheduler", "scheduler": scheduler(use_karras_sigmas=True)}
CASES += (
    replace(CENTRED, name="refined", pictures=REFINED, refiner=REFINER),
    replace(CENTRED, name="refined_by_dpm", pictures=REFINED, refiner=replace(REFINER, **DPM), **DPM),
)
# The cases of which reference outputs are committed.
GOLDEN = ("uneven_depth", "odd_sides", "as_sd_1", "conditioning", "long_prompts", "refined")

# Published config.json files of stabilityai/stable-diffusion-xl-base-1.0, as far as parameters depend on them.
SDXL_BASE = {
    "text_encoder": {
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 768,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "text_encoder_2": {
        "vocab_size": 49408,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "max_position_embeddings": 77,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 1280,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "unet": {
        "sample_size": 128,
        "in_channels": 4,
        "out_channels": 4,
        "center_input_sample": False,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "only_cross_attention": False,
        "block_out_channels": [320, 640, 1280],
        "layers_per_block": 2,
        "downsample_padding": 1,
        "mid_block_scale_factor": 1,
        "act_fn": "silu",
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "cross_attention_dim": 2048,
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "upcast_attention": None,
        "resnet_time_scale_shift": "default",
        "time_embedding_type": "positional",
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        "class_embeddings_concat": False,
    },
    "vae": {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "act_fn": "silu",
        "latent_channels": 4,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "scaling_factor": 0.13025,
        "force_upcast": True,
    },
}
# Of the releases before, what differs: runwayml/stable-diffusion-v1-5 and stabilityai/stable-diffusion-2-1.
SD_1 = {
    "text_encoder": SDXL_BASE["text_encoder"],
    "unet": {
        **{
            name: value
            for name, value in SDXL_BASE["unet"].items()
            if not name.startswith(("addition_", "projection_"))
        },
        "sample_size": 64,
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 768,
        "transformer_layers_per_block": 1,
        "attention_head_dim": 8,
        "use_linear_projection": False,
    },
    "vae": {**SDXL_BASE["vae"], "sample_size": 512, "scaling_factor": 0.18215},
}
SD_2 = {
    "text_encoder": {
        **SDXL_BASE["text_encoder"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 23,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "projection_dim": 512,
    },
    "unet": {
        **SD_1["unet"],
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
    },
    "vae": {**SD_1["vae"], "sample_size": 768},
}
RELEASES = {"sdxl": SDXL_BASE, "sd_1": SD_1, "sd_2": SD_2}


def embedded() -> Case:
    """The checkpoint in the package, which both sides load as it lies there."""

    def config(name: str) -> Settings:
        return json.loads((EMBEDDED / name / "config.json").read_text())

    networks: dict[str, Any] = {name: config(name) for name in ("text_encoder", "text_encoder_2", "unet", "vae")}
    return Case(
        "embedded", **networks, scheduler={}, force_zeros_for_empty_prompt=True, height=64, width=64, pictures=PICTURES
    )


def subsample(value: np.ndarray, limit: int = 3000) -> np.ndarray:
    """At most `limit` numbers from all over an array; the stride shares no factor with its size, so skips no axis."""
    stride = math.ceil(value.size / limit)
    while math.gcd(stride, value.size) > 1:
        stride += 1
    return value.reshape(-1)[::stride]


def digest(shapes: dict[str, tuple[int, ...]]) -> str:
    """sha256 over a network's sorted lines "name shape", torch's layout: the same names and shapes, the same digest."""
    lines = [f"{name} {'x'.join(map(str, shape))}\n" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
