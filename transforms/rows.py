"""What a reader of a file gives, and the ground floor of the readers: compressed bytes to lines.

A file is read as a stream of bytes and cut at newlines only: Python's own line splitting would break a JSON line at
U+2028. Lines are decoded one by one, so one damaged line costs one record.
"""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import pyarrow

# Four times the longest prompt in \u-escapes; a longer line is a damaged file, which must not fill the memory.
MAX_LINE = 4_000_000
CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"


class InputError(ValueError):
    """An input that cannot be read at all; stops the run before it has made anything."""


@dataclass(frozen=True)
class Columns:
    """Columns that the user names; None means: by convention."""

    prompt: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Row:
    """One row of a file: its columns, or the problem because of which it has none.

    Attributes:
      position: counted from 1: of a table the row below the header, of a JSON array the element, else the line, blank
        ones counted too.
      raw: the row as it stands in the file; "" where the columns say it all.
    """

    position: int
    raw: str
    columns: dict[str, Any] | None = None
    problem: str = ""


# How a file is read. A reader takes the path (for messages), the bytes and the named columns.
Reader = Callable[[str, IO[bytes], Columns], Iterator[Row]]


def read_txt(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    """Every line that is not blank is a prompt."""
    for position, (line, problem) in enumerate(lines(path, file), 1):
        if problem:
            yield Row(position, line, problem=problem)
        elif line.strip():
            yield Row(position, line, {columns.prompt or "prompt": line})


def read_whole(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    """The whole file is one prompt, its lines included, and the stem of its name is the record's id."""
    data = file.read(MAX_LINE + 1)
    text, problem = decoded(data.removeprefix(_BOM))
    if len(data) > MAX_LINE:
        problem = f"the file is longer than {MAX_LINE} bytes"
    elif not problem and not text.strip():
        problem = "the file holds no text"
    if problem:
        yield Row(1, text, problem=problem)
    else:
        stem = path.rsplit("/", 1)[-1].rpartition(".")[0]
        text = text.replace("\r\n", "\n").rstrip("\n")
        yield Row(1, "", {columns.id or "id": stem, columns.prompt or "prompt": text})


def lines(path: str, file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Lines without their ends, each with the problem that it has, or ""."""
    for number, line in enumerate(_split(file)):
        if number == 0:
            line = without_mark(path, line)  # else it would be part of the first column's name
        if len(line) > MAX_LINE:
            yield line[:MAX_LINE].decode("utf-8", "backslashreplace"), f"the line is longer than {MAX_LINE} bytes"
        else:
            yield decoded(line.removesuffix(b"\r"))


def decoded(data: bytes) -> tuple[str, str]:
    """The text of a line or an element, and the problem that it has, or ""."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte 0x{data[error.start]:02x} at place {error.start + 1}"
        return data.decode("utf-8", "backslashreplace"), problem


def without_mark(path: str, start: bytes) -> bytes:
    """The first bytes of a text file without a byte order mark.

    Raises:
      InputError: if the mark says that the file is not UTF-8.
    """
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path}: is UTF-16, as some Windows programs write it: save it as UTF-8")
    return start.removeprefix(_BOM)


def _split(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(CHUNK):
        *whole, tail = (rest + chunk).split(b"\n")
        yield from whole
        # What comes after the limit is dropped as it is read, up to the line's end.
        rest = tail[: MAX_LINE + 1]
    if rest:
        yield rest


# How a compressed file is opened, by its last suffix. None of these takes a cut file for a whole one, as Beam's own do.
DECOMPRESS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda stored: cast(IO[bytes], gzip.GzipFile(fileobj=stored)),
    ".bz2": lambda stored: cast(IO[bytes], bz2.BZ2File(stored)),
    ".xz": lambda stored: cast(IO[bytes], lzma.LZMAFile(stored)),  # noqa: SIM115
    ".zst": lambda stored: cast(IO[bytes], pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd")),
}
