"""A picture depends on its request and the compiled shape, and on nothing that happens to be beside it.

python -m tests.model_handlers.test_program CHECKPOINT prints the digests of `REQUESTS` on 1, 2 and 8 devices.
"""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_handlers import attention as attention_module
from model_handlers import executables, mesh, samplers, sampling, tpu_attention
from model_handlers import program as program_module
from model_handlers.attention import attention
from model_handlers.program import CompileError, Programs
from model_handlers.recipe import ImageRequest, Settings
from model_handlers.stable_diffusion import model as sdxl
from model_handlers.stable_diffusion.model import StableDiffusion
from model_handlers.stable_diffusion.unet import Conditioning
from tests import checkpoints
from tests.checkpoints import TINY
from tests.parity import cases

# With fewer rows, convolutions this small come into a range in which XLA on CPU parts their sums among threads, of
# which more virtual devices have more.
PER_DEVICE_BATCH_SIZE = 8


def ask(
    seed,
    prompt="a red circle",
    negative_prompt=None,
    steps=3,
    guidance_scale=5.0,
    size=(TINY.height, TINY.width),
    **settings,
):
    height, width = size
    return ImageRequest(
        id=str(seed),
        image_index=0,
        prompt=prompt,
        negative_prompt=negative_prompt,
        seed=seed,
        width=width,
        height=height,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        original_size=size,
        crops_coords_top_left=(0, 0),
        target_size=size,
        settings=Settings(**settings),
    )


REQUESTS = [
    ask(5),
    ask(5, prompt="a blue square"),
    ask(5 + 2**32),  # the high half of a seed counts too
    ask(6, negative_prompt="a white moon", steps=1),
    ask(7, negative_prompt="", steps=7),
    ask(8, guidance_scale=1.5),
    ask(2**63 - 1, guidance_scale=7.5, steps=2),
    ask(9, prompt="a green star below a yellow ring", steps=4),
]


def load(root, devices, shape=mesh.ALL_ON_DATA, on_host=(), refiner=None):
    devices_mesh = mesh.make_mesh(devices, shape)
    place = mesh.of_weights(devices_mesh, on_host)
    scheduler = "EulerDiscreteScheduler"
    model = StableDiffusion.load(root, scheduler=scheduler, dtype="float32", place=place, refiner=refiner)
    return Programs(model, devices_mesh, PER_DEVICE_BATCH_SIZE)


def pictures(programs, slots):
    """The pixels of each slot of one batch."""
    size = slots[0].height, slots[0].width
    inputs, _ = programs.prepare(slots)
    programs.compile(*size, inputs)
    images, finite = programs(inputs, *size)
    assert np.asarray(finite).all()
    return np.asarray(images)


def draw(programs, slots):
    """sha256 of the picture in each slot of one batch."""
    return [hashlib.sha256(image.tobytes()).hexdigest() for image in pictures(programs, slots)]


def draw_all(programs, requests):
    """The same for any number of requests; free slots repeat the first of their batch."""
    digests = []
    for first in range(0, len(requests), programs.batch_size):
        batch = requests[first : first + programs.batch_size]
        padded = batch + [batch[0]] * (programs.batch_size - len(batch))
        digests += draw(programs, padded)[: len(batch)]
    return digests


@pytest.fixture(scope="module")
def programs(tiny_checkpoint):
    return load(tiny_checkpoint, jax.devices()[:1])


@pytest.fixture(scope="module")
def digests(programs):
    return draw_all(programs, REQUESTS)


def test_every_request_gets_a_picture_of_its_own(digests):
    assert len(set(digests)) == len(REQUESTS)


@pytest.mark.parametrize("slot", [0, 3, PER_DEVICE_BATCH_SIZE - 1])
def test_a_picture_is_the_same_in_every_slot_and_beside_any_neighbours(slot, programs, digests):
    for i, request in enumerate(REQUESTS):
        for shift in (1, 3):
            others = [REQUESTS[(i + shift * n) % len(REQUESTS)] for n in range(1, PER_DEVICE_BATCH_SIZE)]
            batch = [*others[:slot], request, *others[slot:]]
            assert draw(programs, batch)[slot] == digests[i], request


def test_a_picture_is_the_same_alone(programs, digests):
    for request, digest in zip(REQUESTS, digests, strict=True):
        assert draw_all(programs, [request]) == [digest]


def test_a_picture_is_the_same_whatever_the_order(programs, digests):
    assert draw_all(programs, REQUESTS[::-1]) == digests[::-1]


# In a job only requests that are guided alike share batches; each list here is of one kind.
UNGUIDED = [
    ask(5, guidance_scale=1.0),
    ask(6, guidance_scale=0.0, negative_prompt="a zebra", steps=2),
    ask(7, guidance_scale=0.0, steps=5),
    ask(8, guidance_interval=(100.0, 200.0)),
]
PARTLY_GUIDED = [
    ask(5, steps=5, guidance_interval=(1.0, 5.0)),
    ask(6, steps=5, guidance_interval=(0.9, 5.0), guidance_rescale=0.5),
    ask(7, steps=5, guidance_interval=(1.0, 4.5), guidance_scale=3.0, prompt="a blue square"),
    ask(8, steps=5, guidance_interval=(1.0, 5.0), negative_prompt="a zebra", negative_prompt_2="a star"),
]


@pytest.mark.parametrize("kind", [UNGUIDED, PARTLY_GUIDED])
def test_a_picture_is_the_same_alone_and_beside_others_whenever_it_is_guided(kind, programs, digests):
    found = draw_all(programs, kind)
    assert len({*found, *digests}) == len(found) + len(digests)
    assert draw_all(programs, kind[::-1]) == found[::-1]
    assert [draw_all(programs, [request])[0] for request in kind] == found


def test_a_scale_of_0_is_a_scale_of_1_and_neither_looks_at_the_negative_prompt(programs):
    same = [ask(5, guidance_scale=1.0), ask(5, guidance_scale=0.0), ask(5, guidance_scale=0.5, negative_prompt="a cat")]
    assert len(set(draw_all(programs, same))) == 1


def test_an_interval_of_all_noise_levels_is_none(programs):
    assert draw_all(programs, [ask(5, guidance_interval=(0.0, 10_000.0))]) == draw_all(programs, [ask(5)])


def test_a_picture_is_the_same_beside_others_that_are_guided_at_other_evaluations(programs):
    kinds = (REQUESTS[:4], UNGUIDED, PARTLY_GUIDED)
    apart = [draw_all(programs, kind) for kind in kinds]
    mixed = [request for trio in zip(*kinds, strict=True) for request in trio]
    assert draw_all(programs, mixed) == [digest for trio in zip(*apart, strict=True) for digest in trio]


def rows_evaluated(programs, requests):
    """How many rows the UNet gets at each pass, by a stand-in for it that notes them while the program runs."""
    rows = []

    def unet(latents, *_):
        jax.debug.callback(lambda: rows.append(len(latents)), ordered=True)
        return latents

    inputs, _ = programs.prepare(requests)
    latents = np.zeros((len(requests), 2, 2, 4), np.float32)
    conditioning = Conditioning(jnp.zeros((2, len(requests), 1)), [])
    networks = nnx.Module()
    networks.unet = unet
    run = jax.jit(lambda inputs, loop: sdxl.denoise(networks, latents, conditioning, inputs, loop))
    run(inputs, sdxl.Loop.of(inputs)).block_until_ready()
    jax.effects_barrier()
    return rows


def test_without_guidance_there_is_one_pass_and_with_an_interval_a_second_one_inside(programs):
    sampler = programs._model.sampler
    sigmas = sampling.tables_of(5, Settings(), sampler)[0].sigmas
    assert ((sigmas > 1) & (sigmas <= 5)).tolist() == [False, True, True, False, False]
    assert rows_evaluated(programs, [ask(5, steps=5)] * 3) == [3] * 10
    assert rows_evaluated(programs, [ask(5, steps=5, guidance_scale=1.0)] * 3) == [3] * 5
    assert rows_evaluated(programs, PARTLY_GUIDED[:1] * 3) == [3] * 7


REFINED = [
    ask(5, steps=5),
    ask(6, steps=5, denoising_end=0.3),
    ask(7, steps=3, denoising_end=0.55, negative_prompt="a zebra", aesthetic_score=2.0),
    ask(8, steps=4, denoising_end=0.9995, guidance_scale=1.0),
    ask(9, steps=6, guidance_interval=(0.5, 5.0)),
]


@pytest.fixture(scope="module")
def refining(tmp_path_factory):
    """Programs of a checkpoint with a refiner, and of the same checkpoint alone."""
    (case,) = (case for case in cases.CASES if case.name == "refined")
    root, refiner = (checkpoints.write(one, tmp_path_factory.mktemp(one.name)) for one in (case, case.refiner))
    return load(root, jax.devices()[:1], refiner=refiner), load(root, jax.devices()[:1])


def test_a_refined_picture_is_the_same_beside_neighbours_that_are_handed_over_elsewhere(refining):
    programs, alone = refining
    found = draw_all(programs, REFINED)
    assert len({*found, *draw_all(alone, REFINED)}) == 2 * len(REFINED)
    assert draw_all(programs, REFINED[::-1]) == found[::-1]
    assert [draw_all(programs, [request])[0] for request in REFINED] == found


def test_fresh_noise_is_each_evaluations_own_in_both_stages(refining):
    programs, _ = refining
    inputs, _ = programs.prepare(REFINED)
    begun, ended = inputs.num_evaluations.tolist(), inputs.refiner.num_evaluations.tolist()
    assert list(zip(begun, ended, strict=True)) == [(4, 1), (1, 4), (1, 2), (4, 0), (4, 2)]
    assert inputs.refiner.first_evaluation.tolist() == begun


def test_without_a_refiner_there_is_none_in_the_program(programs, refining):
    inputs, _ = programs.prepare(REQUESTS)
    assert programs._model.networks.refiner is inputs.refiner is sdxl.Loop.of(inputs).refiner is None
    assert refining[0]._model.networks.refiner.text_encoder is None


# Scheduler, its options, eta.
STOCHASTIC = {
    "euler ancestral": ("EulerAncestralDiscreteScheduler", {}, 0.0),
    "dpm++ sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}, 0.0),
    "ddim, eta": ("DDIMScheduler", {}, 1.0),
    "lcm": ("LCMScheduler", {}, 0.0),
    "tcd": ("TCDScheduler", {}, 0.3),
}


def with_sampler(programs, requests, name):
    """The digests by another sampler, which is all data: the programs stay as they are."""
    scheduler, options, eta = STOCHASTIC[name]
    requests = [dataclasses.replace(request, settings=Settings(eta=eta)) for request in requests]
    config = samplers.read(scheduler, {**TINY.scheduler, "clip_sample": False, **options}, "")
    model = programs._model
    with mock.patch.object(model, "configs", model.configs._replace(scheduler=config)):
        return draw_all(programs, requests)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_fresh_noise_is_each_pictures_own(name, programs, digests, compilations):
    found = with_sampler(programs, REQUESTS, name)
    assert len(set(found)) == len(REQUESTS)
    several = [request.num_inference_steps > 1 for request in REQUESTS]  # one ancestral step is one of Euler's
    assert all(mine != other for mine, other, more in zip(found, digests, several, strict=True) if more)
    assert with_sampler(programs, REQUESTS[::-1], name) == found[::-1]
    assert with_sampler(programs, REQUESTS[1:] + REQUESTS[:1], name) == found[1:] + found[:1]
    for request, digest in zip(REQUESTS, found, strict=True):
        assert with_sampler(programs, [request], name) == [digest]
    assert compilations == []


@pytest.mark.parametrize("name", STOCHASTIC)
def test_fresh_noise_is_the_same_on_any_number_of_devices(name, many_devices, programs):
    found = with_sampler(programs, REQUESTS, name)
    assert many_devices["stochastic"][name] == [found, found, found]


def test_a_picture_does_not_depend_on_the_steps_of_its_neighbours(programs, digests):
    for steps in (1, 3, 50):
        beside = [ask(100, steps=steps)] * (PER_DEVICE_BATCH_SIZE - 1)
        assert draw(programs, [REQUESTS[0], *beside])[0] == digests[0]


@pytest.fixture(scope="module")
def many_devices(tiny_checkpoint):
    """What this file prints in a process that has eight virtual devices, which must be said before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(tiny_checkpoint)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("count", ["1", "2", "8"])
def test_a_picture_is_the_same_on_any_number_of_devices(count, many_devices, programs, digests):
    assert many_devices["digests"][count] == digests
    assert many_devices["unguided"][count] == draw_all(programs, UNGUIDED)


def test_a_program_for_several_devices_that_was_saved_and_loaded_draws_the_same(many_devices, digests):
    assert many_devices["loaded"] == digests


def test_devices_say_nothing_to_each_other(many_devices):
    # Each picture is made within one device; a collective would be time lost and a way for neighbours to matter.
    assert many_devices["collectives"] == []


def test_a_picture_is_the_same_with_weights_that_are_divided_or_wait_on_the_host(many_devices, digests):
    found = many_devices["divided"]
    assert found["digests"] == digests
    assert set(found["collectives"]) == {"all-gather"}  # of weights, and nothing of a picture
    on_host, on_device = found["bytes"]
    assert on_host > 0
    assert on_device["mine"] == on_device["all"] / 2 > 0


def test_a_picture_that_chips_share_is_the_same_but_for_its_last_bits(many_devices):
    found = many_devices["shared"]
    # Norms and attention are summed in the chips' parts; after rounding a pixel is the same, or beside it.
    assert found["difference"] <= 1
    assert "collective-permute" in found["collectives"]  # of the rows at the edges, for convolutions


def test_attention_by_the_kernel_or_in_blocks_gives_each_chip_its_own_queries_and_all_keys(many_devices):
    # Sums of 32 terms of size 1, in another order.
    assert max(many_devices["attention"]) < 2e-6


@pytest.fixture
def compilations():
    """A list that grows with everything that XLA compiles in this process."""
    events = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


def test_steps_guidance_and_prompts_are_data(programs, digests, compilations):
    before = dict(programs.compiled)
    draw_all(programs, [ask(1, "a cat", "a dog", 9, 3.3), ask(2, "", None, 1, 1.5), ask(3, "x " * 200, "", 30, 20.0)])
    draw_all(programs, UNGUIDED)
    draw_all(programs, [ask(1, guidance_interval=(0.5, 5.0), guidance_rescale=0.5, clip_skip=1, prompt_2="a cat")])
    assert programs.compiled == before
    assert compilations == []
    jax.jit(lambda x: x + 1)(1.0)
    assert compilations  # the list does grow


def test_each_size_is_compiled_once(tiny_checkpoint):
    programs = load(tiny_checkpoint, jax.devices()[:1])
    sizes = [(16, 24), (24, 16), (16, 24), (24, 16)]
    inputs = {size: programs.prepare([ask(1, size=size)] * programs.batch_size)[0] for size in sizes}
    assert [programs.compile(*size, inputs[size]) for size in sizes] == [True, True, False, False]
    assert list(programs.compiled) == [(16, 24), (24, 16)]
    for height, width in programs.compiled:
        images, _ = programs(inputs[height, width], height, width)
        assert images.shape == (PER_DEVICE_BATCH_SIZE, height, width, 3)
        assert images.dtype == np.uint8


def test_a_program_that_does_not_compile_says_which(programs, monkeypatch):
    def generate(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 40 GiB of 16")

    monkeypatch.setattr(program_module, "generate", generate)
    inputs, _ = programs.prepare(REQUESTS[:PER_DEVICE_BATCH_SIZE])
    with pytest.raises(CompileError, match=r"^96 x 64 pixels at batch 8: RESOURCE_EXHAUSTED"):
        programs.compile(64, 96, inputs)
    assert (64, 96) not in programs.compiled


def draw_by_loaded(programs):
    """The digests of REQUESTS by the same program, saved and loaded again."""
    ((size, compiled),) = programs.compiled.items()
    inputs, _ = programs.prepare(REQUESTS[:1] * programs.batch_size)
    lowered = program_module.trace(programs._networks, inputs, programs._mesh, *size).lower()
    key = executables.key_of(lowered, programs._mesh, program_module.compiler_options(programs._mesh))
    with tempfile.TemporaryDirectory() as folder:
        for name, data in executables.pack(compiled, key, "").items():
            Path(folder, name).write_bytes(data)
        loaded = Programs(programs._model, programs._mesh, PER_DEVICE_BATCH_SIZE, folder)
        assert not loaded.compile(*size, inputs)
        return draw_all(loaded, REQUESTS)


def main(root):
    found = {"digests": {}, "unguided": {}, "stochastic": {name: [] for name in STOCHASTIC}, "collectives": []}
    for count in (1, 2, 8):
        programs = load(root, jax.devices()[:count])
        assert programs.batch_size == PER_DEVICE_BATCH_SIZE * count
        found["digests"][count] = draw_all(programs, REQUESTS)
        found["unguided"][count] = draw_all(programs, UNGUIDED)
        for name, digests in found["stochastic"].items():
            digests.append(with_sampler(programs, REQUESTS, name))
        if count == 1:
            alone = pictures(programs, REQUESTS)
        if count == 2:
            found["loaded"] = draw_by_loaded(programs)
        found["collectives"] += collectives(programs)
    found |= {"divided": divided(root), "shared": shared(root, alone), "attention": attention_on_chips()}
    print(json.dumps(found))


def collectives(programs):
    (compiled,) = programs.compiled.values()
    names = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"\b(?:{names})\b", compiled.as_text())


def divided(root):
    """The weights divided in two, however small they are, and the text encoders on the host."""
    shape = mesh.MeshShape(data=2, fsdp=2)
    with mock.patch.object(mesh, "SMALL", 0):
        programs = load(root, jax.devices()[:4], shape, sdxl.TEXT_ENCODERS)
    weights = jax.tree.leaves(programs._networks[1])
    on_host = [weight for weight in weights if weight.sharding.memory_kind == "pinned_host"]
    in_two = [weight for weight in weights if not weight.sharding.is_fully_replicated]
    return {
        "digests": draw_all(programs, REQUESTS),
        "collectives": collectives(programs),
        "bytes": [
            sum(weight.nbytes for weight in on_host),
            {"all": sum(w.nbytes for w in in_two), "mine": sum(w.addressable_shards[0].data.nbytes for w in in_two)},
        ],
    }


def shared(root, alone):
    """The pixels of pictures that two chips make together, against those that one makes."""
    programs = load(root, jax.devices()[:4], mesh.MeshShape(data=2, context=2))
    found = pictures(programs, REQUESTS * 2)[: len(REQUESTS)]
    return {
        "difference": int(np.abs(found.astype(int) - alone).max()),
        "collectives": collectives(programs),
    }


def attention_on_chips():
    """How far attention on divided rows and queries is from plain: by TPU's kernel, interpreted, and in blocks."""
    devices_mesh = mesh.make_mesh(jax.devices(), mesh.MeshShape(data=2, fsdp=2, context=2))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((4, 32, 128), np.float32) for _ in range(3)]
    kernel = partial(tpu_attention.attention, num_heads=2, interpret=True)
    axes = ("batch", "queries"), ("batch",), ("batch",), ("batch",)
    with jax.set_mesh(devices_mesh), mock.patch.object(attention_module, "MAX_SCORES", 2 * 8 * 32):
        assert attention_module._blocks(16, 32, 2) == 2
        by_kernel = jax.jit(lambda *arrays: mesh.on_each_chip(kernel, *axes)(*arrays, None))(*arrays)
        in_blocks = jax.jit(lambda *arrays: attention(*arrays, 2))(*arrays)
    return [float(np.abs(found - attention(*arrays, 2)).max()) for found in (by_kernel, in_blocks)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
