"""Every record and image has one fate, and a sum that does not hold is an error."""

import dataclasses

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from transforms import progress
from transforms.counts import BESIDES_FATES, AccountingError, Counts, WriteCounts, read_counts

GOOD = Counts(
    records_read=5,
    records_rejected=2,
    records_expanded=3,
    images_requested=15,
    duplicates=1,
    finished_before=2,
    rejected_before=3,
    written=4,
    rejected=5,
)


def test_sums_that_hold_pass():
    GOOD.check()
    Counts().check()


@pytest.mark.parametrize("name", [name for name in vars(GOOD) if name not in BESIDES_FATES])
def test_one_too_many_of_anything_is_an_error(name):
    with pytest.raises(AccountingError, match="are not"):
        dataclasses.replace(GOOD, **{name: getattr(GOOD, name) + 1}).check()


@pytest.mark.parametrize("fates", [[], [("written", 2), ("records_read", 1), ("written", 3)]])
def test_fates_are_added_up_and_written_also_when_there_are_none(tmp_path, fates):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        # Typed, because an empty Create has no elements to infer a type from.
        pipeline | beam.Create(fates).with_output_types(tuple[str, int]) | WriteCounts(str(tmp_path))
    assert read_counts(str(tmp_path)) == (Counts(written=5, records_read=1) if fates else Counts())


def test_progress_adds_up_and_starts_again():
    progress.reset()
    progress.add(planned=3)
    progress.add(done=2, rejected=1)
    assert progress.current() == progress.Progress(3, 2, 1)
    progress.reset()
    assert progress.current() == progress.Progress()
