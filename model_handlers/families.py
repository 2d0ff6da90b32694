"""The registry of model families: the class named by a checkpoint's model_index.json picks the code that runs it."""

from pathlib import Path

from model_handlers import checkpoint
from model_handlers.checkpoint import CheckpointError
from model_handlers.stable_diffusion.model import StableDiffusion

# A family has `describe`, for the command line, and `load`, for the workers.
FAMILIES = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusion,
    "FlaxStableDiffusionPipeline": StableDiffusion,
    "FlaxStableDiffusionXLPipeline": StableDiffusion,
}


def family_of(root: Path) -> type[StableDiffusion]:
    """The class that runs a checkpoint folder; raises CheckpointError, listing the known, if there is none."""
    path = root / "model_index.json"
    name = checkpoint.read_json(path).get("_class_name")
    if name not in FAMILIES:
        raise CheckpointError(f"{path}: family {name!r} is not supported, only {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
