"""Every request of a shard comes back, as a picture or with the reason why there is none, or the error is the run's."""

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_handlers import checkpoint, handler
from model_handlers.checkpoint import CheckpointError
from model_handlers.handler import NOT_FINITE, DiffusionModelHandler, LoadedModel, ModelSpec
from model_handlers.metrics import DeviceClock
from model_handlers.program import CompileError
from model_handlers.recipe import ImageRequest, Shard
from model_handlers.stable_diffusion.tokens import Tokens
from tests.checkpoints import TINY

BATCH_SIZE = 8


def ask(index, prompt="a red circle"):
    size = (TINY.height, TINY.width)
    return ImageRequest(
        id=str(index),
        image_index=0,
        prompt=prompt,
        negative_prompt=None,
        seed=index,
        width=TINY.width,
        height=TINY.height,
        num_inference_steps=2,
        guidance_scale=5.0,
        original_size=size,
        crops_coords_top_left=(0, 0),
        target_size=size,
    )


def shard_of(*requests):
    return Shard("s", TINY.width, TINY.height, requests)


class Pending:
    """An array that is still being computed: the error of the computation comes when it is fetched."""

    def __init__(self, value, log=None):
        self._value = value
        self._log = log

    def __array__(self, dtype=None, copy=None):
        if self._log is not None:
            self._log()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class FakePrograms:
    """The interface of `Programs`, with a picture that shows its seed; `fail` gives the error of a batch, or None.

    Attributes:
      calls: prompts of every batch that was started, padded slots included.
      events: "start" and "fetch" with the number of the batch, in the order in which they happened.
    """

    def __init__(self, batch_size=BATCH_SIZE, fail=lambda requests: None, finite=lambda request: True, lost=0):
        self.batch_size = batch_size
        self.clock = DeviceClock()
        self.calls = []
        self.events = []
        self._fail = fail
        self._finite = finite
        self._lost = lost

    def prepare(self, requests):
        return list(requests), [
            Tokens(np.zeros((1, 77), np.int32), len(r.prompt), len(r.prompt) > 77, 0) for r in requests
        ]

    def compile(self, height, width, like):
        return not self.calls

    def __call__(self, requests, height, width):
        number = len(self.calls)
        self.calls.append([request.prompt for request in requests])
        self.events.append(("start", number))
        images = np.stack([np.full((height, width, 3), r.seed, np.uint8) for r in requests])[self._lost :]
        finite = np.array([self._finite(request) for request in requests])
        error = self._fail(requests)
        return Pending(error or images, lambda: self.events.append(("fetch", number))), Pending(error or finite)


@pytest.fixture
def sleeps(monkeypatch):
    """The delays that were waited for, without waiting."""
    delays = []
    monkeypatch.setattr(handler.time, "sleep", delays.append)
    return delays


SPEC = ModelSpec("nowhere", "0" * 64, "EulerDiscreteScheduler", "float32", BATCH_SIZE)


def predictions(programs, *shards):
    return list(DiffusionModelHandler(SPEC).run_inference(shards, LoadedModel(programs)))


def generate(programs, *shards):
    """The results of each shard, in the order of its requests."""
    results = []
    for prediction in predictions(programs, *shards):
        by_key = {result.key: result for result in prediction.inference}
        results.append([by_key.pop(request.key) for request in prediction.example.requests])
        assert by_key == {}
    return results


def poison(requests):
    return ValueError("a poison record") if any(r.prompt == "poison" for r in requests) else None


def test_a_shard_comes_back_whole():
    requests = [ask(i) for i in range(2 * BATCH_SIZE + 3)]
    (results,) = generate(FakePrograms(), shard_of(*requests))
    assert [int(result.image[0, 0, 0]) for result in results] == [request.seed for request in requests]


def test_a_last_batch_is_filled_and_what_fills_it_is_dropped():
    programs = FakePrograms()
    (results,) = generate(programs, shard_of(*(ask(i, f"prompt {i}") for i in range(3))))
    assert programs.calls == [["prompt 0", "prompt 1", "prompt 2"] + ["prompt 0"] * (BATCH_SIZE - 3)]
    assert len(results) == 3


def test_the_next_batch_is_started_before_the_last_is_fetched():
    programs = FakePrograms()
    generate(programs, shard_of(*(ask(i) for i in range(3 * BATCH_SIZE))))
    order = [("start", 0), ("start", 1), ("fetch", 0), ("start", 2), ("fetch", 1), ("fetch", 2)]
    assert programs.events == order


def test_a_batch_can_be_read_while_the_device_makes_the_next():
    programs = FakePrograms()
    (prediction,) = predictions(programs, shard_of(*(ask(i) for i in range(2 * BATCH_SIZE))))
    assert programs.events == []
    results = iter(prediction.inference)
    assert [next(results).image[0, 0, 0] for _ in range(BATCH_SIZE)] == list(range(BATCH_SIZE))
    assert programs.events == [("start", 0), ("start", 1), ("fetch", 0)]


def test_results_that_were_read_can_be_read_again_and_cross_into_another_process():
    programs = FakePrograms()
    (prediction,) = predictions(programs, shard_of(*(ask(i) for i in range(BATCH_SIZE + 1))))
    next(iter(prediction.inference))
    sent = pickle.loads(pickle.dumps(prediction)).inference
    assert [result.image[0, 0, 0] for result in sent] == list(range(BATCH_SIZE + 1))
    assert [result.key for result in prediction.inference] == [result.key for result in sent]
    assert len(programs.calls) == 2


@pytest.mark.parametrize("place", [0, 3, 7, 9])
def test_one_poison_record_takes_none_of_its_neighbours_along(place):
    requests = [ask(i, "poison" if i == place else f"prompt {i}") for i in range(10)]
    programs = FakePrograms(fail=poison)
    (results,) = generate(programs, shard_of(*requests))
    assert [result.image is None for result in results] == [i == place for i in range(10)]
    assert results[place].reject_reason == "the model failed on this record: ValueError: a poison record"
    assert results[place].failed
    assert [result.key for result in results] == [request.key for request in requests]
    assert {len(call) for call in programs.calls} == {BATCH_SIZE}  # always the compiled shape


def test_records_that_make_the_model_numbers_not_finite_are_rejected_alone():
    programs = FakePrograms(finite=lambda request: request.seed != 2)
    (results,) = generate(programs, shard_of(*(ask(i) for i in range(4))))
    assert [result.reject_reason for result in results] == [None, None, NOT_FINITE, None]
    assert results[2].image is None
    assert not results[2].failed  # it would come out the same again
    assert len(programs.calls) == 1


@pytest.mark.parametrize("status", ["UNAVAILABLE", "ABORTED", "CANCELLED"])
def test_a_device_that_is_away_for_a_moment_is_tried_again(status, sleeps):
    answers = [RuntimeError(f"{status}: the slice moves"), RuntimeError(f"{status}: still"), None]
    programs = FakePrograms(fail=lambda requests: answers.pop(0))
    (results,) = generate(programs, shard_of(*(ask(i) for i in range(BATCH_SIZE))))
    assert all(result.image is not None for result in results)
    assert sleeps == list(handler.RETRY_DELAYS[:2])
    assert len(programs.calls) == 3


def test_a_device_that_stays_away_rejects_no_record(sleeps):
    programs = FakePrograms(fail=lambda requests: RuntimeError("UNAVAILABLE: the slice is gone"))
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        generate(programs, shard_of(ask(0)))
    assert sleeps == list(handler.RETRY_DELAYS)


def test_other_errors_are_not_waited_for(sleeps):
    generate(FakePrograms(fail=poison), shard_of(ask(0, "poison"), ask(1)))
    assert sleeps == []


@pytest.mark.parametrize("count", [2, BATCH_SIZE, 2 * BATCH_SIZE])
def test_a_shard_of_which_everything_fails_is_the_workers_fault(count):
    programs = FakePrograms(fail=lambda requests: ValueError("RESOURCE_EXHAUSTED: out of memory"))
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        generate(programs, shard_of(*(ask(i) for i in range(count))))


def test_a_program_that_gives_fewer_pictures_than_asked_is_an_error():
    with pytest.raises(RuntimeError, match=f"a batch of {BATCH_SIZE} gave {BATCH_SIZE - 1} images"):
        generate(FakePrograms(lost=1), shard_of(*(ask(i) for i in range(BATCH_SIZE))))


def test_a_program_that_does_not_compile_is_tried_once(sleeps):
    class Uncompilable(FakePrograms):
        attempts = 0

        def compile(self, height, width, like):
            self.attempts += 1
            raise CompileError("UNAVAILABLE: 64 x 64 pixels at batch 8: too large")

    programs = Uncompilable()
    with pytest.raises(CompileError):
        generate(programs, shard_of(*(ask(i) for i in range(BATCH_SIZE))))
    assert programs.attempts == 1
    assert sleeps == []


def test_threads_take_turns_at_the_device():
    inside, most = [], []

    class Slow(FakePrograms):
        def __call__(self, *args):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()
            return super().__call__(*args)

    model = LoadedModel(Slow())

    def work():
        (prediction,) = DiffusionModelHandler(SPEC).run_inference([shard_of(ask(0), ask(1))], model)
        list(prediction.inference)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_beams_batching_leaves_shards_alone():
    assert DiffusionModelHandler(SPEC).batch_elements_kwargs() == {"min_batch_size": 1, "max_batch_size": 1}


# With a real network of width 32.


@pytest.fixture
def root(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


def spec_of(root, **changes):
    spec = ModelSpec(str(root), checkpoint.identity(root), "EulerDiscreteScheduler", "float32", 2)
    return dataclasses.replace(spec, **changes)


def test_a_network_that_overflows_gives_rejects_and_no_pictures(root):
    path = root / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["decoder.conv_out.bias"][0] = np.inf  # one channel, and clipping would make it a mere colour
    save_file(tensors, path)
    shard_handler = DiffusionModelHandler(spec_of(root))
    model = shard_handler.load_model()
    (prediction,) = shard_handler.run_inference([shard_of(ask(0), ask(1), ask(2))], model)
    assert [result.reject_reason for result in prediction.inference] == [NOT_FINITE] * 3
    assert all(result.image is None and not result.failed for result in prediction.inference)


def test_a_real_model_makes_pictures_and_counts_tokens(root):
    shard_handler = DiffusionModelHandler(spec_of(root))
    requests = [ask(0), ask(1, "a red circle " * 40)]
    (prediction,) = shard_handler.run_inference([shard_of(*requests)], shard_handler.load_model())
    assert prediction.example.requests == tuple(requests)
    assert [(result.num_tokens, result.truncated) for result in prediction.inference] == [(5, False), (122, True)]
    for result in prediction.inference:
        assert result.image.shape == (TINY.height, TINY.width, 3)
        assert result.image.dtype == np.uint8
        assert result.image.std() > 10  # a picture, not a plane


def test_a_checkpoint_that_changed_under_the_run_stops_it(root):
    spec = spec_of(root)
    path = root / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["quant_conv.bias"] = -tensors["quant_conv.bias"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"identity {checkpoint.identity(root)[:12]}, those of the recipe"):
        DiffusionModelHandler(spec).load_model()


def test_a_tpu_job_without_a_tpu_stops_in_a_process_of_its_own(root):
    script = f"""
from model_handlers.handler import DiffusionModelHandler, ModelSpec
from model_handlers.mesh import MeshShape
DiffusionModelHandler({spec_of(root, device="tpu")!r}).load_model()
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: this worker has no usable tpu (")


def test_a_tpu_job_stops_also_where_jax_runs_on_the_cpu_already(root):
    platforms = jax.config.jax_platforms
    assert jax.devices()[0].platform == "cpu"
    try:
        with pytest.raises(RuntimeError, match="this worker has no usable tpu"):
            DiffusionModelHandler(spec_of(root, device="tpu")).load_model()
    finally:
        jax.config.update("jax_platforms", platforms)


def test_what_the_driver_must_be_told_is_set_where_the_model_is_loaded(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "7")
    spec = ModelSpec(str(tiny_checkpoint), "another", "EulerDiscreteScheduler", "float32", 4)
    with pytest.raises(CheckpointError):  # after the devices have started
        handler.load_programs(dataclasses.replace(spec, environment=(("TPU_WORKER_ID", "0"),)))
    assert os.environ["TPU_WORKER_ID"] == "0"
