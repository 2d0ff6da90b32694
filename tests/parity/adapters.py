"""LoRA files in every spelling that diffusers reads, for the case `as_sdxl`, as data; imports neither torch nor JAX."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from tests.parity.cases import CASES, Case, draw

# Weights of that case, and of SDXL, by the names of diffusers and of kohya-ss, whose UNet has the original layout.
LINEAR = {
    "unet.time_embedding.linear_1": "lora_unet_time_embed_0",
    "unet.add_embedding.linear_2": "lora_unet_label_emb_0_2",
    "unet.down_blocks.1.resnets.0.time_emb_proj": "lora_unet_input_blocks_4_0_emb_layers_1",
    "unet.down_blocks.2.attentions.1.proj_out": "lora_unet_input_blocks_8_1_proj_out",
    "unet.mid_block.attentions.0.proj_in": "lora_unet_middle_block_1_proj_in",
    "unet.up_blocks.0.attentions.2.transformer_blocks.0.ff.net.0.proj": (
        "lora_unet_output_blocks_2_1_transformer_blocks_0_ff_net_0_proj"
    ),
    "unet.up_blocks.1.attentions.1.transformer_blocks.1.ff.net.2": (
        "lora_unet_output_blocks_4_1_transformer_blocks_1_ff_net_2"
    ),
    "text_encoder.text_model.encoder.layers.2.mlp.fc1": "lora_te1_text_model_encoder_layers_2_mlp_fc1",
    "text_encoder_2.text_model.encoder.layers.0.mlp.fc2": "lora_te2_text_model_encoder_layers_0_mlp_fc2",
}
ATTENTION = {
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    ),
    "unet.down_blocks.2.attentions.1.transformer_blocks.2.attn2.to_k": (
        "lora_unet_input_blocks_8_1_transformer_blocks_2_attn2_to_k"
    ),
    "unet.mid_block.attentions.0.transformer_blocks.1.attn1.to_out.0": (
        "lora_unet_middle_block_1_transformer_blocks_1_attn1_to_out_0"
    ),
    "unet.up_blocks.1.attentions.2.transformer_blocks.0.attn2.to_v": (
        "lora_unet_output_blocks_5_1_transformer_blocks_0_attn2_to_v"
    ),
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj": (
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    ),
    "text_encoder.text_model.encoder.layers.1.self_attn.out_proj": (
        "lora_te1_text_model_encoder_layers_1_self_attn_out_proj"
    ),
    "text_encoder_2.text_model.encoder.layers.0.self_attn.v_proj": (
        "lora_te2_text_model_encoder_layers_0_self_attn_v_proj"
    ),
    # Without a change of some out_proj the reference does not know the spelling of a text encoder's kohya file.
    "text_encoder_2.text_model.encoder.layers.1.self_attn.out_proj": (
        "lora_te2_text_model_encoder_layers_1_self_attn_out_proj"
    ),
}
CONVOLUTIONS = {
    "unet.conv_in": "lora_unet_input_blocks_0_0",
    "unet.conv_out": "lora_unet_out_2",
    "unet.down_blocks.0.resnets.1.conv1": "lora_unet_input_blocks_2_0_in_layers_2",
    "unet.down_blocks.0.downsamplers.0.conv": "lora_unet_input_blocks_3_0_op",
    "unet.down_blocks.1.resnets.0.conv_shortcut": "lora_unet_input_blocks_4_0_skip_connection",
    "unet.mid_block.resnets.1.conv2": "lora_unet_middle_block_2_out_layers_3",
    "unet.up_blocks.0.upsamplers.0.conv": "lora_unet_output_blocks_2_2_conv",
    "unet.up_blocks.1.resnets.0.conv1": "lora_unet_output_blocks_3_0_in_layers_2",
    "unet.up_blocks.2.resnets.2.conv2": "lora_unet_output_blocks_8_0_out_layers_3",
}
ALL = LINEAR | ATTENTION | CONVOLUTIONS
# Alphas of the kohya files; one for each network, as the reference mixes up those of a text encoder.
ALPHAS = {"unet": 3.0, "text_encoder": 2.0, "text_encoder_2": 5.0}
PROCESSORS = {"to_out.0": "to_out", "q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}


@dataclass(frozen=True)
class File:
    """A LoRA file: how it spells which weights, and what its header says of them."""

    spelling: str
    weights: tuple[str, ...]
    header: tuple[tuple[str, int], ...] = ()


FILES = {
    "peft": File("peft", (*LINEAR, *ATTENTION, *CONVOLUTIONS)),
    "peft_alpha": File("peft", tuple(ATTENTION), (("lora_alpha", 6), ("r", 4))),
    "linear_layer": File("linear_layer", (*LINEAR, *ATTENTION)),
    "processors": File("processors", tuple(ATTENTION)),
    "kohya": File("kohya", (*LINEAR, *ATTENTION)),
    "locon": File("kohya", tuple(ALL)),
    # The reference reads a time or size embedding only in the original layout.
    "kohya_diffusers": File("kohya_diffusers", tuple(name for name in ALL if "_embedding." not in name)),
}
# What is loaded together, and with which weights.
LOADS = {
    "LoRA, PEFT": (("peft", 1.0),),
    "LoRA, PEFT with lora_alpha": (("peft_alpha", 1.0),),
    "LoRA, lora_linear_layer": (("linear_layer", 1.0),),
    "LoRA, attention processors": (("processors", 1.0),),
    "LoRA, kohya with alpha, te1 and te2": (("kohya", 1.0),),
    "LoRA, kohya LoCon": (("locon", 1.0),),
    "LoRA, kohya in diffusers' layout": (("kohya_diffusers", 1.0),),
    "LoRA, two with weights": (("peft", 0.7), ("locon", -0.4)),
}


def case() -> Case:
    """The checkpoint, with one picture in few steps: what a LoRA does, each evaluation does."""
    (found,) = (case for case in CASES if case.name == "as_sdxl")
    return dataclasses.replace(found, pictures=(dataclasses.replace(found.pictures[1], num_inference_steps=3),))


def rank(file: str, name: str) -> int:
    """Ranks differ within a file, but where its header says one."""
    return 4 if FILES[file].header else 2 + len(name) % 3


def matrices(file: str, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """down (rank, in, ...) and up (out, rank, ...) for a weight of this shape, the size of a tenth of its numbers."""
    height, *inputs = shape
    one = (1,) * (len(shape) - 2)
    down = draw(f"{file} {name} down", (rank(file, name), *inputs)) / np.float32(np.sqrt(np.prod(inputs)))
    up = draw(f"{file} {name} up", (height, rank(file, name), *one)) * np.float32(0.1)
    return down, up


def keys(spelling: str, name: str) -> tuple[str, str]:
    """Names of a weight's matrices, down and up."""
    if spelling == "peft":
        return f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    if spelling == "linear_layer":
        middle = "lora_linear_layer" if name.startswith("text") else "lora"
        return f"{name}.{middle}.down.weight", f"{name}.{middle}.up.weight"
    if spelling == "processors":
        for new, old in PROCESSORS.items():
            name = f"{name.removesuffix(new)}{old}" if name.endswith(f".{new}") else name
        if name.startswith("unet."):
            module, _, projection = name.rpartition(".")
            name = f"{module}.processor.{projection}"
        return f"{name}_lora.down.weight", f"{name}_lora.up.weight"
    kohya = ALL[name]
    if spelling == "kohya_diffusers" and name.startswith("unet."):
        kohya = f"lora_{name.replace('.', '_')}"
    return f"{kohya}.lora_down.weight", f"{kohya}.lora_up.weight"


def tensors(file: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """A file's content; `shapes` of the weights by network and name, in torch's layout."""
    spelling = FILES[file].spelling
    content = {}
    for name in FILES[file].weights:
        down, up = keys(spelling, name)
        content[down], content[up] = matrices(file, name, shapes[f"{name}.weight"])
        if spelling.startswith("kohya"):
            alpha = ALPHAS[name.partition(".")[0]]
            content[down.replace("lora_down.weight", "alpha")] = np.array(alpha, np.float32)
    return content


def scale(file: str, name: str) -> float:
    """alpha / rank."""
    if FILES[file].spelling.startswith("kohya"):
        return ALPHAS[name.partition(".")[0]] / rank(file, name)
    return dict(FILES[file].header).get("lora_alpha", rank(file, name)) / rank(file, name)


def metadata(file: str) -> dict[str, float | list[str]]:
    """What diffusers writes in a file's header as `lora_adapter_metadata`; nothing for most files."""
    noted: dict[str, float | list[str]] = {}
    for network in ALPHAS if FILES[file].header else ():
        modules = [name.removeprefix(f"{network}.") for name in FILES[file].weights if name.startswith(f"{network}.")]
        noted |= {f"{network}.{key}": value for key, value in FILES[file].header}
        noted[f"{network}.target_modules"] = [name.removeprefix("text_model.") for name in modules]
    return noted
