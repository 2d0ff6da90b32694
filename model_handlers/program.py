"""One compiled program for each picture size, shared by everything that a worker generates."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from model_handlers import executables, metrics
from model_handlers import mesh as meshes
from model_handlers.executables import NoExecutableError
from model_handlers.recipe import ImageRequest
from model_handlers.stable_diffusion.model import Inputs, Loop, StableDiffusion, generate
from model_handlers.stable_diffusion.tokens import Tokens

log = logging.getLogger("lightmill")

# By platform; for each option a reason.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    # No fusion into YNNPACK: its 3 x 3 convolutions have 0.6 times the speed of Eigen's (AVX-512, jaxlib 0.10.2).
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
}


class CompileError(RuntimeError):
    """The program of a size does not compile: no record's fault, and no use in trying again."""


def trace(
    networks: tuple[nnx.GraphDef, nnx.State], inputs: Inputs, mesh: jax.sharding.Mesh, height: int, width: int
) -> jax.stages.Traced:
    """Traces the program of a size for the devices of a mesh, which need not be there: shapes are enough.

    Args:
      networks: `nnx.split` of the model's, of arrays or of shapes; either with their shardings.
      inputs: of a whole batch over all devices, likewise.
    """
    # Else the program's text, by which an executable is found, would say where the source of its kernels lies.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    definition, weights = networks

    def program(weights, inputs, loop):
        return generate(nnx.merge(definition, weights), inputs, loop, height=height, width=width)

    rows, on_all = shardings(mesh)
    # What is not used is kept, so that an executable that was loaded can be called by the program's own arguments.
    jitted = jax.jit(program, in_shardings=(None, rows, on_all), out_shardings=(rows, rows), keep_unused=True)
    with jax.set_mesh(mesh):  # by which a network knows what it is traced for, see `mesh.on_tpu`
        return jitted.trace(weights, inputs, jax.eval_shape(Loop.of, inputs))


def shardings(mesh: jax.sharding.Mesh) -> tuple[jax.sharding.NamedSharding, jax.sharding.NamedSharding]:
    """Where the program's inputs and outputs lie, and where the loop's data."""
    return meshes.sharding(mesh, "batch"), meshes.sharding(mesh)


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str | bool] | None:
    """What the compiler is told for the devices of a mesh."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)


class Programs:
    """A loaded model and its compiled programs over the local devices.

    Attributes:
      batch_size: rows of every call, over all devices.
      compiled: (height, width) in pixels to the compiled program.
      clock: how much of the time the devices have work.
    """

    def __init__(
        self,
        model: StableDiffusion,
        mesh: jax.sharding.Mesh,
        per_device_batch_size: int,
        executables_folder: str | None = None,
    ):
        """`executables_folder`, local or gs://, is where programs may lie that were compiled before."""
        self.batch_size = per_device_batch_size * meshes.ways("batch", mesh)
        self.compiled: dict[tuple[int, int], Callable[..., tuple[jax.Array, jax.Array]]] = {}
        self.clock = metrics.DeviceClock()
        self._model = model
        self._mesh = mesh
        self._networks = nnx.split(model.networks)
        self._executables_folder = executables_folder

    def prepare(self, requests: Sequence[ImageRequest]) -> tuple[Inputs, list[Tokens]]:
        """The host's part of a batch; see `StableDiffusion.prepare`."""
        return self._model.prepare(requests)

    def compile(self, height: int, width: int, like: Inputs) -> bool:
        """Makes sure that there is a program of a size, logs a new one, and returns whether it had to be compiled.

        `like` gives the shapes: steps and guidance are data, so any batch of this size will do.
        """
        if (height, width) in self.compiled:
            return False
        started = time.monotonic()
        try:
            lowered = trace(self._networks, like, self._mesh, height, width).lower()
            loaded = self._load(lowered)
            self.compiled[height, width] = loaded or lowered.compile(compiler_options(self._mesh))
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"{width} x {height} pixels at batch {self.batch_size}: {error}") from error
        seconds = time.monotonic() - started
        if not loaded:
            metrics.took("compile", seconds)
        log.info(
            "%s program %d: %d x %d pixels, batch %d on %d %s device(s), %.1f s",
            "loaded" if loaded else "compiled", len(self.compiled), width, height, self.batch_size, self._mesh.size,
            self._mesh.devices.flat[0].platform, seconds,
        )  # fmt: skip
        return not loaded

    def _load(self, lowered: jax.stages.Lowered) -> Callable[..., Any] | None:
        """The program as it was compiled before, if it is where executables are looked for."""
        if not self._executables_folder:
            return None
        rows, on_all = shardings(self._mesh)
        key = executables.key_of(lowered, self._mesh, compiler_options(self._mesh))
        out = [(info.shape, rows) for info in jax.tree.leaves(lowered.out_info)]
        try:
            call = executables.load(self._executables_folder, key, self._mesh.devices.flatten().tolist(), out)
        except NoExecutableError as error:
            log.warning("the program is compiled, since no executable fits: %s", error)
            return None
        return lambda weights, inputs, loop: call(weights, jax.device_put(inputs, rows), jax.device_put(loop, on_all))

    def __call__(self, inputs: Inputs, height: int, width: int) -> tuple[jax.Array, jax.Array]:
        """Starts a batch and returns at once: uint8 images (B, H, W, 3) and finite flags (B,), not yet computed."""
        return self.compiled[height, width](self._networks[1], inputs, Loop.of(inputs))
