"""What a run took, by what it measured."""

import pytest

from model_handlers import metrics
from pipeline.throughput import describe, measured, throughput, totals
from tests.fakes import FakeHandler, run, tree, write_jsonl
from transforms.counts import read_counts

VALUES = {
    "compiles": 2,
    "bytes_written": 3_000_000,
    "tokens_truncated": 0,
    "compile_seconds": 60.0,
    "device_busy_seconds": 300.0,
    "device_idle_seconds": 100.0,
    "encode_seconds": 12.0,
    "write_seconds": 8.0,
}


def test_every_fate_is_a_counter_with_the_number_that_was_counted_exactly(tmp_path):
    records = [{"prompt": f"p{number}"} for number in range(5)] + [{"prompt": "l" * 400}, {"prompt": 42}]
    result = run(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", FakeHandler(rejected=["p1"]))
    counts = vars(read_counts(str(tmp_path / "out")))
    counters = totals(result)
    assert {name: counters[name] for name in counts} == counts
    pictures = [data for name, data in tree(tmp_path / "out").items() if name.endswith(".png")]
    assert measured(result)["bytes_written"] == sum(map(len, pictures)) > 0
    assert measured(result).keys() == VALUES.keys()


def test_speed_and_cost_follow_from_images_seconds_and_the_price_of_all_workers():
    figures = throughput(1000, 500, VALUES, price_per_hour=7.2)
    assert figures["images_per_hour"] == 7200
    assert figures["cost_per_1000_images"] == pytest.approx(1.0)
    assert figures["device_busy_fraction"] == 0.75
    assert "cost_per_1000_images" not in throughput(1000, 500, VALUES, price_per_hour=None)
    assert describe({**VALUES, **figures}) == (
        "7,200 images/hour; device busy 75%; compiling 60.0 s (2); encoding 12.0 s, writing 8.0 s; 3.0 MB; "
        "1,000 images cost 1.0"
    )


def test_a_run_that_wrote_nothing_claims_no_speed():
    nothing = dict.fromkeys(VALUES, 0)
    assert throughput(0, 10, nothing, 1.0) == {} and describe(nothing) == ""


def test_time_with_two_batches_on_the_device_counts_once_and_waiting_counts_apart(monkeypatch):
    took, now = [], iter([0, 13, 15, 40])  # of each call of the clock: made, then one fetch after the other
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(metrics, "took", lambda name, seconds: took.append((name, seconds)))
    clock = metrics.DeviceClock()
    for started in (10, 12, 30):
        clock.fetched(started)
    assert took == [
        *(("device_idle", 10), ("device_busy", 3)),
        *(("device_idle", 0), ("device_busy", 2)),
        *(("device_idle", 15), ("device_busy", 10)),
    ]
