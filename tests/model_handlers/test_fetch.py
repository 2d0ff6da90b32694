"""Checkpoints come from a folder, a bucket or the hub, and a wrong address is one clear line."""

import os
import re
import socket

import pytest
from gcp_storage_emulator.server import create_server
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from huggingface_hub.errors import LocalEntryNotFoundError

from model_handlers import checkpoint, fetch
from model_handlers.checkpoint import CheckpointError


@pytest.fixture(scope="module")
def emulator():
    """Address of a Cloud Storage server in this process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = create_server("localhost", port, in_memory=True)
    server.start()
    yield f"http://localhost:{port}"
    server.stop()


@pytest.fixture
def bucket(emulator, monkeypatch, tmp_path):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    monkeypatch.setenv("LIGHTMILL_CACHE", str(tmp_path / "cache"))
    name = f"bucket-{os.urandom(4).hex()}"
    return storage.Client(project="emulator", credentials=AnonymousCredentials()).create_bucket(name)


def upload(bucket, tiny_checkpoint, prefix):
    for path in tiny_checkpoint.rglob("*"):
        if path.is_file():
            bucket.blob(f"{prefix}{path.relative_to(tiny_checkpoint).as_posix()}").upload_from_filename(path)


@pytest.fixture
def downloads(monkeypatch):
    """The names of the objects that were downloaded."""
    names = []
    download = storage.Blob.download_to_filename

    def noted(blob, *args, **kwargs):
        names.append(blob.name)
        return download(blob, *args, **kwargs)

    monkeypatch.setattr(storage.Blob, "download_to_filename", noted)
    return names


def test_a_folder_is_used_where_it_lies(tiny_checkpoint):
    assert fetch.checkpoint_folder(str(tiny_checkpoint)) == tiny_checkpoint


@pytest.mark.parametrize(("prefix", "slash"), [("models/tiny/", ""), ("models/tiny/", "/"), ("", "")])
def test_a_bucket_is_downloaded_once(prefix, slash, bucket, tiny_checkpoint, downloads):
    upload(bucket, tiny_checkpoint, prefix)
    source = f"gs://{bucket.name}/{prefix}".rstrip("/") + slash
    root = fetch.checkpoint_folder(source)
    assert checkpoint.identity(root) == checkpoint.identity(tiny_checkpoint)
    first = sorted(downloads)
    assert len(first) == len(set(first)) == sum(path.is_file() for path in tiny_checkpoint.rglob("*"))
    assert fetch.checkpoint_folder(source) == root
    assert sorted(downloads) == first


def test_only_what_changed_in_a_bucket_is_downloaded_again(bucket, tiny_checkpoint, downloads):
    upload(bucket, tiny_checkpoint, "")
    root = fetch.checkpoint_folder(f"gs://{bucket.name}")
    before = checkpoint.identity(root)
    downloads.clear()
    bucket.blob("vae/config.json").upload_from_string(
        (tiny_checkpoint / "vae/config.json").read_text().replace("0.13", "0.14")
    )
    assert checkpoint.identity(fetch.checkpoint_folder(f"gs://{bucket.name}")) != before
    assert downloads == ["vae/config.json"]


def test_a_download_that_broke_off_is_not_taken_for_the_file(bucket, tiny_checkpoint, monkeypatch):
    upload(bucket, tiny_checkpoint, "")

    def broken(blob, path, **_):
        path.write_bytes(b"half")
        raise ConnectionError("reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(storage.Blob, "download_to_filename", broken)
        with pytest.raises(CheckpointError, match=rf"^gs://{bucket.name}: cannot be read \(reset by peer\)$"):
            fetch.checkpoint_folder(f"gs://{bucket.name}")
    root = fetch.checkpoint_folder(f"gs://{bucket.name}")
    assert checkpoint.identity(root) == checkpoint.identity(tiny_checkpoint)


def test_objects_outside_the_checkpoints_folders_stay_where_they_are(bucket, tiny_checkpoint, downloads):
    upload(bucket, tiny_checkpoint, "tiny/")
    strays = ["tiny/other/a.json", "tiny/vae/weights.bin", "tiny/vae/deep/a.json"]
    for stray in strays:
        bucket.blob(stray).upload_from_string("{}")
    root = fetch.checkpoint_folder(f"gs://{bucket.name}/tiny")
    assert checkpoint.identity(root) == checkpoint.identity(tiny_checkpoint)
    assert not set(strays) & set(downloads)


def test_a_bucket_without_a_checkpoint_is_one_clear_line(bucket):
    with pytest.raises(CheckpointError, match=rf"^gs://{bucket.name}/none: no model_index\.json there; .*$"):
        fetch.checkpoint_folder(f"gs://{bucket.name}/none")
    with pytest.raises(CheckpointError, match=r"^gs://no-such-bucket-here/a: .*$"):
        fetch.checkpoint_folder("gs://no-such-bucket-here/a")


def test_a_single_file_in_a_bucket_is_downloaded_once_and_no_weights_of_its_config(bucket, tiny_checkpoint, downloads):
    upload(bucket, tiny_checkpoint, "configs/")
    bucket.blob("sdxl.safetensors").upload_from_string(b"weights")
    source, config = f"gs://{bucket.name}/sdxl.safetensors", f"gs://{bucket.name}/configs"
    root = fetch.checkpoint_folder(source, config=config)
    assert (root / checkpoint.SINGLE_FILE).read_bytes() == b"weights"
    assert (root / "vae/config.json").read_text() == (tiny_checkpoint / "vae/config.json").read_text()
    assert [name for name in downloads if name.endswith(".safetensors")] == ["sdxl.safetensors"]
    first = sorted(downloads)
    assert fetch.checkpoint_folder(source, config=config) == root
    assert sorted(downloads) == first
    with pytest.raises(CheckpointError, match=rf"^gs://{bucket.name}/no\.safetensors: no such object$"):
        fetch.checkpoint_folder(f"gs://{bucket.name}/no.safetensors", config=config)


def test_a_single_file_on_the_hub_is_asked_for_by_its_name(tiny_checkpoint, monkeypatch, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    asked = []
    monkeypatch.setattr(fetch, "hf_hub_download", lambda *names: asked.append(names) or str(tmp_path / "a.safetensors"))
    root = fetch.checkpoint_folder("org/name/unpruned/a.safetensors", config=str(tiny_checkpoint))
    assert asked == [("org/name", "unpruned/a.safetensors")]
    assert (root / checkpoint.SINGLE_FILE).read_bytes() == b"weights"


def test_flax_weights_are_downloaded_only_where_there_are_no_others(bucket, tiny_checkpoint, downloads):
    upload(bucket, tiny_checkpoint, "")
    bucket.blob("vae/diffusion_pytorch_model.safetensors").delete()
    for name in ("vae/diffusion_flax_model.msgpack", "unet/diffusion_flax_model.msgpack"):
        bucket.blob(name).upload_from_string(b"weights")
    fetch.checkpoint_folder(f"gs://{bucket.name}")
    assert [name for name in downloads if name.endswith(".msgpack")] == ["vae/diffusion_flax_model.msgpack"]


@pytest.mark.parametrize("source", ["/nowhere", "./nowhere", "nowhere", "tests/nowhere", "a/b/c", "s3://bucket/a"])
def test_a_wrong_address_is_one_clear_line(source):
    with pytest.raises(CheckpointError, match=rf"^{re.escape(source)}: no such folder; --checkpoint takes[^\n]*$"):
        fetch.checkpoint_folder(source)


@pytest.mark.parametrize(
    ("variant", "weights"), [(None, "*/*.safetensors*"), ("fp16", "*/*.fp16.safetensors*")], ids=["none", "fp16"]
)
def test_the_hub_is_asked_for_safetensors_and_json_only(variant, weights, tiny_checkpoint, monkeypatch):
    asked = {}

    def snapshot_download(repository, allow_patterns):
        asked[repository] = allow_patterns
        return str(tiny_checkpoint)

    monkeypatch.setattr(fetch, "snapshot_download", snapshot_download)
    assert fetch.checkpoint_folder("stabilityai/sdxl-base", variant) == tiny_checkpoint
    assert asked == {"stabilityai/sdxl-base": ["*/*.json", "*/*.txt", "model_index.json", weights]}


def test_a_hub_that_does_not_answer_is_one_clear_line(monkeypatch):
    def snapshot_download(*_, **__):
        raise LocalEntryNotFoundError("cannot reach the hub\nmore about it")

    monkeypatch.setattr(fetch, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"^org/name: not here, and the hub .*\(cannot reach the hub\)$"):
        fetch.checkpoint_folder("org/name")


def test_a_lora_file_is_used_where_it_lies_or_downloaded_once(bucket, downloads, tmp_path):
    local = tmp_path / "style.safetensors"
    local.write_bytes(b"weights")
    assert fetch.lora_file(str(local)) == local
    bucket.blob("lora/style.safetensors").upload_from_filename(local)
    source = f"gs://{bucket.name}/lora/style.safetensors"
    assert fetch.lora_file(source) == fetch.lora_file(source)
    assert fetch.lora_file(source).read_bytes() == b"weights"
    assert downloads == ["lora/style.safetensors"]


def test_the_hub_is_asked_for_a_lora_file_by_its_name_in_the_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "hf_hub_download", lambda repository, name: tmp_path / repository / name)
    assert fetch.lora_file("org/styles/ink/v1.safetensors") == tmp_path / "org/styles/ink/v1.safetensors"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("style.pt", "style.pt: a pickle can run code, so it is not read; convert it in a place you trust"),
        ("org/name/pytorch_lora_weights.bin", "a pickle can run code"),
        ("style", "style: --lora takes FILE.safetensors or FILE.safetensors:WEIGHT"),
        ("nothing.safetensors", "nothing.safetensors: no such file"),
        ("{folder}/a/b.safetensors", "no such file"),
    ],
)
def test_a_lora_file_that_is_not_there_or_a_pickle_is_one_clear_line(source, complaint, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        fetch.lora_file(source.format(folder=tmp_path))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
