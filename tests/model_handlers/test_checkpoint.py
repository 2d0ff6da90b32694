"""A checkpoint is read strictly, whatever its age, and is refused with one clear line."""

import hashlib
import json
import pickle
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_handlers import checkpoint
from model_handlers.checkpoint import CheckpointError
from model_handlers.config import ConfigError
from model_handlers.stable_diffusion.model import NETWORKS, Configs, StableDiffusion
from model_handlers.stable_diffusion.tokens import Tokenizer
from model_handlers.tensors import _SafetensorsFile, read_tensors
from tests import checkpoints
from tests.parity import cases

VAE = "vae/diffusion_pytorch_model.safetensors"
ATTENTION = "decoder.mid_block.attentions.0"


@pytest.fixture
def root(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def networks(tiny_checkpoint):
    """Shapes only; `fill` replaces each with a weight, so tests that fill take their own."""
    return checkpoints.abstract_networks(tiny_checkpoint)


def edit(path, change):
    """Rewrites a safetensors file through a function that changes its dict of tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def filled(root, name="vae", variant=None):
    """A network's tensors after reading, in torch's layout."""
    network = getattr(checkpoints.abstract_networks(root), name)
    checkpoint.fill(network, root / name, variant=variant)
    checkpoint.save(network, root / "again" / name, np.float32)
    (path,) = checkpoint.weight_files(root / "again" / name)
    return load_file(path)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_saved_is_read_back_bit_by_bit(name, root):
    (path,) = checkpoint.weight_files(root / name)
    before, after = load_file(path), filled(root, name)
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(value, after[key], err_msg=key)


def test_missing_unused_and_misshapen_tensors_are_listed_together(root, networks):
    def change(tensors):
        del tensors["quant_conv.bias"], tensors[f"{ATTENTION}.to_q.bias"]
        tensors["loss.logvar"] = np.zeros(1, np.float32)
        tensors["decoder.conv_in.bias"] = np.zeros(7, np.float32)

    edit(root / VAE, change)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(networks.vae, root / "vae")
    message = str(caught.value)
    assert "\n" not in message
    assert f"2 missing: {ATTENTION}.to_q.bias, quant_conv.bias" in message
    assert "1 unused: loss.logvar" in message
    assert "decoder.conv_in.bias (7,), not (16,)" in message
    assert str(root / "vae") in message


def test_a_config_of_another_width_is_refused_before_weights_are_read(root):
    config = json.loads((root / "unet/config.json").read_text()) | {"cross_attention_dim": 96}
    (root / "unet/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="of another shape than config"):
        StableDiffusion.check(root)


def test_shards_are_read_by_their_index(root):
    tensors = load_file(root / VAE)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, root / "vae" / file)
        weight_map |= dict.fromkeys(part, file)
    (root / VAE).unlink()
    index = root / f"{VAE}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert filled(root).keys() == tensors.keys()

    (root / "vae/diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: missing, but .*index\.json lists it"):
        checkpoint.weight_files(root / "vae")


@pytest.mark.parametrize("name", ["../model_index.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "", 3])
def test_an_index_that_names_a_file_elsewhere_is_refused(name, root):
    (root / VAE).unlink()
    (root / f"{VAE}.index.json").write_text(json.dumps({"weight_map": {"quant_conv.bias": name}}))
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file in this folder"):
        checkpoint.weight_files(root / "vae")


@pytest.mark.parametrize("folder", ["../vae", "/vae", "a/b", "..", "vae\n"])
def test_a_model_index_that_names_a_folder_elsewhere_is_refused(folder, root):
    (root / "model_index.json").write_text(json.dumps({folder: ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(CheckpointError, match="is not a folder name"):
        checkpoint.components(root)


def test_the_fp16_variant_is_taken_when_asked_for_or_when_there_is_no_other(root):
    half = {name: value.astype(np.float16) for name, value in load_file(root / VAE).items()}
    save_file(half, root / "vae/diffusion_pytorch_model.fp16.safetensors")
    files = {variant: checkpoint.weight_files(root / "vae", variant) for variant in (None, "fp16")}
    assert [path.name for path in files[None]] == ["diffusion_pytorch_model.safetensors"]
    assert [path.name for path in files["fp16"]] == ["diffusion_pytorch_model.fp16.safetensors"]
    with pytest.raises(CheckpointError, match=r"no weights .*\.ema\.safetensors"):
        checkpoint.weight_files(root / "vae", "ema")
    (root / VAE).unlink()
    assert checkpoint.weight_files(root / "vae") == files["fp16"]
    for name, value in filled(root).items():
        np.testing.assert_array_equal(value, half[name].astype(np.float32))


def test_a_bfloat16_file_is_read_exactly(root):
    short = {name: value.astype(ml_dtypes.bfloat16) for name, value in load_file(root / VAE).items()}
    save_file(short, root / VAE)
    for name, value in filled(root).items():
        np.testing.assert_array_equal(value, short[name].astype(np.float32))


def test_of_a_mapped_file_only_what_was_read_last_stays_in_memory(root, monkeypatch):
    monkeypatch.setattr(_SafetensorsFile, "_MAPPED", 0)
    found = read_tensors([root / VAE])
    for name, value in load_file(root / VAE).items():
        np.testing.assert_array_equal(found[name].read(), value)
    assert Path("/proc/self/maps").read_text().count(str(root / VAE)) == 1


def test_parameters_keep_the_type_that_the_network_has(root):
    model = StableDiffusion.load(root, scheduler="EulerDiscreteScheduler", dtype="bfloat16")
    kinds = {leaf.dtype for leaf in jax.tree.leaves(model.networks) if isinstance(leaf, jax.Array)}
    assert kinds == {jnp.dtype("bfloat16")}


OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def test_a_vae_of_old_files_is_read_by_its_old_names(root):
    new = load_file(root / VAE)

    def change(tensors):
        for key in [key for key in tensors if ".attentions.0.to_" in key]:
            (today,) = (name for name in OLD_NAMES if f".{name}." in key)
            tensors[key.replace(today, OLD_NAMES[today])] = tensors.pop(key)

    edit(root / VAE, change)
    assert f"{ATTENTION}.proj_attn.weight" in load_file(root / VAE)
    for name, value in filled(root).items():
        np.testing.assert_array_equal(value, new[name])


def test_two_tensors_for_one_name_are_not_chosen_between(root, networks):
    edit(root / VAE, lambda tensors: tensors.update({f"{ATTENTION}.query.bias": np.zeros(16, np.float32)}))
    with pytest.raises(CheckpointError, match=r"1 unused: decoder\.mid_block\.attentions\.0\.(query|to_q)\.bias"):
        checkpoint.check(networks.vae, root / "vae")


def test_position_ids_of_older_text_encoders_are_passed_over(root):
    path = root / "text_encoder/model.safetensors"
    before = load_file(path)
    edit(path, lambda tensors: tensors.update({"text_model.embeddings.position_ids": np.arange(77)[None]}))
    assert filled(root, "text_encoder").keys() == before.keys()


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_text_encoders_saved_by_transformers_5_are_read(name, root):
    path = root / name / "model.safetensors"
    before = load_file(path)
    save_file({key.removeprefix("text_model."): value for key, value in before.items()}, path)
    assert not any(key.startswith("text_model.") for key in load_file(path))
    assert filled(root, name).keys() == before.keys()


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


@pytest.mark.parametrize("file", ["diffusion_pytorch_model.bin", "model.ckpt", "weights.pt", "weights.pth"])
def test_a_pickle_is_refused_with_how_to_convert_it(file, root, networks):
    (root / VAE).unlink()
    (root / "vae" / file).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(file)}: .*convert it .*save_pretrained.*safe_serialization"
    ):
        checkpoint.check(networks.vae, root / "vae")


def test_a_folder_without_weights_says_what_it_looked_for(root, networks):
    (root / VAE).unlink()
    with pytest.raises(CheckpointError, match=r"vae: no weights \(diffusion_pytorch_model\|model\.safetensors"):
        checkpoint.check(networks.vae, root / "vae")


def cut(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    "damage",
    [cut, lambda content: b"", lambda content: b"\xff" * 64, lambda content: pickle.dumps(Bomb())],
    ids=["cut", "empty", "noise", "pickle"],
)
def test_a_broken_safetensors_file_is_one_clear_line(damage, root, networks):
    (root / VAE).write_bytes(damage((root / VAE).read_bytes()))
    with pytest.raises(CheckpointError, match=r"^[^\n]*model\.safetensors: not a readable safetensors file[^\n]*$"):
        checkpoint.check(networks.vae, root / "vae")


@pytest.mark.parametrize("content", ["", "{", "[]", "\ufeff", "[" * 100_000])
def test_a_broken_config_is_one_clear_line(content, root):
    (root / "vae/config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*vae/config\.json: [^\n]*$"):
        StableDiffusion.check(root)


def test_a_folder_without_vocabulary_is_no_tokenizer(root):
    for file in (root / "tokenizer").iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer/vocab\.json: no such file"):
        StableDiffusion.check(root)


def test_a_tokenizer_of_a_larger_vocabulary_than_the_text_encoders_is_refused(root):
    config = json.loads((root / "text_encoder/config.json").read_text())
    (root / "text_encoder/config.json").write_text(json.dumps(config | {"vocab_size": cases.VOCABULARY_SIZE - 1}))
    sizes = f"{cases.VOCABULARY_SIZE} tokens, but the text encoder's vocab_size is {cases.VOCABULARY_SIZE - 1}"
    with pytest.raises(CheckpointError, match=sizes):
        StableDiffusion.check(root)


@pytest.mark.parametrize("file", ["vocab.json", "merges.txt", "tokenizer.json"])
def test_a_malformed_tokenizer_is_refused(file, root):
    (root / "tokenizer" / file).write_text('{"model": 3')
    with pytest.raises(CheckpointError, match="tokenizer"):
        StableDiffusion.check(root)


def test_a_tokenizer_saved_by_transformers_5_gives_the_same_ids(root, tmp_path):
    prompts = ["a red circle", "", "Zebra, naïve"]
    before = Tokenizer(root / "tokenizer", cases.VOCABULARY_SIZE, 77)
    before._tokenizer.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again/vocab.json").exists()
    after = Tokenizer(tmp_path / "again", cases.VOCABULARY_SIZE, 77)
    for one, other in zip(before(prompts), after(prompts), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)


def test_identity_is_the_same_wherever_the_checkpoint_lies(tiny_checkpoint, root):
    (root / "README.md").write_text("not a part of what decides pixels")
    assert checkpoint.identity(root) == checkpoint.identity(tiny_checkpoint)


def flip(name, key):
    def damage(root):
        edit(root / name, lambda tensors: tensors.update({key: -tensors[key]}))

    return damage


def rewrite(name, old, new):
    def damage(root):
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        flip(VAE, "quant_conv.bias"),
        flip("text_encoder/model.safetensors", "text_model.final_layer_norm.bias"),
        rewrite("vae/config.json", "0.13025", "0.18215"),
        rewrite("scheduler/scheduler_config.json", "leading", "trailing"),
        rewrite("tokenizer/merges.txt", "r e", "r f"),
        rewrite("tokenizer_2/tokenizer_config.json", '"pad_token": "!"', '"pad_token": "a"'),
        rewrite("model_index.json", "true", "false"),
        lambda root: (root / "tokenizer/added_tokens.json").write_text('{"<new>": 5}'),
    ],
    ids=["vae", "text", "scaling factor", "spacing", "merges", "pad token", "empty prompt", "added tokens"],
)
def test_identity_changes_with_everything_that_decides_pixels(damage, root):
    before = checkpoint.identity(root)
    damage(root)
    assert checkpoint.identity(root) != before


def test_a_file_of_weights_is_read_once_for_its_identity(root, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "SETTLED", -1.0)
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(Path(file.name)) or digest(file, kind))
    before = checkpoint.identity(root)
    assert root / VAE in read
    read.clear()
    assert checkpoint.identity(root) == before
    assert {path.suffix for path in read} == {".json", ".txt"}
    flip(VAE, "quant_conv.bias")(root)
    assert checkpoint.identity(root) != before
    assert [path for path in read if path.suffix == ".safetensors"] == [root / VAE]


def test_a_file_that_was_just_written_is_not_remembered(root, monkeypatch, tmp_path):
    # Its times could stay the same over the next write.
    monkeypatch.setenv("LIGHTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "SETTLED", 1e9)
    assert checkpoint.identity(root)
    assert not (tmp_path / "cache").exists()


def test_identity_needs_no_cache(root, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "SETTLED", -1.0)
    before = checkpoint.identity(root)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTMILL_CACHE", str(tmp_path / "file/cache"))
    assert checkpoint.identity(root) == before


def test_identity_of_an_incomplete_checkpoint_is_one_clear_line(root):
    (root / "vae/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"vae/config\.json: no such file"):
        checkpoint.identity(root)


def test_a_feature_extractor_is_no_part_of_the_pipeline(root):
    # Many checkpoints name one for a safety checker; it has no weights and decides no pixel.
    index = json.loads((root / "model_index.json").read_text())
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    (root / "model_index.json").write_text(json.dumps(index))
    assert checkpoint.identity(root)


@pytest.mark.parametrize(("said", "zeros"), [("", True), ("true", True), ("false", False), ("null", False)])
def test_zeros_for_an_absent_negative_prompt_are_the_default_and_may_be_switched_off(said, zeros, root):
    index = json.loads((root / "model_index.json").read_text())
    del index["force_zeros_for_empty_prompt"]
    index |= {"force_zeros_for_empty_prompt": json.loads(said)} if said else {}
    (root / "model_index.json").write_text(json.dumps(index))
    assert Configs.read(root).force_zeros_for_empty_prompt is zeros


def test_an_unclear_word_on_zeros_is_refused(root):
    index = json.loads((root / "model_index.json").read_text())
    (root / "model_index.json").write_text(json.dumps(index | {"force_zeros_for_empty_prompt": "no"}))
    with pytest.raises(ConfigError, match=r"model_index\.json: force_zeros_for_empty_prompt='no' is neither true nor"):
        Configs.read(root)
