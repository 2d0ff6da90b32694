"""Writes a checkpoint of diffusers' layout in the layouts of other times: the original single file, and Flax.

Names are made part by part from diffusers' names, the other way round than the reader goes and without its tables.
Shared with the parity environment, where diffusers reads the same files; so it imports neither torch nor JAX.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = Mapping[str, np.ndarray]

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


# Where the text encoders of a family lie in its files.
ENCODERS = {
    "sd_1": {"text_encoder": "cond_stage_model.transformer."},
    "sd_2": {"text_encoder": "cond_stage_model.model."},
    "sdxl": {
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
}


def write_single_file(root: Path, path: Path, family: str, layers_per_block: int) -> None:
    """Writes the networks of a checkpoint folder into one file, as `original`."""
    networks = {name: read(root / name) for name in (*ENCODERS[family], "unet", "vae")}
    tensors = original(networks, family, layers_per_block)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def original(networks: Mapping[str, Tensors], family: str, layers_per_block: int) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint under the names, and in the shapes, of the family's original release."""
    tensors = {}
    for component, prefix in ENCODERS[family].items():
        encoder = open_clip(networks[component]) if prefix.endswith(".model.") else clip(networks[component])
        tensors |= {prefix + name: value for name, value in encoder.items()}
    unet, vae = networks["unet"], networks["vae"]
    for name, value in unet.items():
        tensors[f"model.diffusion_model.{unet_name(name, layers_per_block, unet)}"] = value
    levels = 1 + max(int(match[1]) for name in vae if (match := re.match(r"encoder\.down_blocks\.(\d+)", name)))
    for name, value in vae.items():
        pixelwise = ".attentions." in name and value.ndim == 2
        tensors[f"first_stage_model.{vae_name(name, levels)}"] = value[:, :, None, None] if pixelwise else value
    return tensors


def read(folder: Path) -> Tensors:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def unet_name(name: str, layers_per_block: int, names: Collection[str]) -> str:
    module, leaf = name.rsplit(".", 1)
    if module in UNET_ENDS:
        return f"{UNET_ENDS[module]}.{leaf}"
    side, *parts = name.split(".")
    if side == "mid_block":
        kind, i, *rest = parts
        place = f"middle_block.{1 if kind == 'attentions' else 2 * int(i)}"
    else:
        level, kind, i, *rest = parts
        if kind == "downsamplers":
            return f"input_blocks.{(int(level) + 1) * (layers_per_block + 1)}.0.op.{leaf}"
        if kind == "upsamplers":
            column = 1 + (f"up_blocks.{level}.attentions.0.norm.bias" in names)
            return f"output_blocks.{int(level) * (layers_per_block + 1) + layers_per_block}.{column}.conv.{leaf}"
        column = int(kind == "attentions")
        if side == "down_blocks":
            place = f"input_blocks.{1 + int(level) * (layers_per_block + 1) + int(i)}.{column}"
        else:
            place = f"output_blocks.{int(level) * (layers_per_block + 1) + int(i)}.{column}"
    if kind == "resnets":
        return f"{place}.{RESNET[rest[0]]}.{leaf}"
    return ".".join([place, *rest])


def vae_name(name: str, levels: int) -> str:
    name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
    name = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
    if "mid_block.attentions.0" in name:
        name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
        return name.replace("to_out.0", "proj_out").replace("to_", "")
    if match := re.match(r"(en|de)coder\.(down|up)_blocks\.(\d+)\.(resnets\.\d+|(?:down|up)samplers\.0)\.(.*)", name):
        side, way, level, kind, rest = match.groups()
        number = int(level) if way == "down" else levels - 1 - int(level)
        kind = kind.replace("resnets", "block").replace("samplers.0", "sample")
        return f"{side}coder.{way}.{number}.{kind}.{rest}"
    return name


def clip(tensors: Tensors) -> dict[str, np.ndarray]:
    """As transformers 4 names them, with the constant that it saved."""
    named = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in tensors.items()}
    positions = len(named["text_model.embeddings.position_embedding.weight"])
    return named | {"text_model.embeddings.position_ids": np.arange(positions)[None]}


def open_clip(tensors: Tensors) -> dict[str, np.ndarray]:
    original = {"logit_scale": np.array(4.6, np.float32)}
    for name, value in tensors.items():
        stem = name.removeprefix("text_model.")
        if match := re.match(r"encoder\.layers\.(\d+)\.(.*)\.(weight|bias)$", stem):
            layer, module, leaf = match.groups()
            block = f"transformer.resblocks.{layer}"
            if module == "self_attn.q_proj":
                three = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
                original[f"{block}.attn.in_proj_{leaf}"] = np.concatenate(three)
            elif module in OPEN_CLIP:
                original[f"{block}.{OPEN_CLIP[module]}.{leaf}"] = value
        elif stem == "embeddings.position_embedding.weight":
            original["positional_embedding"] = value
        elif stem == "text_projection.weight":
            original["text_projection"] = value.T
        else:
            original[stem.replace("embeddings.", "").replace("final_layer_norm", "ln_final")] = value
    return original


def flax_tree(tensors: Tensors) -> dict[str, Any]:
    """The nested dict that the Flax pipelines of old made of a network's tensors."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        # transformers' encoder has a module for its list of layers, the others put the number behind the name.
        *path, leaf = re.sub(r"(?<!\.layers)\.(\d+)(?=\.)", r"_\1", name).split(".")
        if leaf == "weight" and "embedding" in path[-1]:
            leaf = "embedding"
        elif leaf == "weight":
            leaf = "scale" if value.ndim == 1 else "kernel"
        axes = {4: (2, 3, 1, 0), 2: (1, 0)}[value.ndim] if leaf == "kernel" else range(value.ndim)
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = np.ascontiguousarray(value.transpose(axes))
    return tree
