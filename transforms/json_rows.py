"""Rows of .jsonl, one object a line, and of .json, one array of objects.

An array is never held whole: its elements are found by their brackets, one by one, and parsed alone, so a damaged
element costs one record and memory is bounded by the longest element. What cannot be mended like that, an array that
is cut off or goes on after its end, stops the run: how many records are missing there nobody knows.
"""

import json
import re
from collections.abc import Iterator
from typing import IO

from transforms import rows
from transforms.rows import Columns, InputError, Row, decoded, lines, without_mark

_OUTSIDE_OF_TEXT = re.compile(rb'["\[\]{},]')
_INSIDE_OF_TEXT = re.compile(rb'["\\]')
_BLANK = b" \t\r\n"


def read_jsonl(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    """Every line that is not blank is an object."""
    for position, (line, problem) in enumerate(lines(path, file), 1):
        if problem:
            yield Row(position, line, problem=problem)
        elif line.strip():
            yield _row(position, line, columns, "a line")


def read_json(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    """An array of objects; or lines of JSON, which many programs also call .json.

    Raises:
      InputError: if it is neither, or the array does not end where the file does.
    """
    start = without_mark(path, _first_bytes(file)).lstrip(_BLANK)
    if start.startswith(b"["):
        for position, (element, problem) in enumerate(_elements(path, start[1:], file), 1):
            if problem:
                yield Row(position, element, problem=problem)
            elif element.strip():
                yield _row(position, element.strip(), columns, "an element")
    elif start.startswith(b"{"):
        rest = read_jsonl(path, _Rewound(start, file), columns)  # type: ignore[arg-type]
        first = next(rest)
        if first.problem.startswith("not JSON"):
            raise InputError(f"{path}: neither an array of objects nor an object a line: {first.problem}")
        yield first
        yield from rest
    elif start:
        raise InputError(f"{path}: neither an array of objects nor an object a line: it begins with {start[:1]!r}")


class _Rewound:
    """A file of which the first bytes have been read already."""

    def __init__(self, start: bytes, file: IO[bytes]):
        self._start = start
        self._file = file

    def read(self, size: int) -> bytes:
        data, self._start = self._start, b""
        return data or self._file.read(size)


def _first_bytes(file: IO[bytes]) -> bytes:
    data = b""
    # Of a stream a read may give less than was asked for, or blanks alone.
    while len(data) < rows.MAX_LINE and len(data.lstrip(_BLANK)) < 4 and (chunk := file.read(rows.CHUNK)):
        data += chunk
    return data


def _elements(path: str, chunk: bytes, file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """The text of each element of an array whose bracket has been read, with the problem that it has, or ""."""
    parts: list[bytes] = []
    kept = 0
    depth, in_text, skip = 1, False, 0

    def element() -> tuple[str, str]:
        data = b"".join(parts)
        if kept > rows.MAX_LINE:
            text = data[: rows.MAX_LINE].decode("utf-8", "backslashreplace")
            return text, f"the element is longer than {rows.MAX_LINE} bytes"
        return decoded(data)

    while chunk or (chunk := file.read(rows.CHUNK)):
        begin, place = 0, skip
        while match := (_INSIDE_OF_TEXT if in_text else _OUTSIDE_OF_TEXT).search(chunk, place):
            found, place = match[0], match.end()
            if found == b'"':
                in_text = not in_text
            elif found == b"\\":
                place += 1
            elif found in b"[{":
                depth += 1
            elif found in b"]}":
                depth -= 1
            if (found == b"," and depth == 1) or depth == 0:
                parts.append(chunk[begin : match.start()])
                kept += match.start() - begin
                yield element()
                parts, kept, begin = [], 0, place
            if depth == 0:
                _nothing_follows(path, chunk[place:], file)
                return
        skip = max(0, place - len(chunk))
        kept += len(chunk) - begin
        if kept <= rows.MAX_LINE + len(chunk):
            parts.append(chunk[begin:])
        chunk = b""
    raise InputError(f"{path}: the file ends within its array: was it cut off, or is a quote or a bracket missing?")


def _nothing_follows(path: str, chunk: bytes, file: IO[bytes]) -> None:
    while chunk or (chunk := file.read(rows.CHUNK)):
        if chunk.strip(_BLANK):
            raise InputError(f"{path}: the file goes on after the end of its array: is a bracket one too many?")
        chunk = b""


def _row(position: int, text: str, columns: Columns, name: str) -> Row:
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        return Row(position, text, problem="nested too deeply")
    except ValueError as error:
        return Row(position, text, problem=f"not JSON: {error}")
    if not isinstance(value, dict):
        return Row(position, text, problem=f"{name} must be a JSON object, not {type(value).__name__}")
    if columns.id and columns.id not in value:
        return Row(position, text, problem=f"no column {columns.id!r}")
    return Row(position, text, value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
