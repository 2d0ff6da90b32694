"""Files of prompts, damaged at random."""

import bz2
import gzip
import io
import json
import lzma
import random
from typing import Any

import pyarrow as pa
from pyarrow import parquet

_ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "a cat", "seed": 7, "width": 8, "negative_prompt": "bad", "note": "x"},
    {
        "id": "b",
        "prompt": 'a "red", cat\u2028\U0001f408',
        "seed": None,
        "width": None,
        "negative_prompt": "",
        "note": "[1]",
    },
    {"id": "a", "prompt": "a cat", "seed": 7, "width": 8, "negative_prompt": "bad", "note": "x"},
    {"id": "", "prompt": "", "seed": 2**63 - 1, "width": 16, "negative_prompt": None, "note": ""},
    {"id": "../c", "prompt": "two\nlines", "seed": 0, "width": 9, "negative_prompt": "\t", "note": "{}"},
] * 3
_NAMES = list(_ROWS[0])
_TOKENS = [
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\r", b"\n", b"\r\n\r\n", b"\t", b"\\", b'"'),
    *(b"'", b",", b"[", b"]", b"{", b"}", b":", b"null", b"true", b"NaN", b"1e999", b"-1", b"7.0", b"9" * 5000),
    *(b"[" * 2000, b'"prompt"', b'{"prompt": "x"}', b"\\ud800", b"<script>", b"\x1b[31m", "\u0661".encode()),
]


def _csv(separator: str, quote: str) -> bytes:
    def cell(value):
        text = "" if value is None else str(value)
        return (
            f"{quote}{text.replace(quote, quote * 2)}{quote}" if quote else text.replace("\n", " ").replace("\t", " ")
        )

    return "".join(separator.join(map(cell, row)) + "\n" for row in [_NAMES, *(r.values() for r in _ROWS)]).encode()


def _parquet() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(_ROWS), file, row_group_size=4)
    return file.getvalue()


def whole_files() -> dict[str, bytes]:
    """One undamaged file of each kind, by its suffix."""
    lines = "".join(json.dumps(row) + "\n" for row in _ROWS).encode()
    table = _csv(",", '"')
    return {
        ".txt": "".join(f"{row['prompt']}\n" for row in _ROWS).encode(),
        ".jsonl": lines,
        ".json": json.dumps(_ROWS, indent=1).encode(),
        ".csv": table,
        ".tsv": _csv("\t", ""),
        ".parquet": _parquet(),
        ".csv.gz": gzip.compress(table, mtime=0),
        ".jsonl.bz2": bz2.compress(lines),
        ".jsonl.xz": lzma.compress(lines),
        ".json.zst": pa.Codec("zstd").compress(json.dumps(_ROWS).encode(), asbytes=True),
    }


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to five changes of several kinds."""
    for _ in range(draw.randint(1, 5)):
        start = draw.randint(0, len(data))
        end = min(len(data), start + draw.choice((1, 1, 2, 8, 64)))
        kind = draw.randrange(6)
        if kind == 0 and data:  # a bit
            place = draw.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
        elif kind == 1:  # something special
            data = data[:start] + draw.choice(_TOKENS) + data[start:]
        elif kind == 2:  # something less
            data = data[:start] + data[end:]
        elif kind == 3:  # something twice
            data = data[:end] + data[start:]
        elif kind == 4:  # something in place of another
            other = draw.randint(0, len(data))
            data = data[:start] + data[other : other + end - start] + data[end:]
        elif draw.random() < 0.2:  # cut off
            data = data[:start]
    return data
