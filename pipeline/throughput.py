"""How fast a run was, where its time went, and what that cost."""

from collections import Counter
from typing import Any

from apache_beam.metrics.execution import MetricResult
from apache_beam.metrics.metric import MetricResults, MetricsFilter
from apache_beam.runners.runner import PipelineResult

from model_handlers import metrics

_COUNTERS = ("compiles", "bytes_written", "tokens_truncated")
_DURATIONS = ("compile", "device_busy", "device_idle", "encode", "write")


def totals(result: PipelineResult) -> Counter[str]:
    """Every metric of the job, also of one that runs, added up over its steps and workers."""
    sums: Counter[str] = Counter()
    found = result.metrics().query(MetricsFilter().with_namespace(metrics.NAMESPACE))
    for metric in found[MetricResults.COUNTERS]:
        sums[metric.key.metric.name] += _known(metric)
    for metric in found[MetricResults.DISTRIBUTIONS]:
        sums[metric.key.metric.name] += _known(metric).sum
    return sums


def _known(metric: MetricResult) -> Any:
    # A job server has attempted values only; where both are known, committed ones count no bundle twice.
    return metric.attempted if metric.committed is None else metric.committed


def measured(result: PipelineResult) -> dict[str, float]:
    """What a run's summary says of its metrics; durations as `<name>_seconds`. The fates of records are not among
    them: these are exact in `Counts`."""
    sums = totals(result)
    durations = {f"{name}_seconds": sums[f"{name}{metrics.UNIT}"] / 1000 for name in _DURATIONS}
    return {name: sums[name] for name in _COUNTERS} | durations


def throughput(written: int, seconds: float, values: dict[str, float], price_per_hour: float | None) -> dict[str, Any]:
    """Figures that follow from others, none of them where nothing was written.

    Args:
      written: images of the run.
      seconds: of the whole run, from reading to the last commit record, starting and compiling included.
      values: from `measured`.
      price_per_hour: of all workers together. The cost covers the run's own seconds and not what a service takes to
        start its machines.
    """
    figures: dict[str, Any] = {}
    if written and seconds:
        figures["images_per_hour"] = round(written / seconds * 3600, 1)
        if price_per_hour is not None:
            figures["price_per_hour"] = price_per_hour
            figures["cost_per_1000_images"] = float(f"{price_per_hour * seconds / 3600 / written * 1000:.3g}")
    if known := values["device_busy_seconds"] + values["device_idle_seconds"]:
        figures["device_busy_fraction"] = round(values["device_busy_seconds"] / known, 3)
    return figures


def describe(run: dict[str, Any]) -> str:
    """One line for the end of a run, "" if it wrote nothing; takes what `measured` and `throughput` gave."""
    if "images_per_hour" not in run:
        return ""
    parts = [f"{run['images_per_hour']:,.0f} images/hour"]
    if "device_busy_fraction" in run:
        parts.append(f"device busy {run['device_busy_fraction']:.0%}")
    parts.append(f"compiling {run['compile_seconds']:,.1f} s ({run['compiles']})")
    parts.append(f"encoding {run['encode_seconds']:,.1f} s, writing {run['write_seconds']:,.1f} s")
    parts.append(f"{run['bytes_written'] / 1e6:,.1f} MB")
    if run["tokens_truncated"]:
        parts.append(f"{run['tokens_truncated']:,} tokens cut")
    if "cost_per_1000_images" in run:
        parts.append(f"1,000 images cost {run['cost_per_1000_images']:,}")
    return "; ".join(parts)
