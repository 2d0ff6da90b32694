"""Single files in the layout of the original releases: names of CompVis's and OpenCLIP's modules to those of diffusers.

A conversion is data: the prefixes under which a network lies in such files, the rules that rename its modules, and the
few tensors that are laid out otherwise. Sources: CompVis/stable-diffusion, Stability-AI/stablediffusion and
Stability-AI/generative-models, `model.state_dict()`; checked against diffusers' `single_file_utils`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from model_handlers.tensors import Rules, Tensor, renamed

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
CLIP_PREFIXES = ("conditioner.embedders.0.transformer.", "cond_stage_model.transformer.")  # SDXL, SD 1
OPEN_CLIP_PREFIX = "cond_stage_model.model."  # SD 2
PROJECTED_PREFIXES = ("conditioner.embedders.1.model.", "conditioner.embedders.0.model.")  # SDXL base, refiner
# What is no network's: training's average of the weights, and tables of the noise schedule, which is made anew.
NOT_NEEDED = re.compile(
    r"(model_ema|denoiser)\.|(betas|(sqrt|log|posterior|alphas)_\w+|logvar|lvlb_weights|scale_factor|global_step)$"
)

UNET: Rules = (
    (r"^time_embed\.0\.", "time_embedding.linear_1."),
    (r"^time_embed\.2\.", "time_embedding.linear_2."),
    (r"^label_emb\.0\.0\.", "add_embedding.linear_1."),
    (r"^label_emb\.0\.2\.", "add_embedding.linear_2."),
    (r"^input_blocks\.0\.0\.", "conv_in."),
    (r"^middle_block\.0\.", "mid_block.resnets.0."),
    (r"^middle_block\.1\.", "mid_block.attentions.0."),
    (r"^middle_block\.2\.", "mid_block.resnets.1."),
    (r"^out\.0\.", "conv_norm_out."),
    (r"^out\.2\.", "conv_out."),
    (r"\.in_layers\.0\.", ".norm1."),
    (r"\.in_layers\.2\.", ".conv1."),
    (r"\.emb_layers\.1\.", ".time_emb_proj."),
    (r"\.out_layers\.0\.", ".norm2."),
    (r"\.out_layers\.3\.", ".conv2."),
    (r"\.skip_connection\.", ".conv_shortcut."),
)
VAE: Rules = (
    (r"^loss\.", None),  # what training judged pictures by
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
)
OPEN_CLIP: Rules = (
    (r"^logit_scale$", None),  # of the contrastive loss
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
)


def unet(tensors: Mapping[str, Tensor], layers_per_block: Sequence[int]) -> dict[str, Tensor]:
    """The UNet of a file under diffusers' names; `layers_per_block` for each level. Empty if it has none."""
    return _convert(tensors, {UNET_PREFIX: unet_rules(layers_per_block)})


def unet_rules(layers_per_block: Sequence[int]) -> Rules:
    """From the names of a UNet's tensors to those of diffusers; also for LoRA files."""
    return (*_blocks(layers_per_block), *UNET)


def vae(tensors: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """The VAE of a file under diffusers' names, empty if it has none."""
    # The originals count the decoder's levels as the encoder's, from the outermost in.
    up = [
        rule
        for i in range(levels)
        for rule in (
            (rf"\.up\.{levels - 1 - i}\.block\.", f".up_blocks.{i}.resnets."),
            (rf"\.up\.{levels - 1 - i}\.upsample\.", f".up_blocks.{i}.upsamplers.0."),
        )
    ]
    return _convert(tensors, {VAE_PREFIX: (*up, *VAE)})


def text_encoder(tensors: Mapping[str, Tensor], layers: int, projection: bool) -> dict[str, Tensor]:
    """A text encoder of a file under transformers' names, with or without projection; empty if it has none."""
    if projection:
        return _convert(tensors, dict.fromkeys(PROJECTED_PREFIXES, OPEN_CLIP))
    # SD 2 reads the last but one layer: the last is in the file, but not in the config.
    unread: Rules = ((rf"^transformer\.resblocks\.{layers}\.", None), (r"^text_projection$", None))
    return _convert(tensors, {**dict.fromkeys(CLIP_PREFIXES, ()), OPEN_CLIP_PREFIX: (*unread, *OPEN_CLIP)})


def _blocks(layers_per_block: Sequence[int]) -> Iterator[tuple[str, str]]:
    """The originals number what is in the UNet's levels through, downsamplers included, from 1 down and from 0 up."""
    number = 1
    for level, layers in enumerate(layers_per_block):
        for i in range(layers):
            yield rf"^input_blocks\.{number}\.0\.", f"down_blocks.{level}.resnets.{i}."
            yield rf"^input_blocks\.{number}\.1\.", f"down_blocks.{level}.attentions.{i}."
            number += 1
        yield rf"^input_blocks\.{number}\.0\.op\.", f"down_blocks.{level}.downsamplers.0.conv."
        number += 1
    number = 0
    for block, layers in enumerate(reversed(layers_per_block)):
        for i in range(layers + 1):
            # The upsampler stands behind the last layer's attention, or in its place.
            yield rf"^output_blocks\.{number}\.[12]\.conv\.", f"up_blocks.{block}.upsamplers.0.conv."
            yield rf"^output_blocks\.{number}\.0\.", f"up_blocks.{block}.resnets.{i}."
            yield rf"^output_blocks\.{number}\.1\.", f"up_blocks.{block}.attentions.{i}."
            number += 1


def _convert(tensors: Mapping[str, Tensor], layouts: Mapping[str, Rules]) -> dict[str, Tensor]:
    """The tensors under the first of the prefixes that occurs; also, as they are, those that are of no network."""
    prefix = next((prefix for prefix in layouts if any(name.startswith(prefix) for name in tensors)), None)
    if prefix is None:
        return {}
    prefixes = (UNET_PREFIX, VAE_PREFIX, *CLIP_PREFIXES, OPEN_CLIP_PREFIX, *PROJECTED_PREFIXES)
    converted = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            for old, part in _parts(name.removeprefix(prefix), tensor):
                if new := renamed(old, layouts[prefix]):
                    converted[name if new in converted else new] = part
        elif not name.startswith(prefixes) and not NOT_NEEDED.match(name):
            converted[name] = tensor
    return converted


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What diffusers holds as linear layers: three in one matrix, a bare matrix, convolutions of one pixel."""
    if match := re.fullmatch(r"(.*\.attn\.)in_proj_(weight|bias)", name):
        for i, projection in enumerate(("q_proj", "k_proj", "v_proj")):
            yield f"{match[1]}{projection}.{match[2]}", tensor.through(partial(_third, i))
    elif name == "text_projection":
        yield name, tensor.through(np.transpose)
    elif ".mid.attn_1." in name and tensor.shape[2:] == (1, 1):
        yield name, tensor.through(lambda value: value[:, :, 0, 0])
    else:
        yield name, tensor


def _third(i: int, value: np.ndarray) -> np.ndarray:
    return np.array_split(np.atleast_1d(value), 3)[i]
