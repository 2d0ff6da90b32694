"""LoRA files in every spelling change the weights that they name, by what plain NumPy makes of them."""

import dataclasses
import json
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from model_handlers import checkpoint, lora
from model_handlers.checkpoint import CheckpointError
from model_handlers.lora import Adapter, Targets
from model_handlers.stable_diffusion import original
from model_handlers.stable_diffusion.model import StableDiffusion
from tests.parity import adapters, cases

QUERY = "unet.mid_block.attentions.0.transformer_blocks.1.attn1.to_q"
CONVOLUTION = "unet.mid_block.resnets.0.conv1"
FEED_FORWARD = "text_encoder.text_model.encoder.layers.1.mlp.fc1"


WIDTHS = {QUERY: (32, 32), CONVOLUTION: (32, 32, 3, 3), FEED_FORWARD: (64, 32)}
# Weights of a UNet and text encoders as they are numbered in SDXL; their widths are of no account.
ALL = {name: (6, 4, 3, 3) if name in adapters.CONVOLUTIONS else (6, 4) for name in adapters.ALL}


@pytest.fixture(scope="module")
def targets():
    shapes = {f"{name}.weight": shape for name, shape in (ALL | WIDTHS).items()}
    return Targets(shapes, original.unet_rules([2, 2, 2]))


@pytest.fixture
def write(tmp_path):
    """Writes a file and gives its adapter; `header` is what diffusers notes of PEFT's settings."""

    def write(tensors, weight=1.0, header=None, allow_partial=False, name="lora.safetensors"):
        metadata = {"lora_adapter_metadata": header if isinstance(header, str) else json.dumps(header or {})}
        save_file(tensors, tmp_path / name, metadata)
        return Adapter.find(str(tmp_path / name), weight, allow_partial)

    return write


def pair(down="down", up="up", rank=2, inputs=(32,), outputs=32):
    """A down and an up matrix that depend on their names."""
    one = (1,) * (len(inputs) - 1)
    return cases.draw(down, (rank, *inputs)), cases.draw(up, (outputs, rank, *one))


def peft(name=QUERY, **shapes):
    down, up = pair(**shapes)
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}


def delta(adapter, targets, name=QUERY):
    """What is added to a weight."""
    return added(lora.changes([adapter], targets), targets, name)


def added(changes, targets, name):
    network, _, tensor = f"{name}.weight".partition(".")
    return lora.merge(changes, network, tensor, np.zeros(targets.shapes[f"{name}.weight"], np.float32))


def product(down, up):
    """up @ down, by one weight after the other and in float64."""
    flat = np.zeros((len(up), down[0].size))
    for i, row in enumerate(up.reshape(len(up), -1).astype(np.float64)):
        flat[i] = sum(number * vector for number, vector in zip(row, down.reshape(len(down), -1), strict=True))
    return flat.reshape(len(up), *down.shape[1:])


# float32 sums of a handful of numbers of order one.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("file", adapters.FILES)
def test_every_spelling_names_its_weights(file, write, targets):
    shapes = targets.shapes
    adapter = write(adapters.tensors(file, shapes), weight=-0.5, header=adapters.metadata(file))
    changes = lora.changes([adapter], targets)
    assert changes.keys() == {f"{name}.weight" for name in adapters.FILES[file].weights}
    for name in adapters.FILES[file].weights:
        expected = product(*adapters.matrices(file, name, shapes[f"{name}.weight"])) * -0.5 * adapters.scale(file, name)
        np.testing.assert_allclose(added(changes, targets, name), expected, **CLOSE, err_msg=name)


@pytest.mark.parametrize(
    "module",
    [
        "mid_block.attentions.0.transformer_blocks.1.attn1.to_q",  # of the UNet alone, as the first files
        "lora_unet_mid_block_attentions_0_transformer_blocks_1_attn1_to_q",
        "lora_unet_middle_block_1_transformer_blocks_1_attn1_to_q",
    ],
)
def test_a_module_of_the_unet_has_several_names(module, write, targets):
    down, up = pair()
    adapter = write({f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up})
    np.testing.assert_allclose(delta(adapter, targets), product(down, up), **CLOSE)


@pytest.mark.parametrize(
    "module", ["text_encoder.encoder.layers.1.mlp.fc1", "lora_te_text_model_encoder_layers_1_mlp_fc1"]
)
def test_a_module_of_the_text_encoder_has_several_names(module, write, targets):
    down, up = pair(outputs=64)
    adapter = write({f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up})
    np.testing.assert_allclose(delta(adapter, targets, FEED_FORWARD), product(down, up), **CLOSE)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.0),  # alpha is the rank
        ({"unet.lora_alpha": 6}, 3.0),
        ({"unet.lora_alpha": 6, "unet.use_rslora": True}, 6 / 2**0.5),
        ({"unet.lora_alpha": 6, "unet.alpha_pattern": {"attn1.to_q": 1}}, 0.5),
        ({"unet.lora_alpha": 6, "unet.alpha_pattern": {f"^{QUERY.removeprefix('unet.')}": 1}}, 0.5),
        ({"unet.lora_alpha": 6, "unet.alpha_pattern": {"^attn1.to_q": 1, "o_q": 1}}, 3.0),
        ({"text_encoder.lora_alpha": 6}, 1.0),
    ],
)
def test_settings_in_the_header_say_alpha(settings, scale, write, targets):
    down, up = pair()
    np.testing.assert_allclose(delta(write(peft(), header=settings), targets), scale * product(down, up), **CLOSE)


def test_a_convolution_between_the_two_is_multiplied_out(write, targets):
    down, up = cases.draw("down", (2, 32, 1, 1)), cases.draw("up", (32, 3, 1, 1))
    mid = cases.draw("mid", (3, 2, 3, 3))
    module = "lora_unet_mid_block_resnets_0_conv1"
    adapter = write(
        {
            f"{module}.lora_down.weight": down,
            f"{module}.lora_mid.weight": mid,
            f"{module}.lora_up.weight": up,
            f"{module}.alpha": np.full((), 4, np.float32),
        }
    )
    expected = np.zeros((32, 32, 3, 3))
    for y in range(3):
        for x in range(3):  # the three convolutions at one place are three matrices
            expected[:, :, y, x] = 2 * up[:, :, 0, 0] @ mid[:, :, y, x] @ down[:, :, 0, 0]
    np.testing.assert_allclose(delta(adapter, targets, CONVOLUTION), expected, rtol=1e-4, atol=1e-5)


def test_files_add_up_with_their_weights_in_float32(write, targets):
    half, value = (cases.draw(name, (32, 32)).astype(np.float16) for name in ("half", "value"))
    first = write(peft(), weight=0.5)
    second = write(peft(down="other", up="another"), weight=-2.0, name="second.safetensors")
    network, _, name = f"{QUERY}.weight".partition(".")
    merged = lora.merge(lora.changes([first, second], targets), network, name, value)
    assert merged.dtype == np.float32
    expected = value.astype(np.float64) + 0.5 * product(*pair()) - 2 * product(*pair("other", "another"))
    np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-5)
    assert lora.merge(lora.changes([first], targets), network, "conv_in.weight", half) is half


def test_a_loaded_checkpoint_has_the_changes_in_its_stacks_and_nowhere_else(write, tiny_checkpoint, tmp_path):
    name = "text_encoder_2.text_model.encoder.layers.1.mlp.fc2"
    adapter = write(peft() | peft(CONVOLUTION, inputs=(32, 3, 3)) | peft(name, inputs=(64,)), weight=0.25)
    changed = {QUERY: pair(), CONVOLUTION: pair(inputs=(32, 3, 3)), name: pair(inputs=(64,))}
    model = StableDiffusion.load(
        tiny_checkpoint, scheduler="EulerDiscreteScheduler", dtype="float32", adapters=[adapter]
    )
    for network in ("text_encoder", "text_encoder_2", "unet"):
        checkpoint.save(getattr(model.networks, network), tmp_path / network, np.float32)
        for tensor, value in read(tmp_path / network).items():
            expected = read(tiny_checkpoint / network)[tensor]
            if (key := f"{network}.{tensor}".removesuffix(".weight")) in changed:
                np.testing.assert_allclose(value, expected + 0.25 * product(*changed.pop(key)), **CLOSE)
            else:
                np.testing.assert_array_equal(value, expected)
    assert not changed


def read(folder):
    return {name: tensor.read() for name, tensor in checkpoint.read_tensors(checkpoint.weight_files(folder)).items()}


def test_bfloat16_matrices_are_read(write, targets):
    tensors = {key: value.astype(ml_dtypes.bfloat16) for key, value in peft().items()}
    down, up = (value.astype(np.float32) for value in tensors.values())
    np.testing.assert_allclose(delta(write(tensors), targets), product(down, up), **CLOSE)


def test_how_much_of_a_file_is_merged_is_said(write, targets, caplog):
    adapter = write(peft() | {"bundle_emb.x": np.zeros(3, np.float32)}, weight=0.5, allow_partial=True)
    with caplog.at_level(logging.INFO, "lightmill"):
        lora.check([adapter], targets)
    assert caplog.messages == [f"{adapter.source}: 2 of 3 keys merged into 1 weights, times 0.5"]


LINEAR = f"{QUERY}.lora_A.weight"
VALUE = np.zeros((2, 32), np.float32)
BAD = {
    "no_key_fits": ({"lora_unet_x.lora_up.weight": VALUE}, "none of its 1 keys belongs to a weight of this checkpoint"),
    "a_key_does_not_fit": (
        peft() | {"unet.x.lora_A.weight": VALUE},
        "1 of its 3 keys belong to no weight of this checkpoint: 'unet.x.lora_A.weight'; --allow_partial_lora",
    ),
    "of_the_vae": (peft("vae.encoder.conv_in"), "none of its 2 keys"),
    "half_a_pair": ({LINEAR: VALUE}, f"{LINEAR!r} has no counterpart, the up matrix for {QUERY}.weight"),
    "alpha_alone": ({f"{QUERY}.alpha": np.ones(1, np.float32)}, f"'{QUERY}.alpha' has no counterpart, the down"),
    "other_width": (peft(inputs=(48,)), f"{LINEAR!r} has shape (2, 48), which does not fit {QUERY}.weight (32, 32)"),
    "other_ranks": (peft() | {LINEAR: np.zeros((3, 32), np.float32)}, ".lora_B.weight' has shape (32, 2), which"),
    "no_rank": (peft(rank=0), "has shape (0, 32), which does not fit"),
    "five_axes": (peft() | {LINEAR: np.zeros((2, 32, 1, 1, 1), np.float32)}, "has shape (2, 32, 1, 1, 1), which"),
    "no_axis": (peft() | {LINEAR: np.zeros((), np.float32)}, "has shape (), which does not fit"),
    "whole_numbers": (peft() | {LINEAR: VALUE.astype(np.int32)}, f"{LINEAR!r} is of type I32, not of F16, BF16"),
    "float8": (peft() | {LINEAR: VALUE.astype(ml_dtypes.float8_e4m3fn)}, f"{LINEAR!r} is of type F8_E4M3, not of F16"),
    "alpha_float8": (
        peft() | {f"{QUERY}.alpha": np.ones((), ml_dtypes.float8_e4m3fn)},
        f"'{QUERY}.alpha' is not one finite number",
    ),
    "not_finite": (peft() | {LINEAR: VALUE + np.inf}, f"{LINEAR!r} has numbers that are not finite"),
    "alpha_of_two": (peft() | {f"{QUERY}.alpha": np.ones(2)}, f"'{QUERY}.alpha' is not one finite number"),
    "alpha_not_finite": (peft() | {f"{QUERY}.alpha": np.full((), np.nan)}, ".alpha' is not one finite number"),
    "two_names": (
        peft() | {f"{QUERY}.lora.down.weight": VALUE},
        f"'{QUERY}.lora.down.weight' and {LINEAR!r} are two names of one tensor",
    ),
    "dora": (peft() | {f"{QUERY}.dora_scale": VALUE}, f"'{QUERY}.dora_scale' belongs to DoRA, which is not supported"),
    "dora_of_peft": (peft() | {f"{QUERY}.lora_magnitude_vector": VALUE}, "belongs to DoRA, which is not supported"),
    "loha": ({"lora_unet_conv_in.hada_w1_a": VALUE}, "'lora_unet_conv_in.hada_w1_a' belongs to LoHa, which is not"),
    "lokr": ({"lora_unet_conv_in.lokr_w1": VALUE}, "'lora_unet_conv_in.lokr_w1' belongs to LoKr, which is not"),
    "line_end": ({"evil\nkey": VALUE}, "'evil\\nkey'"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_cannot_be_merged_is_one_line_with_its_name_and_the_key(what, write, targets):
    tensors, complaint = BAD[what]
    adapter = write(tensors)
    with pytest.raises(CheckpointError) as caught:
        lora.changes([adapter], targets)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"{adapter.source}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["no_key_fits", "half_a_pair", "dora", "not_finite"])
def test_what_is_allowed_to_fit_in_part_must_still_be_whole(what, write, targets):
    tensors, complaint = BAD[what]
    with pytest.raises(CheckpointError) as caught:
        lora.changes([write(tensors, allow_partial=True)], targets)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("{", "lora_adapter_metadata in its header is not what diffusers writes there"),
        ("[]", "is not what diffusers writes there"),
        ({"unet.alpha_pattern": None}, "is not what diffusers writes there"),
        ({"unet.alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern '(a+)+$' in its header is not the name of a module"),
        ({"unet.lora_alpha": "much"}, "'unet.lora_alpha' is not one finite number"),
        ({"unet.lora_alpha": 10**400}, "'unet.lora_alpha' is not one finite number"),
    ],
)
def test_a_header_that_says_nothing_sensible_is_refused(header, complaint, write, targets):
    with pytest.raises(CheckpointError) as caught:
        lora.changes([write(peft(), header=header)], targets)
    assert complaint in str(caught.value)


def test_a_file_that_changed_under_the_run_is_refused(write, targets):
    adapter = write(peft())
    other = write(peft(down="other"))
    assert dataclasses.replace(adapter, sha256=other.sha256) == other
    with pytest.raises(CheckpointError, match=f"sha256 {other.sha256[:12]}, that of the recipe {adapter.sha256[:12]}"):
        lora.changes([adapter], targets)


def test_a_damaged_file_is_named(write, targets):
    adapter = write(peft())
    with Path(adapter.source).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"lora\.safetensors: not a readable safetensors file"):
        lora.changes([Adapter.find(adapter.source, 1.0, False)], targets)
