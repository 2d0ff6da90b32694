"""Single files of the original releases and weights of the Flax pipelines are the same checkpoint, tensor by tensor."""

import json
import pickle
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.serialization import msgpack_serialize
from safetensors.numpy import load_file, save_file

from model_handlers import checkpoint, fetch
from model_handlers.checkpoint import CheckpointError
from model_handlers.families import family_of
from model_handlers.stable_diffusion.model import NETWORKS, StableDiffusion
from model_handlers.tensors import read_tensors
from tests import checkpoints, layouts
from tests.parity import cases

CASES = {case.name: case for case in cases.CASES if case.name in cases.SINGLE_FILES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint folder for each family, not to be changed."""
    return {name: checkpoints.write(case, tmp_path_factory.mktemp(name)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def outlines(folders):
    """The networks of each family by the names of their folders, as shapes only."""
    return {
        name: {part: getattr(networks, part) for part in NETWORKS if getattr(networks, part) is not None}
        for name, networks in ((name, checkpoints.abstract_networks(folder)) for name, folder in folders.items())
    }


def single_file(folders, name, tmp_path):
    path = tmp_path / f"{name}.safetensors"
    layouts.write_single_file(folders[name], path, cases.SINGLE_FILES[name], CASES[name].unet["layers_per_block"])
    return path


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def check(outline, root):
    """What `check` of a family does for the weights."""
    for name, network in outline.items():
        checkpoint.check(network, root / name)


def assert_same_tensors(mine, expected):
    for name, tensor in expected.items():
        assert mine[name].shape == tensor.shape
        np.testing.assert_array_equal(mine[name].read(), tensor.read(), err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_single_file_holds_the_tensors_of_the_folder_bit_by_bit(name, folders, outlines, tmp_path):
    path = single_file(folders, name, tmp_path)
    check(outlines[name], fetch.checkpoint_folder(str(path), config=str(folders[name])))
    for part, network in outlines[name].items():
        mine = network.from_original(read_tensors([path]))
        assert_same_tensors(mine, read_tensors(checkpoint.weight_files(folders[name] / part)))


def test_a_single_file_makes_the_model_that_its_folder_makes(folders, tmp_path):
    root = fetch.checkpoint_folder(str(single_file(folders, "as_sd_1", tmp_path)), config=str(folders["as_sd_1"]))
    mine, expected = (
        StableDiffusion.load(where, scheduler="EulerDiscreteScheduler", dtype="float32").networks
        for where in (root, folders["as_sd_1"])
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(mine, nnx.Param), nnx.state(expected, nnx.Param))


def test_training_left_overs_and_the_layer_that_sd_2_does_not_read_are_passed_over(folders, outlines, tmp_path):
    path = single_file(folders, "as_sd_2_base", tmp_path)
    layers = CASES["as_sd_2_base"].text_encoder["num_hidden_layers"]
    encoder = "cond_stage_model.model."

    def change(tensors):
        for name, value in list(tensors.items()):
            if name.startswith(f"{encoder}transformer.resblocks.0."):
                tensors[name.replace("resblocks.0.", f"resblocks.{layers}.")] = value
        ones = ("model_ema.decay", "model_ema.diffusion_modeltime_embed0weight", "betas", "alphas_cumprod_prev")
        ones += ("log_one_minus_alphas_cumprod", "first_stage_model.loss.logvar", "denoiser.sigmas")
        tensors |= dict.fromkeys((*ones, f"{encoder}text_projection"), np.ones(1, np.float32))

    edit(path, change)
    check(outlines["as_sd_2_base"], fetch.checkpoint_folder(str(path), config=str(folders["as_sd_2_base"])))


@pytest.mark.parametrize(
    "stray",
    [
        "model.diffusion_model.input_blocks.1.0.in_layers.9.weight",
        "model.diffusion_model.middle_block.7.norm.weight",
        "first_stage_model.decoder.mid.attn_2.q.weight",
        "conditioner.embedders.2.weight",
        "control_model.zero.weight",
        "edm_mean",
    ],
)
def test_a_tensor_of_a_single_file_that_nothing_reads_is_named(stray, folders, outlines, tmp_path):
    path = single_file(folders, "as_sdxl", tmp_path)
    edit(path, lambda tensors: tensors.update({stray: np.ones(1, np.float32)}))
    root = fetch.checkpoint_folder(str(path), config=str(folders["as_sdxl"]))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: the tensors do not fit .* 1 unused: [^;]*$"):
        check(outlines["as_sdxl"], root)


@pytest.mark.parametrize(
    "lost", ["first_stage_model.decoder.up.0.block.1.conv1.bias", "model.diffusion_model.output_blocks.2.2.conv.bias"]
)
def test_a_tensor_that_a_single_file_lacks_is_named(lost, folders, outlines, tmp_path):
    path = single_file(folders, "as_sdxl", tmp_path)
    edit(path, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=r"1 missing: (decoder\.up_blocks\.3\.\S+conv1|up_blocks\.0\.upsam\S+)"):
        check(outlines["as_sdxl"], fetch.checkpoint_folder(str(path), config=str(folders["as_sdxl"])))


@pytest.mark.parametrize(
    ("name", "config"), [("as_sd_1", "as_sdxl"), ("as_sdxl", "as_sd_1"), ("as_sd_2_base", "as_sdxl")]
)
def test_a_config_of_another_family_is_refused(name, config, folders, outlines, tmp_path):
    path = single_file(folders, name, tmp_path)
    root = fetch.checkpoint_folder(str(path), config=str(folders[config]))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: [^\n]{{,5000}}$"):
        check(outlines[config], root)


@pytest.mark.parametrize("shape", [(), (3,), (7, 3, 1, 1), (2, 3, 3, 3)])
@pytest.mark.parametrize(
    "name",
    [
        "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight",
        "conditioner.embedders.1.model.text_projection",
        "first_stage_model.encoder.mid.attn_1.q.weight",
    ],
)
def test_a_tensor_of_an_odd_shape_is_one_clear_line(name, shape, folders, outlines, tmp_path):
    path = single_file(folders, "as_sdxl", tmp_path)
    edit(path, lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}))
    with pytest.raises(CheckpointError, match=r"of another shape than config\.json says: "):
        check(outlines["as_sdxl"], fetch.checkpoint_folder(str(path), config=str(folders["as_sdxl"])))


def test_a_single_file_without_config_says_what_to_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"^/a/sdxl\.safetensors: .*weights only; --config names [^\n]*$"):
        fetch.checkpoint_folder("/a/sdxl.safetensors")


@pytest.mark.parametrize("source", ["/nowhere/a.safetensors", "a.safetensors", "a/b/c/d/../e.safetensors"])
def test_a_single_file_that_is_not_there_is_one_clear_line(source, folders):
    with pytest.raises(CheckpointError, match=rf"^{re.escape(source)}: no such file$"):
        fetch.checkpoint_folder(source, config=str(folders["as_sd_1"]))


def test_a_config_or_a_variant_where_it_means_nothing_is_refused(folders):
    folder = str(folders["as_sd_1"])
    with pytest.raises(CheckpointError, match=r"^--config .*: only for a single file, and .* is none$"):
        fetch.checkpoint_folder(folder, config=folder)
    with pytest.raises(CheckpointError, match=r"^--variant fp16: .*a single file has none$"):
        fetch.checkpoint_folder("a.safetensors", "fp16", folder)


@pytest.mark.parametrize("suffix", ["ckpt", "pt", "pth", "bin"])
def test_a_single_file_that_is_a_pickle_is_refused_with_how_to_convert_it(suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"^[^\n]*: a pickle .*convert it .*from_single_file.*save_pretrained"):
        fetch.checkpoint_folder(str(path))


def test_identity_of_a_single_file_is_of_its_content_and_of_its_configs(folders, tmp_path):
    path = single_file(folders, "as_sd_1", tmp_path)
    configs = shutil.copytree(folders["as_sd_1"], tmp_path / "configs")
    before = checkpoint.identity(fetch.checkpoint_folder(str(path), config=str(configs)))

    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(path, tmp_path / "elsewhere/renamed.safetensors")
    assert checkpoint.identity(fetch.checkpoint_folder(str(moved), config=str(folders["as_sd_1"]))) == before

    edit(path, lambda tensors: tensors.update({"first_stage_model.quant_conv.bias": np.ones(8, np.float32)}))
    changed = checkpoint.identity(fetch.checkpoint_folder(str(path), config=str(configs)))
    assert changed != before
    config = json.loads((configs / "vae/config.json").read_text()) | {"scaling_factor": 0.5}
    (configs / "vae/config.json").write_text(json.dumps(config))
    assert checkpoint.identity(fetch.checkpoint_folder(str(path), config=str(configs))) not in (before, changed)


def as_flax(root, target, dtype=np.float32):
    """A copy of a checkpoint as the Flax pipelines saved it."""
    shutil.copytree(root, target)
    for path in (target / "model_index.json", target / "scheduler/scheduler_config.json"):
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"_class_name": f"Flax{config['_class_name']}"}))
    for file in target.glob("*/*.safetensors"):
        tensors = {name: value.astype(dtype) for name, value in load_file(file).items()}
        stem = "flax_model" if file.parent.name.startswith("text_encoder") else "diffusion_flax_model"
        (file.parent / f"{stem}.msgpack").write_bytes(msgpack_serialize(layouts.flax_tree(tensors)))
        file.unlink()
    return target


@pytest.mark.parametrize("name", CASES)
def test_weights_of_the_flax_pipelines_are_those_of_torch_bit_by_bit(name, folders, outlines, tmp_path):
    root = as_flax(folders[name], tmp_path / "flax")
    check(outlines[name], root)
    for part in outlines[name]:
        mine, expected = (read_tensors(checkpoint.weight_files(where / part)) for where in (root, folders[name]))
        assert_same_tensors(mine, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_the_flax_pipelines_is_described_as_todays(name, folders, tmp_path):
    root = as_flax(folders[name], tmp_path / "flax")
    assert family_of(root).describe(root) == family_of(folders[name]).describe(folders[name])


def test_flax_weights_in_bfloat16_are_read_exactly(folders, tmp_path):
    root = as_flax(folders["as_sd_1"], tmp_path / "flax", ml_dtypes.bfloat16)
    short, full = (read_tensors(checkpoint.weight_files(where / "vae")) for where in (root, folders["as_sd_1"]))
    for name, tensor in full.items():
        np.testing.assert_array_equal(short[name].read(), tensor.read().astype(ml_dtypes.bfloat16), err_msg=name)


def test_names_of_flax_weights_are_those_that_were_published(folders):
    tree = layouts.flax_tree(layouts.read(folders["as_sd_1"] / "unet"))
    block = tree["down_blocks_0"]["attentions_1"]["transformer_blocks_0"]
    assert block["attn1"]["to_out_0"]["kernel"].shape == (32, 32)
    assert block["ff"]["net_0"]["proj"]["kernel"].shape == (32, 256)
    assert tree["time_embedding"]["linear_1"]["kernel"].shape == (32, 128)
    assert tree["conv_in"]["kernel"].shape == (3, 3, 4, 32)
    text = layouts.flax_tree(layouts.read(folders["as_sd_1"] / "text_encoder"))["text_model"]
    assert text["encoder"]["layers"]["0"]["layer_norm1"]["scale"].shape == (32,)
    assert text["embeddings"]["position_embedding"]["embedding"].shape == (77, 32)


def test_safetensors_go_before_flax_weights(folders, tmp_path):
    folder = shutil.copytree(folders["as_sd_1"] / "vae", tmp_path / "vae")
    (folder / "diffusion_flax_model.msgpack").write_bytes(b"")
    assert [path.suffix for path in checkpoint.weight_files(folder)] == [".safetensors"]


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        pickle.dumps(Bomb()),
        msgpack_serialize({"conv_in": {"kernel": np.zeros((2, 3))}})[:-1],
        msgpack_serialize({"conv_in": {"kernel": 3}}),
        msgpack_serialize({"conv_in": {"mean": np.zeros(3)}}),
        msgpack_serialize({"conv_in": {"kernel": np.array([b"a"])}}),
        msgpack_serialize([1]),
        msgpack_serialize({"a": {"__msgpack_chunked_array__": True, "shape": 3}}),
    ],
    ids=["empty", "noise", "pickle", "cut", "number", "leaf", "text", "list", "chunks"],
)
def test_a_broken_file_of_flax_weights_is_one_clear_line(content, outlines, tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/diffusion_flax_model.msgpack").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*vae/diffusion_flax_model\.msgpack: [^\n]*$"):
        checkpoint.check(outlines["as_sd_1"]["vae"], tmp_path / "vae")
