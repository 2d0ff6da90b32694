"""How the pictures of a shard and their rows of metadata are stored: one table of formats, one way to write and read.

    folder      OUT/images/<shard>/<key>.png and OUT/images/<shard>/metadata.jsonl
    webdataset  OUT/shards/<shard>.tar of <key>.png, <key>.json (the row) and <key>.txt (the prompt)
    parquet     OUT/shards/<shard>.parquet, a column `image` of bytes and path as in Hugging Face, and the row's columns

Written again, a shard has the same bytes in each of them. A shard without pictures has no file, since readers fail at
empty ones.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import parquet

from transforms import storage
from transforms.metadata import SCHEMA
from transforms.pictures import DEFAULT_QUALITY, IMAGE_FORMATS

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class OutputFormat:
    """How an output stores its pictures: it decides their files' bytes but not their pixels.

    So it stands in recipe.json, where another one is refused, and not in a picture's digest.

    Raises:
      ValueError: if a quality is given for a format that has none.
    """

    format: str = "folder"
    image_format: str = "png"
    image_quality: int | None = None

    def __post_init__(self):
        lossy = IMAGE_FORMATS[self.image_format].lossy
        if self.image_quality and not lossy:
            raise ValueError(f"{self.image_format} has no quality, it keeps every pixel")
        if lossy and not self.image_quality:
            object.__setattr__(self, "image_quality", DEFAULT_QUALITY)

    @property
    def suffix(self) -> str:
        return IMAGE_FORMATS[self.image_format].suffix


FOLDER_OF_PNG = OutputFormat()


class ShardWriter(Protocol):
    """Takes the pictures of a shard, then, when all are there, the rows that describe them."""

    def add(self, file_name: str, data: bytes) -> None:
        """Takes one image file; may be called from several threads."""

    def close(self, rows: Rows) -> None:
        """Writes what is not written yet, in the rows' order, and removes what an earlier attempt left."""


class Format(Protocol):
    """A way to store shards.

    Attributes:
      folder: below the output, where its files are.
      data_files: what a README.md tells Hugging Face `datasets` to load.
    """

    folder: str
    data_files: str

    def writer(self, output: str, shard: str) -> ShardWriter:
        """Begins a shard."""

    def read(self, output: str, shard: str) -> tuple[Rows, Iterator[tuple[str, bytes]]]:
        """Rows of a shard in order, and its image files: (file name, bytes).

        Raises:
          OSError, ValueError: if a file is missing or damaged.
        """

    def shards(self, output: str) -> Iterator[str]:
        """Names of all shards of which there is anything, whether they count or not."""


class _FolderWriter:
    def __init__(self, output: str, shard: str):
        self._output = output
        self._folder = f"{Folder.folder}/{shard}"

    def add(self, file_name: str, data: bytes) -> None:
        storage.write_file(self._output, f"{self._folder}/{file_name}", data)

    def close(self, rows: Rows) -> None:
        if rows:
            storage.write_file(self._output, f"{self._folder}/{Folder.rows_file}", jsonl(rows))
        expected = {row["file_name"] for row in rows} | ({Folder.rows_file} if rows else set())
        stale = [name for name in storage.list_files(self._output, self._folder) if name not in expected]
        storage.delete_files(self._output, [f"{self._folder}/{name}" for name in stale])
        storage.make_durable(self._output, self._folder)
        storage.make_durable(self._output, Folder.folder)


class Folder:
    """A file an image, as Hugging Face's imagefolder reads it."""

    folder = "images"
    rows_file = "metadata.jsonl"
    data_files = "data_dir: images"

    def writer(self, output: str, shard: str) -> ShardWriter:
        return _FolderWriter(output, shard)

    def read(self, output: str, shard: str) -> tuple[Rows, Iterator[tuple[str, bytes]]]:
        folder = f"{self.folder}/{shard}"
        names = [name for name in storage.list_files(output, folder) if name != self.rows_file]
        text = storage.read_file(storage.join(output, folder, self.rows_file)).decode()
        rows = [json.loads(line) for line in text.split("\n") if line]
        return rows, ((name, storage.read_file(storage.join(output, folder, name))) for name in names)

    def shards(self, output: str) -> Iterator[str]:
        return storage.list_folders(output, self.folder)


class _FileWriter:
    """A shard that is one file, made when everything is there."""

    def __init__(self, output: str, name: str, pack):
        self._output, self._name, self._pack = output, name, pack
        self._files: dict[str, bytes] = {}

    def add(self, file_name: str, data: bytes) -> None:
        self._files[file_name] = data

    def close(self, rows: Rows) -> None:
        if rows:
            storage.write_file(self._output, self._name, self._pack(rows, self._files))
        else:
            storage.delete_files(self._output, [self._name])
        storage.make_durable(self._output, _SHARDS)


_SHARDS = "shards"


class WebDataset:
    """A tar a shard, without times, owners or modes of the machine that wrote it."""

    folder = _SHARDS
    suffix = ".tar"
    data_files = "data_files: shards/*.tar"

    def writer(self, output: str, shard: str) -> ShardWriter:
        return _FileWriter(output, f"{self.folder}/{shard}{self.suffix}", self._pack)

    @staticmethod
    def _pack(rows: Rows, files: dict[str, bytes]) -> bytes:
        members = dict(files)
        for row in rows:
            members[f"{row['key']}.json"] = json.dumps(row).encode()
            members[f"{row['key']}.txt"] = str(row["prompt"]).encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name in sorted(members):
                member = tarfile.TarInfo(name)  # time and owner 0, mode 644
                member.size = len(members[name])
                tar.addfile(member, io.BytesIO(members[name]))
        return packed.getvalue()

    def read(self, output: str, shard: str) -> tuple[Rows, Iterator[tuple[str, bytes]]]:
        data = io.BytesIO(storage.read_file(storage.join(output, self.folder, shard + self.suffix)))
        rows: Rows = []
        pictures: list[tuple[str, bytes]] = []
        try:
            with tarfile.open(fileobj=data, mode="r:") as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    assert content is not None
                    if member.name.endswith(".json"):
                        rows.append(json.loads(content.read()))
                    elif not member.name.endswith(".txt"):
                        pictures.append((member.name, content.read()))
        except (tarfile.TarError, AssertionError) as error:
            raise ValueError(f"not a whole tar: {error}") from error
        return rows, iter(pictures)

    def shards(self, output: str) -> Iterator[str]:
        return _stems(output, self.suffix)


class Parquet:
    """A table a shard; the bytes depend on the version of pyarrow, which recipe.json names."""

    folder = _SHARDS
    suffix = ".parquet"
    data_files = "data_files: shards/*.parquet"
    # As the Hugging Face hub cuts tables of images, so that a viewer need not load a whole shard.
    _ROWS_PER_GROUP = 100

    def writer(self, output: str, shard: str) -> ShardWriter:
        return _FileWriter(output, f"{self.folder}/{shard}{self.suffix}", self._pack)

    def _pack(self, rows: Rows, files: dict[str, bytes]) -> bytes:
        images = [{"bytes": files[str(row["file_name"])], "path": row["file_name"]} for row in rows]
        table = pa.Table.from_pylist(
            [{"image": image, **row} for image, row in zip(images, rows, strict=True)], schema=_arrow_schema()
        )
        packed = pa.BufferOutputStream()
        # Images are compressed already, and their bytes would only fill a dictionary.
        columns = [name for name in table.column_names if name != "image"]
        parquet.write_table(
            table,
            packed,
            row_group_size=self._ROWS_PER_GROUP,
            compression={"image.bytes": "NONE", "image.path": "NONE", **dict.fromkeys(map(_leaf, columns), "ZSTD")},
            use_dictionary=[_leaf(name) for name in columns],
        )
        return packed.getvalue().to_pybytes()

    def read(self, output: str, shard: str) -> tuple[Rows, Iterator[tuple[str, bytes]]]:
        data = storage.read_file(storage.join(output, self.folder, shard + self.suffix))
        rows = parquet.read_table(pa.BufferReader(data)).to_pylist()
        images = [row.pop("image") for row in rows]
        return rows, ((image["path"], image["bytes"]) for image in images)

    def shards(self, output: str) -> Iterator[str]:
        return _stems(output, self.suffix)


FORMATS: dict[str, Format] = {"folder": Folder(), "webdataset": WebDataset(), "parquet": Parquet()}


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    """Rows as lines of JSON."""
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _stems(output: str, suffix: str) -> Iterator[str]:
    return (name.removesuffix(suffix) for name in storage.list_files(output, _SHARDS) if name.endswith(suffix))


def _leaf(name: str) -> str:
    return f"{name}.list.element" if SCHEMA[name].startswith("list") else name


def _arrow_schema() -> pa.Schema:
    kinds = {"list<int64>": pa.list_(pa.int64())}
    columns = [(name, kinds[kind] if kind in kinds else pa.type_for_alias(kind)) for name, kind in SCHEMA.items()]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features: dict[str, dict] = {"image": {"_type": "Image"}}
    for name, kind in SCHEMA.items():
        value = {"dtype": kind.removeprefix("list<").removesuffix(">"), "_type": "Value"}
        features[name] = {"feature": value, "_type": "Sequence"} if kind.startswith("list") else value
    return pa.schema(
        [("image", image), *columns], metadata={"huggingface": json.dumps({"info": {"features": features}})}
    )
