"""Rows of tables: .csv, .tsv and .parquet.

A table has its columns named once, so a wrong name is a wrong file and stops the run; a damaged row costs one record.
"""

import csv
import datetime
import decimal
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
from pyarrow import parquet

from transforms.records import FIELDS, prompt_column
from transforms.rows import Columns, InputError, Row, lines

# Rows of a parquet file that become Python objects at a time.
_BATCH = 1000
_ROWS_OF_PART = 10_000

# The cells of a row, the problem because of which there are none, or "", and the row as it stands in the file.
Cells = tuple[list[str], str, str]


def read_csv(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    """Cells between commas, in quotes if they hold commas, quotes or newlines."""
    return _rows(path, _csv_cells(path, file), columns, "comma outside of quotes")


def read_tsv(path: str, file: IO[bytes], columns: Columns) -> Iterator[Row]:
    """Cells between tabs, taken as they stand: a quote mark is a part of its cell, as public prompt sets have it."""
    cells = (([] if problem or not line else line.split("\t"), problem, line) for line, problem in lines(path, file))
    return _rows(path, cells, columns, "tab inside of a cell")


def _csv_cells(path: str, file: IO[bytes]) -> Iterator[Cells]:
    raw: list[str] = []
    problems: list[str] = []

    def text() -> Iterator[str]:
        for line, problem in lines(path, file):
            raw.append(line)
            if problem:
                problems.append(problem)
            yield line + "\n"

    # Strict, because an unclosed quote would otherwise swallow the records after it without a word.
    table = csv.reader(text(), strict=True)
    while True:
        raw.clear()
        problems.clear()
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            yield [], f"not CSV: {error}", "\n".join(raw)
        else:
            yield cells, problems[0] if problems else "", "\n".join(raw)


def _rows(path: str, table: Iterator[Cells], columns: Columns, separator: str) -> Iterator[Row]:
    cells, problem, _ = next(table, ([], "", ""))
    if problem:
        raise InputError(f"{path}: the header is {problem}")
    header = [name.strip() for name in cells]
    if not header:
        return
    _check_header(path, header, columns)
    prompt = columns.prompt or prompt_column(header)
    position = 0
    for cells, problem, raw in table:
        if not cells and not problem:
            continue  # a blank line is no row
        position += 1
        if len(cells) > len(header) and not problem:
            problem = f"{len(cells)} cells in a table of {len(header)} columns: is a {separator}?"
        if problem:
            yield Row(position, raw, problem=problem)
            continue
        values: dict[str, Any] = dict(zip(header, cells, strict=False))
        for name in (*FIELDS, columns.id or "id"):
            if values.get(name) == "" and name != prompt:
                values[name] = None  # a table of text has no other way to say "not set"
        yield Row(position, "", values)


def _check_header(path: str, header: list[str], columns: Columns) -> None:
    # For a terminal: a damaged header may hold line ends and worse.
    found = "".join(char if char.isprintable() else " " for char in ", ".join(header)[:500])
    if columns.prompt and columns.prompt not in header:
        raise InputError(f"{path}: no column {columns.prompt!r}; columns found: {found}")
    if columns.id and columns.id not in header:
        raise InputError(f"{path}: no column {columns.id!r}; columns found: {found}")
    if not columns.prompt and not prompt_column(header):
        raise InputError(f"{path}: no prompt column; columns found: {found}; name one with --prompt_column")
    if len(set(header)) < len(header):
        raise InputError(f"{path}: a column name stands twice in the header: {found}")


@dataclass(frozen=True)
class RowGroups:
    """Row groups of a parquet file, from `first` up to but not including `end`, and how many rows come before them."""

    first: int
    end: int
    rows_before: int


def row_groups(file: IO[bytes]) -> list[RowGroups]:
    """Cuts a parquet file into parts that can be read apart, of some ten thousand rows; only its footer is read."""
    metadata = parquet.read_metadata(file)
    parts = []
    first = rows = rows_before = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        # Together if they are small: each part costs another reading of the footer.
        if rows >= _ROWS_OF_PART or group + 1 == metadata.num_row_groups:
            parts.append(RowGroups(first, group + 1, rows_before))
            first, rows, rows_before = group + 1, 0, rows_before + rows
    return parts


def read_parquet(path: str, file: IO[bytes], columns: Columns, part: RowGroups | None = None) -> Iterator[Row]:
    """The rows of a parquet file or of a part of it; one row group is in memory at a time.

    Columns of bytes, such as the pictures of a dataset whose captions are read, are not read and not passed through.
    """
    with parquet.ParquetFile(file) as table:
        fields = [field for field in table.schema_arrow if not _holds_bytes(field.type)]
        names = [field.name for field in fields]
        _check_header(path, names, columns)
        position = part.rows_before if part else 0
        groups = range(part.first, part.end) if part else None
        for batch in table.iter_batches(_BATCH, groups, columns=names, use_threads=False):
            for row in _row_by_row(batch):
                position += 1
                yield Row(position, "", problem=row) if isinstance(row, str) else Row(position, "", row)


def _row_by_row(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch, each as its columns or as the problem that it has."""
    try:
        yield from [_plain(row) for row in batch.to_pylist()]
    except ValueError as error:  # text that is not UTF-8, a time that Python cannot hold
        if len(batch) == 1:
            yield "cannot be read: " + " ".join(str(error).split())
            return
        for place in range(len(batch)):
            yield from _row_by_row(batch.slice(place, 1))


def _holds_bytes(kind: pa.DataType) -> bool:
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    if any(check(kind) for check in binary):
        return True
    return any(_holds_bytes(kind.field(place).type) for place in range(kind.num_fields))


def _plain(value: Any) -> Any:
    """A value of a cell as JSON can hold it; not a number, as some programs write a missing one, is null."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    return value
