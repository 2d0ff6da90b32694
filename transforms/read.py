"""ReadPrompts: files of prompts in, records and rejects out.

Files are spread over workers, parquet files by their row groups: their footer says how many rows come before each one.
Any other file is read by one worker from its start to its end: a record's place in its file is its identity, and a
reader that begins in the middle does not know it, nor, in a CSV, whether it stands inside of a quoted cell. A million
lines are read in about a minute, and what follows is spread again.
"""

import glob
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import apache_beam as beam
import pyarrow
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from transforms import storage
from transforms.json_rows import read_json, read_jsonl
from transforms.records import PromptRecord, RecordError, Reject, parse
from transforms.rows import DECOMPRESS, Columns, InputError, Reader, Row, read_txt, read_whole
from transforms.tables import RowGroups, read_csv, read_parquet, read_tsv, row_groups

# How a file is read, by its suffix.
READERS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".txt": read_txt,
}


@dataclass(frozen=True)
class InputFile:
    """A file to read, and the name by which its records know it; `whole` if all of it is one prompt.

    Of a parquet file `part` may be all that is to be read.
    """

    path: str
    source: str
    whole: bool = False
    part: RowGroups | None = None


class ReadPrompts(beam.PTransform):
    """Reads prompt files to `.records` (PromptRecord) and `.rejects` (Reject); `.fates` counts both.

    Raises InputError while the pipeline is built (see `match_inputs`).
    """

    def __init__(self, patterns: Sequence[str], prompt_column: str | None = None, id_column: str | None = None):
        super().__init__()
        self._patterns = patterns
        self._columns = Columns(prompt_column, id_column)

    def expand(self, root):
        files = match_inputs(self._patterns, self._columns.prompt, self._columns.id)
        return (
            root
            | "Files" >> beam.Create(split(files))
            | "SpreadFiles" >> beam.Reshuffle()
            | "Rows" >> beam.ParDo(_ReadFile(self._columns)).with_outputs("rejects", "fates", main="records")
        )


class _ReadFile(beam.DoFn):
    def __init__(self, columns: Columns):
        self._columns = columns

    def process(self, file: InputFile):
        count = 0
        for result in read_file(file, self._columns):
            count += 1
            yield beam.pvalue.TaggedOutput("rejects", result) if isinstance(result, Reject) else result
        yield beam.pvalue.TaggedOutput("fates", ("records_read", count))


def read_file(file: InputFile, columns: Columns) -> Iterator[PromptRecord | Reject]:
    """The records of a file in order; every row of it that is not blank gives a record or a reject.

    Raises:
      InputError: if the file as a whole cannot be read.
    """
    for row in _rows(file, columns):
        try:
            if row.columns is None:
                raise RecordError(row.problem)
            yield parse(file.source, row.position, row.columns, columns.prompt, columns.id)
        except RecordError as error:
            raw = row.raw or json.dumps(row.columns)
            yield Reject(file.source, row.position, f"{file.source}:{row.position}", "read", str(error), raw)


def match_inputs(
    patterns: Sequence[str], prompt_column: str | None = None, id_column: str | None = None
) -> list[InputFile]:
    """Finds the input files and reads the first row of each, so that what is wrong with a whole file shows at once.

    In patterns, `*` stays within a folder and `**` goes across folders. A record's source is the path below the
    pattern's fixed part, the folders before the first wildcard. A folder stands for the .txt files in it, each of which
    is one prompt with the stem of its name as id.

    Raises:
      InputError: if a pattern matches nothing, or a file is of an unknown kind, damaged or without a prompt column.
    """
    files = find_inputs(patterns)
    columns = Columns(prompt_column, id_column)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: next(_rows(file, columns), None), (file for file in files if not file.whole)))
    return files


def split(files: Sequence[InputFile]) -> list[InputFile]:
    """The files by the parts that can be read at the same time; most are one part."""
    with ThreadPoolExecutor(16) as pool:
        return [part for parts in pool.map(_parts, files) for part in parts]


def _parts(file: InputFile) -> list[InputFile]:
    if _reader(file)[0] is not read_parquet:
        return [file]
    with _opened(file) as stored:
        return [replace(file, part=part) for part in row_groups(stored)]


def find_inputs(patterns: Sequence[str]) -> list[InputFile]:
    """The input files in the order of their sources; see `match_inputs`, which also looks into them."""
    files: dict[str, InputFile] = {}
    paths_of: dict[str, str] = {}
    for pattern in patterns:
        for file in _match(pattern):
            _reader(file)
            if re.search(r"[\ud800-\udfff]", file.path):
                raise InputError(f"{file.path!r}: the name of the file is not UTF-8")
            other = paths_of.setdefault(file.source, file.path)
            # The source is part of a record's identity: two files of one name would share seeds and positions.
            if other != file.path:
                raise InputError(
                    f"{other} and {file.path} would both be called {file.source!r}: rename one, or give one pattern "
                    "that covers both, such as */prompts.jsonl"
                )
            files[file.path] = file
    return sorted(files.values(), key=lambda file: file.source)


def _match(pattern: str) -> list[InputFile]:
    wildcard = re.search(r"[*?\[]", pattern)
    try:
        folder = storage.is_local(pattern) and Path(pattern).is_dir()
        if not folder and FileSystems.exists(pattern):
            return [InputFile(pattern, pattern.rpartition("/")[2])]
        if folder or not wildcard:
            return _files_of_folder(pattern.rstrip("/"))
        fixed = pattern[: wildcard.start()].rpartition("/")[0]
        files = [InputFile(path, path[len(fixed) :].lstrip("/")) for path in _glob(pattern)]
    except BeamIOError as error:
        raise InputError(f"{pattern}: cannot be listed: {_one_line(error)}") from error
    # As a shell does: a wildcard does not mean .DS_Store; nor an object that stands for a folder.
    files = [file for file in files if not re.search(r"(^|/)(\.|$)", file.source)]
    if not files:
        raise InputError(f"{pattern}: matches no file")
    return files


def _glob(pattern: str) -> list[str]:
    if storage.is_local(pattern):
        # Not by Beam's patterns, which find nothing for "*.jsonl" in the working directory.
        return [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]  # noqa: PTH207
    (match,) = FileSystems.match([pattern])
    return [metadata.path for metadata in match.metadata_list]


def _files_of_folder(folder: str) -> list[InputFile]:
    local = storage.is_local(folder)
    if local and not Path(folder).is_dir():
        raise InputError(f"{folder}: no such file")
    escaped = re.sub(r"[\[*?]", r"[\g<0>]", folder)
    paths = [path for path in _glob(f"{escaped}/*.txt") if not path.rpartition("/")[2].startswith(".")]
    if not paths:
        if not local:
            raise InputError(f"{folder}: no such file, and no folder of .txt files")
        raise InputError(f"{folder} is a folder without .txt files: give its files, such as {folder}/*.jsonl")
    return [InputFile(path, path.rpartition("/")[2], whole=True) for path in paths]


def _rows(file: InputFile, columns: Columns) -> Iterator[Row]:
    reader, decompress = _reader(file)
    with _opened(file) as stored:
        if file.part:
            yield from read_parquet(file.path, stored, columns, file.part)
        else:
            yield from reader(file.path, decompress(stored), columns)


@contextmanager
def _opened(file: InputFile) -> Iterator[IO[bytes]]:
    """The bytes of a file as they are stored; what goes wrong while they are read is an InputError."""
    try:
        # Not Beam's own decompression: it takes a cut .gz for a whole one, and the missing records for none at all.
        with FileSystems.open(file.path, compression_type=CompressionTypes.UNCOMPRESSED) as stored:
            yield stored
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{file.path}: the compressed file is damaged: {_one_line(error)}") from error
    except pyarrow.ArrowException as error:
        raise InputError(f"{file.path}: the parquet file is damaged: {_one_line(error)}") from error
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read: {_one_line(error)}") from error


def _reader(file: InputFile) -> tuple[Reader, Callable[[IO[bytes]], IO[bytes]]]:
    if file.whole:
        return read_whole, _as_stored
    name = file.path.rsplit("/", 1)[-1].lower()
    stem, dot, suffix = name.rpartition(".")
    decompress = DECOMPRESS.get(dot + suffix)
    if decompress:
        stem, dot, suffix = stem.rpartition(".")
    reader = READERS.get(dot + suffix)
    if not reader or (decompress and reader is read_parquet):  # which is compressed inside, and read from its end
        raise InputError(
            f"{file.path}: not a known kind of file; known are {', '.join(READERS)}, and all but the parquet also with "
            f"{', '.join(DECOMPRESS)}"
        )
    return reader, decompress or _as_stored


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _as_stored(file: IO[bytes]) -> IO[bytes]:
    return file
