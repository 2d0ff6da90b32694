"""One compiled program for each picture size, shared by everything that a worker generates."""

import logging
import time
from collections.abc import Sequence

import jax
from flax import nnx

from model_handlers import mesh as meshes
from model_handlers import metrics
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


class Programs:
    """A loaded model and its compiled programs over the local devices.

    Attributes:
      batch_size: rows of every call, over all devices.
      compiled: (height, width) in pixels to the compiled program.
      clock: how much of the time the devices have work.
    """

    def __init__(self, model: StableDiffusion, mesh: jax.sharding.Mesh, per_device_batch_size: int):
        self.batch_size = per_device_batch_size * mesh.size
        self.compiled: dict[tuple[int, int], jax.stages.Compiled] = {}
        self.clock = metrics.DeviceClock()
        self._model = model
        self._mesh = mesh
        self._networks = nnx.split(model.networks)

    def prepare(self, requests: Sequence[ImageRequest]) -> tuple[Inputs, list[Tokens]]:
        """The host's part of a batch; see `StableDiffusion.prepare`."""
        return self._model.prepare(requests)

    def compile(self, height: int, width: int, like: Inputs) -> bool:
        """Compiles the program of a size if it is new, logs it, and returns whether it was.

        `like` gives the shapes: steps and guidance are data, so any batch of this size will do.
        """
        if (height, width) in self.compiled:
            return False
        started = time.monotonic()
        definition, weights = self._networks
        rows, rows_of_two = (meshes.sharding(self._mesh, *axes) for axes in (("batch",), (None, "batch")))
        by_row = Inputs(*(rows_of_two if name in ("ids", "negative_ids") else rows for name in Inputs._fields))

        def program(weights, inputs, loop):
            return generate(nnx.merge(definition, weights), inputs, loop, height=height, width=width)

        on_all = meshes.sharding(self._mesh)
        jitted = jax.jit(program, in_shardings=(None, by_row, on_all), out_shardings=(rows, rows))
        try:
            lowered = jitted.lower(weights, like, Loop.of(like))
            self.compiled[height, width] = lowered.compile(COMPILER_OPTIONS.get(jax.default_backend()))
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"{width} x {height} pixels at batch {self.batch_size}: {error}") from error
        seconds = time.monotonic() - started
        metrics.took("compile", seconds)
        log.info(
            "compiled program %d: %d x %d pixels, batch %d on %d %s device(s), %.1f s",
            len(self.compiled), width, height, self.batch_size, self._mesh.size, jax.default_backend(), seconds,
        )  # fmt: skip
        return True

    def __call__(self, inputs: Inputs, height: int, width: int) -> tuple[jax.Array, jax.Array]:
        """Starts a batch and returns at once: uint8 images (B, H, W, 3) and finite flags (B,), not yet computed."""
        return self.compiled[height, width](self._networks[1], inputs, Loop.of(inputs))
