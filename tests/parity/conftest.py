"""Collects the largest differences of a live run and prints them as a table; `make parity` keeps it in docs/."""

import os
from pathlib import Path

import pytest

# The live comparison needs outputs of the reference, which `make parity` makes in an environment of its own.
collect_ignore = [] if "LIGHTMILL_REFERENCE" in os.environ else ["test_parity.py"]

HEADER = """\
# Parity with diffusers

Written by `make parity`. Largest absolute difference between Lightmill in JAX and diffusers on torch, both float32 on
CPU, over the checkpoints of `tests/parity/cases.py`. `step`, `text`, `pooled` and the VAE's `mean`, `log_variance` and
`decoded` are single evaluations; `image` is the picture in [0, 1] after up to 20 steps with guidance, by Euler but for
`as_sd_1` (PNDM) and `refined_by_dpm` (DPM++ 2M Karras); `rounded` the same in 8 bits; `single file` is the image of the
same weights from one file in the original layout, which diffusers reads too. `conditioning` has a setting of its own in
each picture; the pipeline has no guidance interval, so for that its scale is set to 1 at the steps outside.
`long_prompts` has up to three windows of 75 tokens; the pipeline gets the states of its own text encoders for them,
laid end to end. Samplers (`tests/parity/sampling.py`) are compared over 1, 2, 3, 4, 11, 13, 20, 48 and 50 steps with a
network of a few lines and the same fresh noise: the timesteps, the latents after `one step` and all along the `loop`.
`refined` and `handover` have a second stage, which begins anew where the first one ends, as the pipelines of base and
refiner do. What differs is the reference's own rounding, 2**-24 of the noise that it starts from: it steps in float32
throughout. LoRA files (`tests/parity/adapters.py`) are merged into the weights here, and there they are PEFT's layers
beside them.

"""
ROWS = pytest.StashKey[list[tuple[str, str, float, float]]]()


@pytest.fixture
def record(request):
    """Notes a row of the table: case, what was compared, the largest difference and its limit."""
    rows = request.config.stash.setdefault(ROWS, [])
    return lambda *row: rows.append(row)


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    lines = ["| case | what | largest difference | limit |", "|---|---|---:|---:|"]
    lines += [f"| {case} | {what} | {difference:.1e} | {limit:.0e} |" for case, what, difference, limit in rows]
    table = "\n".join(lines) + "\n"
    terminalreporter.write_sep("=", "largest differences from diffusers")
    terminalreporter.write(table)
    if path := os.environ.get("LIGHTMILL_PARITY_TABLE"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(HEADER + table)
