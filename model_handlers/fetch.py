"""Brings checkpoints to this machine's disk: from folders or files, local, on gs:// or on the Hugging Face hub."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.api_core.exceptions import GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage  # type: ignore[attr-defined]  # the namespace has no type information
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from model_handlers import checkpoint
from model_handlers.checkpoint import CheckpointError

# The small checkpoint in this package; a name and not a path, because a worker has it elsewhere.
EMBEDDED = "embedded"
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILE = re.compile(rf"({HUB_ID.pattern})/((?!.*\.\.)[\w./-]+)")


def checkpoint_folder(source: str, variant: str | None = None, config: str | None = None, weights: bool = True) -> Path:
    """A local folder with the checkpoint in diffusers' layout.

    What is downloaded stays in a cache, LIGHTMILL_CACHE or ~/.cache/lightmill for gs://, the hub's own for hub ids.

    Args:
      source: "embedded", an existing folder, `gs://bucket/folder`, or a hub id, ORG/NAME; or a single file in the
        original layout: FILE.safetensors, local, gs:// or ORG/NAME/FILE.safetensors.
      variant: of the weight files, such as "fp16"; others are not downloaded from the hub.
      config: only with a single file, which has none: a folder or hub id with the configs and tokenizers.
      weights: whether they are wanted; without them a single file need not be there.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be reached.
    """
    if source.endswith(PICKLES):
        raise CheckpointError(
            f"{source}: a pickle can run code, so it is not read; convert it in a place you trust: "
            "diffusers' StableDiffusionPipeline.from_single_file(FILE).save_pretrained(DIR)"
        )
    if source.endswith(".safetensors"):
        if variant is not None:
            raise CheckpointError(f"--variant {variant}: chooses among the files of a folder; a single file has none")
        return _with_configs(source, config, weights)
    if config is not None:
        raise CheckpointError(f"--config {config}: only for a single file, and {source} is none")
    return _folder(source, variant, weights)


def list_files(folder: str) -> list[str]:
    """Names of the files that lie directly in a folder, local or gs://; none if there is no such folder.

    Raises:
      CheckpointError: it cannot be reached.
    """
    if not folder.startswith("gs://"):
        return [path.name for path in Path(folder).iterdir() if path.is_file()] if Path(folder).is_dir() else []
    bucket_name, _, prefix = f"{folder.rstrip('/')}/".removeprefix("gs://").partition("/")
    with _gcs(folder) as client:
        blobs = client.list_blobs(bucket_name, prefix=prefix, delimiter="/")
        return [blob.name.removeprefix(prefix) for blob in blobs]


def read_file(folder: str, name: str) -> bytes:
    """The bytes of one of them; errors as of `list_files`, also if it is not there."""
    bucket_name, _, prefix = f"{folder.rstrip('/')}/".removeprefix("gs://").partition("/")
    if folder.startswith("gs://"):
        with _gcs(f"{folder}/{name}") as client:
            return client.bucket(bucket_name).blob(f"{prefix}{name}").download_as_bytes()
    try:
        return Path(folder, name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder}/{name}: cannot be read ({error})") from error


def lora_file(source: str) -> Path:
    """A LoRA file, cached as checkpoints are; local, gs:// or ORG/NAME/FILE.safetensors.

    Raises:
      CheckpointError: there is no such file, it cannot be reached, or it is a pickle.
    """
    if source.endswith(PICKLES):
        raise CheckpointError(
            f"{source}: a pickle can run code, so it is not read; convert it in a place you trust: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), NAME)"
        )
    if not source.endswith(".safetensors"):
        raise CheckpointError(f"{source}: --lora takes FILE.safetensors or FILE.safetensors:WEIGHT")
    return _single_file(source)


def _with_configs(source: str, config: str | None, weights: bool) -> Path:
    """A folder of links to a single file and, for what it lacks, to the parts of another checkpoint."""
    if config is None:
        raise CheckpointError(
            f"{source}: a single file holds weights only; --config names a checkpoint of its family, from which "
            "configs and tokenizers come, such as --config stabilityai/stable-diffusion-xl-base-1.0"
        )
    configs = _folder(config, weights=False).absolute()
    if not weights:
        return configs
    file = _single_file(source).absolute()
    links = {name: configs / name for name in ("model_index.json", *checkpoint.components(configs))}
    name = hashlib.sha256(f"{file}\n{configs}".encode()).hexdigest()[:16]
    root = checkpoint.cache_folder() / "single_files" / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        for link, target in {**links, checkpoint.SINGLE_FILE: file}.items():
            with contextlib.suppress(FileExistsError):  # the folder's name says where they lead
                (root / link).symlink_to(target)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be made, LIGHTMILL_CACHE names another place ({error})") from error
    return root


def _single_file(source: str) -> Path:
    if source.startswith("gs://"):
        return _file_from_gcs(source)
    if (local := Path(source)).is_file():
        return local
    if (on_hub := HUB_FILE.fullmatch(source)) and not local.parent.is_dir():
        with _hub(source):
            return Path(hf_hub_download(*on_hub.groups()))
    raise CheckpointError(f"{source}: no such file")


def _folder(source: str, variant: str | None = None, weights: bool = True) -> Path:
    if source == EMBEDDED:
        return Path(__file__).parent / "embedded"
    if source.startswith("gs://"):
        return _from_gcs(source, weights)
    if (local := Path(source)).is_dir():
        return local
    # A path that does not exist is a typing error and not a hub id, unless it can only be the latter.
    if HUB_ID.fullmatch(source) and not local.parent.is_dir():
        return _from_hub(source, variant, weights)
    raise CheckpointError(
        f"{source}: no such folder; --checkpoint takes a folder, gs://..., a hub id ORG/NAME or FILE.safetensors"
    )


def _from_hub(repository: str, variant: str | None, weights: bool) -> Path:
    patterns = ["*/*.json", "*/*.txt", "model_index.json"]
    if weights:
        patterns.append(f"*/*.{variant}.safetensors*" if variant else "*/*.safetensors*")
    with _hub(repository):
        return Path(snapshot_download(repository, allow_patterns=patterns))


@contextlib.contextmanager
def _hub(source: str) -> Iterator[None]:
    try:
        yield
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{source}: not here, and the hub did not give it ({reason})") from error


@contextlib.contextmanager
def _gcs(source: str) -> Iterator[storage.Client]:
    try:
        yield _client()
    except (GoogleAPIError, GoogleAuthError, OSError) as error:  # the last: a broken connection, or a full disk
        raise CheckpointError(f"{source}: cannot be read ({str(error).splitlines()[0]})") from error


def _cached(source: str) -> Path:
    return checkpoint.cache_folder() / "checkpoints" / hashlib.sha256(source.encode()).hexdigest()[:16]


def _file_from_gcs(source: str) -> Path:
    bucket_name, _, name = source.removeprefix("gs://").partition("/")
    path = _cached(source) / name.rpartition("/")[2]
    with _gcs(source) as client:
        if (blob := client.bucket(bucket_name).get_blob(name)) is None:
            raise CheckpointError(f"{source}: no such object")
        _download(blob, path)
    return path


def _from_gcs(source: str, weights: bool) -> Path:
    bucket_name, _, prefix = source.removeprefix("gs://").partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    root = _cached(source)
    with _gcs(source) as client:
        blobs = {blob.name.removeprefix(prefix): blob for blob in client.list_blobs(bucket_name, prefix=prefix)}
        if "model_index.json" not in blobs:
            raise CheckpointError(f"{source}: no model_index.json there; a checkpoint is a folder in diffusers' layout")
        _download(blobs["model_index.json"], root / "model_index.json")
        for folder in checkpoint.components(root):
            # Only files directly in the folders that the checkpoint names: no object name leads elsewhere.
            names = [name for name in blobs if re.fullmatch(rf"{folder}/[\w.-]+", name)]
            for name in _needed(names, weights):
                _download(blobs[name], root / name)
    return root


def _needed(names: Sequence[str], weights: bool) -> list[str]:
    """Of a folder's files those that are read: of weights in two formats only safetensors, since the rest is large."""
    suffixes = [".json", ".txt"]
    if weights:
        suffixes += [".safetensors"] if any(name.endswith(".safetensors") for name in names) else [".msgpack"]
    return [name for name in names if name.endswith(tuple(suffixes))]


def _download(blob: storage.Blob, path: Path) -> None:
    """Downloads an object unless this generation of it is here already; a file appears only when it is whole."""
    mark = path.with_name(f"{path.name}.generation")
    generation = str(blob.generation)  # the one that is downloaded; afterwards blob has what the answer's headers said
    if path.is_file() and mark.is_file() and mark.read_text() == generation:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    blob.download_to_filename(partial)
    partial.replace(path)
    mark.write_text(generation)


def _client() -> storage.Client:
    if os.environ.get("STORAGE_EMULATOR_HOST"):  # an emulator knows no credentials, and looking for some takes long
        return storage.Client(project="emulator", credentials=AnonymousCredentials())
    return storage.Client()
