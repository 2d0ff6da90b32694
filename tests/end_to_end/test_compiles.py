"""One program for each size of picture, however many records, steps, seeds and scales of guidance there are."""

import jax
import pytest

from tests.end_to_end import command


@pytest.fixture
def compiled():
    """Names of the programs that JAX compiles, or takes from its cache, during the test."""
    names: list[str] = []
    counting = [True]

    def listen(event: str, seconds: float, **details) -> None:
        if counting[0] and event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    counting[0] = False  # a listener cannot be taken away again by a public name


def programs(finished: command.Finished) -> list[str]:
    return [line for line in finished.stderr.splitlines() if "compiled program" in line]


def test_1003_records_of_one_size_take_exactly_one_program(generate, jsonl, tmp_path, compiled):
    records = [
        {
            "prompt": f"a red circle {number}",
            "num_inference_steps": 1 + (number == 500),
            "guidance_scale": number % 9,
            **({"negative_prompt": "a star"} if number % 2 else {}),
        }
        for number in range(1003)
    ]
    finished = generate(jsonl(records), tmp_path / "out", "--per_device_batch_size=8", "--width=16", "--height=16")
    (line,) = programs(finished)
    assert "compiled program 1: 16 x 16 pixels, batch 8 on 1 cpu device(s)" in line
    assert [name for name in compiled if "program" in name] == [compiled[0]] == ["jit(program)"], compiled
    counts = command.counts(tmp_path / "out")
    assert counts["written"] == 1003 and counts["padded_slots"] == 5


def test_two_interleaved_sizes_take_exactly_two_programs(generate, jsonl, tmp_path):
    records = [{"prompt": f"p{number}", "width": (32, 24)[number % 2]} for number in range(37)]
    finished = generate(jsonl(records), tmp_path / "out", "--images_per_shard=4")
    assert sorted(line.split(": ")[2].split(",")[0] for line in programs(finished)) == [
        "24 x 32 pixels",
        "32 x 32 pixels",
    ]
    assert command.counts(tmp_path / "out") == {
        "records_read": 37,
        "records_expanded": 37,
        "images_requested": 37,
        "written": 37,
        "padded_slots": -19 % 4 + -18 % 4,
    }
