"""ReadPrompts: files of prompts in, records and rejects out.

A file is read as a stream of bytes and cut at newlines only: Python's own line splitting would break a JSON line at
U+2028. Lines are decoded one by one, so one damaged line costs one record.
"""

import bz2
import csv
import glob
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import apache_beam as beam
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from transforms import storage
from transforms.records import FIELDS, PromptRecord, RecordError, Reject, parse, prompt_column

# Four times the longest prompt in \u-escapes; a longer line is a damaged file, which must not fill the memory.
MAX_LINE = 4_000_000
_CHUNK = 1 << 20


class InputError(ValueError):
    """An input that cannot be read at all; stops the run before it has made anything."""


@dataclass(frozen=True)
class InputFile:
    """A file to read, and the name by which its records know it."""

    path: str
    source: str


@dataclass(frozen=True)
class Columns:
    """Columns that the user names; None means: by convention."""

    prompt: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Row:
    """One row of a file: its columns, or the problem because of which it has none.

    Attributes:
      position: counted from 1: of a table the row below the header, else the line, blank ones counted too.
      raw: the row as it stands in the file; "" where the columns say it all.
    """

    position: int
    raw: str
    columns: dict[str, Any] | None = None
    problem: str = ""


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
            | "Files" >> beam.Create(files)
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
    pattern's fixed part, the folders before the first wildcard.

    Raises:
      InputError: if a pattern matches nothing, or a file is of an unknown kind, damaged or without a prompt column.
    """
    files: dict[str, InputFile] = {}
    paths_of: dict[str, str] = {}
    for pattern in patterns:
        for file in _match(pattern):
            _reader(file.path)
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
    columns = Columns(prompt_column, id_column)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: next(_rows(file, columns), None), files.values()))
    return sorted(files.values(), key=lambda file: file.source)


def _match(pattern: str) -> list[InputFile]:
    wildcard = re.search(r"[*?\[]", pattern)
    try:
        if not wildcard or FileSystems.exists(pattern):
            return [_named_file(pattern)]
        fixed = pattern[: wildcard.start()].rpartition("/")[0]
        if storage.is_local(pattern):
            # Not by Beam's patterns, which find nothing for "*.jsonl" in the working directory.
            paths = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]  # noqa: PTH207
        else:
            (match,) = FileSystems.match([pattern])
            paths = [metadata.path for metadata in match.metadata_list]
    except BeamIOError as error:
        raise InputError(f"{pattern}: cannot be listed: {error}") from error
    files = [InputFile(path, path[len(fixed) :].lstrip("/")) for path in paths]
    # As a shell does: a wildcard does not mean .DS_Store; nor an object that stands for a folder.
    files = [file for file in files if not re.search(r"(^|/)(\.|$)", file.source)]
    if not files:
        raise InputError(f"{pattern}: matches no file")
    return files


def _named_file(path: str) -> InputFile:
    if storage.is_local(path) and Path(path).is_dir():
        raise InputError(f"{path} is a folder: give its files, such as {path.rstrip('/')}/*.jsonl")
    if not FileSystems.exists(path):
        raise InputError(f"{path}: no such file")
    return InputFile(path, path.rpartition("/")[2])


def _rows(file: InputFile, columns: Columns) -> Iterator[Row]:
    reader, decompress = _reader(file.path)
    try:
        # Not Beam's own decompression: it takes a cut .gz for a whole one, and the missing records for none at all.
        with FileSystems.open(file.path, compression_type=CompressionTypes.UNCOMPRESSED) as stored:
            yield from reader(file.path, decompress(stored), columns)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{file.path}: the compressed file is damaged: {error}") from error
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read: {error}") from error


def _reader(path: str) -> tuple["Reader", Callable[[IO[bytes]], IO[bytes]]]:
    name = path.rsplit("/", 1)[-1].lower()
    stem, dot, suffix = name.rpartition(".")
    decompress = _DECOMPRESS.get(dot + suffix)
    if decompress:
        stem, dot, suffix = stem.rpartition(".")
    reader = READERS.get(dot + suffix)
    if not reader:
        raise InputError(f"{path}: not a known kind of file; known are {', '.join(READERS)}, also with .gz, .bz2, .xz")
    return reader, decompress or (lambda stored: stored)


def _lines(path: str, file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Lines without their ends, each with the problem that it has, or ""."""
    for number, line in enumerate(_split(file)):
        if number == 0:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InputError(f"{path}: is UTF-16, as some Windows programs write it: save it as UTF-8")
            line = line.removeprefix(b"\xef\xbb\xbf")  # else it would be part of the first column's name
        if len(line) > MAX_LINE:
            yield line[:MAX_LINE].decode("utf-8", "backslashreplace"), f"the line is longer than {MAX_LINE} bytes"
            continue
        try:
            yield line.removesuffix(b"\r").decode(), ""
        except UnicodeDecodeError as error:
            problem = f"not UTF-8: byte 0x{line[error.start]:02x} at place {error.start + 1} of the line"
            yield line.decode("utf-8", "backslashreplace"), problem


def _split(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(_CHUNK):
        *lines, tail = (rest + chunk).split(b"\n")
        yield from lines
        # What comes after the limit is dropped as it is read, up to the line's end.
        rest = tail[: MAX_LINE + 1]
    if rest:
        yield rest


def _read_txt(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    for position, (line, problem) in enumerate(_lines(path, file), 1):
        if problem:
            yield Row(position, line, problem=problem)
        elif line.strip():
            yield Row(position, line, {columns.prompt or "prompt": line})


def _read_jsonl(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    for position, (line, problem) in enumerate(_lines(path, file), 1):
        if problem:
            yield Row(position, line, problem=problem)
        elif line.strip():
            yield _json_row(position, line, columns)


def _json_row(position: int, line: str, columns: Columns) -> Row:
    try:
        value = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        return Row(position, line, problem="nested too deeply")
    except ValueError as error:
        return Row(position, line, problem=f"not JSON: {error}")
    if not isinstance(value, dict):
        return Row(position, line, problem=f"a line must be a JSON object, not {type(value).__name__}")
    if columns.id and columns.id not in value:
        return Row(position, line, problem=f"no column {columns.id!r}")
    return Row(position, line, value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value


def _read_csv(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    raw: list[str] = []
    problems: list[str] = []

    def text() -> Iterator[str]:
        for line, problem in _lines(path, file):
            raw.append(line)
            if problem:
                problems.append(problem)
            yield line + "\n"

    # Strict, because an unclosed quote would otherwise swallow the records after it without a word.
    table = csv.reader(text(), strict=True)
    try:
        header = [name.strip() for name in next(table, [])]
    except csv.Error as error:
        raise InputError(f"{path}: the header is not CSV: {error}") from error
    if problems:
        raise InputError(f"{path}: the header is {problems[0]}")
    if not header:
        return
    _check_header(path, header, columns)
    prompt = columns.prompt or prompt_column(header)
    position = 0
    while True:
        raw.clear()
        problems.clear()
        try:
            cells = next(table)
            problem = problems[0] if problems else ""
        except StopIteration:
            return
        except csv.Error as error:
            cells, problem = [], f"not CSV: {error}"
        if not cells and not problem:
            continue  # a blank line is no row
        position += 1
        if len(cells) > len(header) and not problem:
            problem = f"{len(cells)} cells in a table of {len(header)} columns: is a comma outside of quotes?"
        if problem:
            yield Row(position, "\n".join(raw), problem=problem)
            continue
        values: dict[str, Any] = dict(zip(header, cells, strict=False))
        for name in (*FIELDS, columns.id or "id"):
            if values.get(name) == "" and name != prompt:
                values[name] = None  # a table has no other way to say "not set"
        yield Row(position, "", values)


def _check_header(path: str, header: list[str], columns: Columns) -> None:
    found = ", ".join(header)[:500]
    if columns.prompt and columns.prompt not in header:
        raise InputError(f"{path}: no column {columns.prompt!r}; columns found: {found}")
    if columns.id and columns.id not in header:
        raise InputError(f"{path}: no column {columns.id!r}; columns found: {found}")
    if not columns.prompt and not prompt_column(header):
        raise InputError(f"{path}: no prompt column; columns found: {found}; name one with --prompt_column")
    if len(set(header)) < len(header):
        raise InputError(f"{path}: a column name stands twice in the header: {found}")


Reader = Callable[[str, IO[bytes], Columns], Iterator[Row]]

# How a file is read, by its suffix. A reader takes the path (for messages), the bytes and the named columns.
READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".txt": _read_txt,
}
_DECOMPRESS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda stored: cast(IO[bytes], gzip.GzipFile(fileobj=stored)),
    ".bz2": lambda stored: cast(IO[bytes], bz2.BZ2File(stored)),
    ".xz": lambda stored: cast(IO[bytes], lzma.LZMAFile(stored)),  # noqa: SIM115
}
