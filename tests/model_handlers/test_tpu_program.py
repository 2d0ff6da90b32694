"""The built-in checkpoint's program, compiled for TPUs without one: it fits, and no chip waits for another."""

import re

import pytest
from flax import nnx

from model_handlers import executables, fetch, mesh, program, topologies
from model_handlers.costs import Costs, matmul_flops
from model_handlers.recipe import ImageRequest
from model_handlers.stable_diffusion.model import StableDiffusion
from tests.topologies import needs_libtpu

pytestmark = needs_libtpu

TOPOLOGY, SIDE, BATCH = "v5e:2x2", 64, 2
COLLECTIVES = r"\b(?:all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)\b"


@pytest.fixture(scope="module")
def compiled():
    """The program, traced and compiled, with the mesh that it is for; half a minute of one core.

    As SDXL's, whose feature maps are larger, it takes one picture at a time on each chip.
    """
    devices_mesh = mesh.make_mesh(topologies.devices_of(TOPOLOGY))
    root = fetch.checkpoint_folder(fetch.EMBEDDED)
    model = StableDiffusion.outline(root, dtype="bfloat16", place=mesh.of_weights(devices_mesh))
    square = (SIDE, SIDE)
    request = ImageRequest("", 0, "", None, 0, SIDE, SIDE, 20, 5.0, square, (0, 0), square)
    inputs, _ = model.prepare([request] * BATCH * devices_mesh.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "ROOM", 1)
        traced = program.trace(nnx.split(model.networks), inputs, devices_mesh, *square)
    lowered = traced.lower()
    return traced, lowered, lowered.compile(program.compiler_options(devices_mesh)), devices_mesh


def test_the_program_fits_and_has_no_collectives(compiled):
    text, stats = compiled[2].as_text(), compiled[2].memory_analysis()
    assert "while(" in text  # it is the text of the program
    assert re.findall(COLLECTIVES, text) == []
    # Four million weights in bfloat16, on every chip, and little beside them.
    assert 7e6 < stats.argument_size_in_bytes < 12e6
    assert stats.temp_size_in_bytes < 30e6 < topologies.chip_of(TOPOLOGY).memory


def test_its_loops_are_found_and_cost_what_their_products_do(compiled):
    traced, _, program_for_tpu, devices_mesh = compiled
    costs = Costs(program_for_tpu, topologies.chip_of(TOPOLOGY))

    def products(steps, passes):
        return matmul_flops(traced.jaxpr, (steps, passes)) / devices_mesh.size

    none, step, evaluation = (costs(trips).flops for trips in ((0, 0), (1, 0), (1, 1)))
    assert none < step < evaluation
    # The rest is norms and activations.
    assert 1 < (evaluation - step) / (products(1, 1) - products(1, 0)) < 1.3
    assert costs((20, 2)).flops == pytest.approx(none + 20 * (step - none) + 40 * (evaluation - step))
    assert costs((20, 2)).seconds > products(20, 2) / topologies.chip_of(TOPOLOGY).flops


def test_it_is_saved_under_a_key_of_its_own(compiled):
    _, lowered, program_for_tpu, devices_mesh = compiled
    key = executables.key_of(lowered, devices_mesh, None)
    payload, described = executables.pack(program_for_tpu, key, "a test")
    assert payload.removesuffix(".zst") == described.removesuffix(".json")
