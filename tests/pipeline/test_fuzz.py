"""Damaged files: no crash, and every record that can be counted has exactly one fate."""

import random

from pipeline.report import write_report
from tests.fakes import rejects, rows, run
from tests.mutations import mutated, whole_files
from transforms.counts import read_counts
from transforms.read import Columns, InputError, InputFile, read_file
from transforms.records import PromptRecord, Reject


def test_damaged_files_are_accounted_for_to_the_last_record(tmp_path):
    read, records = fuzz(tmp_path, 150, random.Random(0))
    assert read > 50 and records > 500


def fuzz(folder, files, draw):
    """Puts so many damaged files through the whole graph; gives how many were not refused, and their records."""
    kinds = list(whole_files().items())
    (folder / "in").mkdir()
    expected: list[PromptRecord | Reject] = []
    read = 0
    for number in range(files):
        suffix, data = kinds[number % len(kinds)]
        path = folder / "in" / f"{number}{suffix}"
        path.write_bytes(mutated(data, draw))
        try:
            found = list(read_file(InputFile(str(path), path.name), Columns()))
        except InputError as error:
            # Refused as a whole, before or while it is read, with one line that names it.
            assert str(path) in str(error) and "\n" not in str(error)
            path.unlink()
            continue
        positions = [row.position for row in found]
        assert positions == sorted(set(positions))
        expected += found
        read += 1
    run(folder / "in" / "*", folder / "out")
    counts = read_counts(str(folder / "out"))
    assert counts.records_read == len(expected)
    assert counts.written == len(rows(folder / "out"))
    write_report(str(folder / "out"), fresh=True)
    # Each record's place is that of an image or a reject, unless it is a duplicate of another.
    places = {(row["source"], row["position"]) for row in [*rows(folder / "out"), *rejects(folder / "out")]}
    assert places <= {(row.source, row.position) for row in expected}
    assert len(places) == len(expected) - counts.duplicates
    return read, len(expected)
