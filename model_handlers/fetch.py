"""Brings a checkpoint to this machine's disk: a local folder, a gs:// folder or a Hugging Face hub id."""

import hashlib
import os
import re
from pathlib import Path

from google.api_core.exceptions import GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage  # type: ignore[attr-defined]  # the namespace has no type information
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from model_handlers import checkpoint
from model_handlers.checkpoint import CheckpointError

# The small checkpoint in this package; a name and not a path, because a worker has it elsewhere.
EMBEDDED = "embedded"
SUFFIXES = (".json", ".txt", ".safetensors")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def checkpoint_folder(source: str, variant: str | None = None) -> Path:
    """A local folder with the checkpoint in diffusers' layout.

    What is downloaded stays in a cache, LIGHTMILL_CACHE or ~/.cache/lightmill for gs://, the hub's own for hub ids.

    Args:
      source: "embedded", an existing folder, `gs://bucket/folder`, or a hub id, ORG/NAME.
      variant: of the weight files, such as "fp16"; others are not downloaded from the hub.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be reached.
    """
    if source == EMBEDDED:
        return Path(__file__).parent / "embedded"
    if source.startswith("gs://"):
        return _from_gcs(source)
    if (local := Path(source)).is_dir():
        return local
    # A path that does not exist is a typing error and not a hub id, unless it can only be the latter.
    if HUB_ID.fullmatch(source) and not local.parent.is_dir():
        return _from_hub(source, variant)
    raise CheckpointError(f"{source}: no such folder; --checkpoint takes a folder, gs://... or a hub id ORG/NAME")


def _from_hub(repository: str, variant: str | None) -> Path:
    weights = f"*/*.{variant}.safetensors*" if variant else "*/*.safetensors*"
    try:
        return Path(snapshot_download(repository, allow_patterns=["*/*.json", "*/*.txt", "model_index.json", weights]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{repository}: no such folder, and the hub did not give it ({reason})") from error


def _from_gcs(source: str) -> Path:
    bucket_name, _, prefix = source.removeprefix("gs://").partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    cache = Path(os.environ.get("LIGHTMILL_CACHE", Path.home() / ".cache/lightmill"))
    root = cache / "checkpoints" / hashlib.sha256(source.encode()).hexdigest()[:16]
    try:
        client = _client()
        blobs = {blob.name.removeprefix(prefix): blob for blob in client.list_blobs(bucket_name, prefix=prefix)}
        if "model_index.json" not in blobs:
            raise CheckpointError(f"{source}: no model_index.json there; a checkpoint is a folder in diffusers' layout")
        _download(blobs["model_index.json"], root / "model_index.json")
        for folder in checkpoint.components(root):
            for name, blob in blobs.items():
                # Only files directly in the folders that the checkpoint names: no object name leads elsewhere.
                if re.fullmatch(rf"{folder}/[\w.-]+", name) and name.endswith(SUFFIXES):
                    _download(blob, root / name)
    except (GoogleAPIError, GoogleAuthError, OSError) as error:  # the last: a broken connection, or a full disk
        raise CheckpointError(f"{source}: cannot be read ({str(error).splitlines()[0]})") from error
    return root


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
