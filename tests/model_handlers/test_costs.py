"""A loop costs as often as it runs what its body costs, on the CPU and, where libtpu is installed, for a TPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from model_handlers import mesh as meshes
from model_handlers import topologies
from model_handlers.costs import CostError, Costs, Model, Work, matmul_flops
from model_handlers.topologies import CHIPS, chip_of
from tests.topologies import needs_libtpu

LAYERS, ROWS, WIDTH = 7, 256, 512
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # operations of one layer, on one device


def layer(x, weights):
    return jnp.tanh(x @ weights) + 1


def scanned(x, weights, counts):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def unrolled(x, weights, counts):
    for i in range(LAYERS):
        x = layer(x, weights[i])
    return x


def in_loops(x, weights, counts):
    """A loop in a loop, each with a number of trips that only the data says, around the scan."""
    once = jax.lax.fori_loop(0, counts[1], lambda _, x: scanned(x, weights, counts), x)
    return once + jax.lax.fori_loop(
        0, counts[0], lambda _, x: jax.lax.fori_loop(0, counts[1], lambda _, x: scanned(x, weights, counts), x), x
    )


def convolved(x, weights, counts):
    kernel = jnp.stack([weights[:3]] * 3)
    pictures = x.reshape(-1, 16, ROWS // 16, WIDTH)
    labels = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(pictures, kernel, (1, 1), "SAME", dimension_numbers=labels).reshape(x.shape)


@pytest.fixture(params=["cpu", pytest.param("v5e:2x2", marks=needs_libtpu)])
def topology(request):
    return request.param


@functools.cache
def compiled(function, topology):
    """The program, traced and compiled, for one device or as many that each do the same."""
    mesh = meshes.make_mesh(topologies.devices_of(topology))
    rows, on_all = meshes.sharding(mesh, "batch"), meshes.sharding(mesh)
    shapes = (
        jax.ShapeDtypeStruct((mesh.size * ROWS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    traced = jax.jit(function, in_shardings=(rows, on_all, on_all), out_shardings=rows).trace(*shapes)
    return traced, traced.lower().compile()


def cost(function, topology, trips=()):
    return Costs(compiled(function, topology)[1], chip_of(topology))(trips)


def test_a_scan_costs_what_its_body_does_written_out(topology):
    in_a_scan, written_out = cost(scanned, topology), cost(unrolled, topology)
    assert written_out.flops == pytest.approx(LAYERS * PRODUCT, rel=0.05)  # and what tanh takes
    assert in_a_scan.flops == pytest.approx(written_out.flops, rel=0.02)
    # Each reads the weights once; where a layer's result lies meanwhile is the compiler's choice.
    assert in_a_scan.bytes > 2 * LAYERS * WIDTH * WIDTH
    assert 0.9 < in_a_scan.bytes / written_out.bytes < 2.5


def test_loops_whose_number_of_trips_is_data_cost_what_the_caller_says(topology):
    costs = Costs(compiled(in_loops, topology)[1], chip_of(topology))
    assert costs((0, 0)).flops < PRODUCT
    # The loop that stands alone runs as often as an outermost one.
    once = costs((1, 1))
    assert once.flops == pytest.approx(2 * LAYERS * PRODUCT, rel=0.05)
    assert costs((20, 2)).flops == pytest.approx((20 + 20 * 2) * LAYERS * PRODUCT, rel=0.05)
    if chip_of(topology):
        assert costs((20, 2)).seconds == pytest.approx(30 * once.seconds, rel=0.1)


def test_a_loop_of_which_nobody_says_how_often_it_runs_is_an_error(topology):
    traced, program = compiled(in_loops, topology)
    with pytest.raises(CostError, match="how often it runs"):
        Costs(program, chip_of(topology))((20,))
    with pytest.raises(CostError, match="how often it runs"):
        matmul_flops(traced.jaxpr, (20,))


def test_without_loops_the_figures_are_the_compilers_own(topology):
    _, program = compiled(unrolled, topology)
    analysis = program.cost_analysis()
    work = Costs(program, chip_of(topology))(())
    assert (work.flops, work.bytes) == pytest.approx((analysis["flops"], analysis["bytes accessed"]))
    if chip_of(topology):
        assert work.seconds == pytest.approx(analysis["optimal_seconds"])


@pytest.mark.parametrize("function", [scanned, unrolled, in_loops, convolved])
def test_the_model_of_an_instruction_is_the_compilers(function, topology):
    """What is scaled comes near before it is scaled, or the ratio would mean little."""
    _, program = compiled(function, topology)
    analysis, ours = program.cost_analysis(), Model(program.as_text(), chip_of(topology)).work(None)
    assert ours.bytes == pytest.approx(analysis["bytes accessed"], rel=0.1)
    assert ours.flops == pytest.approx(analysis["flops"], rel=0.1)
    if chip_of(topology):
        assert ours.seconds == pytest.approx(analysis["optimal_seconds"], rel=0.25)  # at 0.9 of the bandwidth


def branching(x, weights, counts):
    return jax.lax.cond(counts[0] > 0, lambda: unrolled(x, weights, counts), lambda: layer(x, weights[0]))


@pytest.mark.parametrize(
    ("function", "trips", "flops"),
    [
        (scanned, (), LAYERS * PRODUCT),
        (unrolled, (), LAYERS * PRODUCT),
        (in_loops, (20, 2), (20 + 20 * 2) * LAYERS * PRODUCT),
        (branching, (), LAYERS * PRODUCT),  # the longer branch
        (convolved, (), 9 * PRODUCT),
    ],
)
def test_the_products_of_a_traced_program_are_counted_exactly(function, trips, flops):
    assert matmul_flops(compiled(function, "cpu")[0].jaxpr, trips) == flops


# As libtpu 0.0.42.1 writes it: a call that its estimate takes for minus a second, and a kernel with a cost_estimate.
TEXT = """
ENTRY %main.1 (a.1: f32[8,64]) -> f32[8,64] {
  %a.1 = f32[8,64]{1,0:T(8,128)} parameter(0)
  %call.1 = f32[8,64]{1,0:T(8,128)} custom-call(%a.1), custom_call_target="ConcatBitcast"
  ROOT %call.2 = f32[8,64]{1,0:T(8,128)} custom-call(%call.1), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUz(","cost_estimate":{"flops":"394000","bytes_accessed":"819"}}}
}
"""


class Compiled:
    """What `Costs` needs of a compiled program."""

    def as_text(self):
        return TEXT

    def cost_analysis(self):
        return {"flops": 394000.0, "bytes accessed": 819.0, "optimal_seconds": 2e-9 - 1}


def test_a_kernel_costs_what_its_estimate_says_and_a_call_that_is_unknown_nothing():
    assert Model(TEXT, CHIPS["v5e"]).work(None) == Work(394000, 819, 394000 / 197e12)
    costs = Costs(Compiled(), CHIPS["v5e"])
    assert costs.unknown_calls == 1
    assert costs(()).seconds == pytest.approx(2e-9)
