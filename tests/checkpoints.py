"""Small checkpoints for tests: a case's configs, weights drawn from their names, tokenizers of the scenes' words."""

import json
from pathlib import Path

from flax import nnx
from safetensors.numpy import save_file

from benchmarks.scenes.scenes import VOCABULARY
from benchmarks.scenes.tokenizer import write_tokenizers
from model_handlers import checkpoint
from model_handlers.stable_diffusion.model import NETWORKS, Configs, Networks, _one_key
from tests.parity import cases
from tests.parity.cases import Case, Picture, Settings

# The smallest network that has every kind of part; width 32, pictures of 16 x 24 pixels.
TINY = Case(
    "tiny",
    cases.text_encoder(32, 2, 2, "quick_gelu", cases.END_OF_TEXT, 32),
    cases.text_encoder(32, 2, 2, "gelu", cases.END_OF_TEXT, 32),
    cases.unet(
        [32, 32],
        [False, True],
        text_width=64,
        pooled_width=32,
        transformer_layers_per_block=[1, 2],
        attention_head_dim=[1, 2],
        layers_per_block=1,
        norm_num_groups=8,
        use_linear_projection=True,
    ),
    cases.vae([16, 16], layers_per_block=1, norm_num_groups=8),
    cases.scheduler(),
    force_zeros_for_empty_prompt=True,
    height=16,
    width=24,
    pictures=(Picture("a red circle"),),
)
PARTS = {
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
}
OF_REFINER = {
    "_class_name": "StableDiffusionXLImg2ImgPipeline",
    "requires_aesthetics_score": True,
    "text_encoder": [None, None],
    "tokenizer": [None, None],
}


def write(case: Case, root: Path) -> Path:
    """Writes a case's checkpoint in diffusers' layout, with files for the names and shapes that our networks have."""
    for path, shapes in write_outline(case, root).items():
        save_file({key: cases.weight(path.parent.name, key, shape) for key, shape in shapes.items()}, path)
    return root


def write_outline(case: Case, root: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    """Writes all but the weights, and gives the names and shapes, in torch's layout, of those in each file."""
    write_tokenizers(root, VOCABULARY)
    configs = {name: config for name in NETWORKS if (config := getattr(case, name)) is not None}
    scheduler = {"_class_name": case.sampler, **case.scheduler}
    write_configs(root, configs, scheduler, case.force_zeros_for_empty_prompt)
    networks = abstract_networks(root)
    files = {}
    for name in configs:
        stem = "model" if name.startswith("text_encoder") else "diffusion_pytorch_model"
        files[root / name / f"{stem}.safetensors"] = checkpoint.tensor_shapes(getattr(networks, name))
    return files


def write_configs(root: Path, configs: dict[str, Settings], scheduler: Settings, force_zeros: bool = True) -> Path:
    """Writes the JSON files of a checkpoint: all that its shapes depend on."""
    xl = "text_encoder_2" in configs
    _write_json(
        root / "model_index.json",
        {
            "_class_name": "StableDiffusionXLPipeline" if xl else "StableDiffusionPipeline",
            "force_zeros_for_empty_prompt": force_zeros,
            "feature_extractor": [None, None],
            **{name: value for name, value in PARTS.items() if xl or not name.endswith("_2")},
            **(OF_REFINER if "text_encoder" not in configs else {}),
        },
    )
    _write_json(root / "scheduler/scheduler_config.json", {"_class_name": "EulerDiscreteScheduler", **scheduler})
    for name, config in configs.items():
        _write_json(root / name / "config.json", config)
    return root


def abstract_networks(root: Path) -> Networks:
    """The networks of a checkpoint's configs as shapes only, as `StableDiffusion.load` makes them."""
    return nnx.eval_shape(lambda: Networks(Configs.read(root), _one_key(), param_dtype="float32"))


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
