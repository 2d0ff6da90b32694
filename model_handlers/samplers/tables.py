"""What the device knows of a sampler: for each evaluation of the network a timestep and one linear map.

Once its schedule is fixed, every sampler here is linear in the current latents, in what it remembers of earlier steps,
in the network's output and in fresh noise. So a sampler is a function on the host that writes its paper's formulas over
the basis vectors below, in float64, and the device applies the matrices without knowing which sampler they are of.
Axes: B batch, E evaluations of the network, K slots, h and w latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.config import ConfigError

if TYPE_CHECKING:  # the graph, which plans with these tables, runs without JAX
    import jax

# Length of the tables on the device, which is part of the program's shape.
MAX_EVALUATIONS = 1000
SLOTS = 4
# A linear combination of the slots, the network's output and noise: coefficients (K + 2,).
Vector = np.ndarray
# X is the slot that the network sees next; the others are a sampler's own memory, zero at first.
X, *MEMORY, OUTPUT, NOISE = np.eye(SLOTS + 2)


@dataclass(frozen=True)
class Tables:
    """A sampler with its schedule.

    Attributes:
      timesteps: (E,), what the network is told.
      sigmas: (E,), noise in the latents over signal in them, before each evaluation.
      input_scale: (E,), what the latents are multiplied by before the network sees them.
      updates: (E, K, K + 2), from slots, output and noise to the next slots.
      init_noise_sigma: standard deviation of the latents that sampling starts from.
    """

    timesteps: np.ndarray
    sigmas: np.ndarray
    input_scale: np.ndarray
    updates: np.ndarray
    init_noise_sigma: float = 1.0

    def __len__(self) -> int:
        return len(self.timesteps)

    def __getitem__(self, part: slice) -> Tables:
        """Some of the evaluations."""
        arrays = self.timesteps[part], self.sigmas[part], self.input_scale[part], self.updates[part]
        return Tables(*arrays, self.init_noise_sigma)


def make_tables(
    timesteps: np.ndarray,
    sigmas: np.ndarray,
    updates: Sequence[Sequence[Vector]],
    input_scale: np.ndarray | float = 1.0,
    init_noise_sigma: float = 1.0,
) -> Tables:
    """Stacks one list of vectors for each evaluation: the next latents, then what is to be remembered.

    Raises:
      ConfigError: a coefficient is not finite, where the formulas divide by the signal or the noise and there is none.
    """
    stacked = np.zeros((len(updates), SLOTS, SLOTS + 2))
    for slots, vectors in zip(stacked, updates, strict=True):
        slots[: len(vectors)] = vectors
    if not (np.isfinite(stacked).all() and np.isfinite(init_noise_sigma)):
        raise ConfigError(f"{len(timesteps)} evaluations of this schedule divide by zero with these options")
    return Tables(timesteps, sigmas, np.broadcast_to(input_scale, (len(updates),)), stacked, float(init_noise_sigma))


def advance(slots: jax.Array, updates: jax.Array, output: jax.Array, noise: jax.Array) -> jax.Array:
    """The slots (B, K, h, w, C) after an evaluation, given each row's matrix (B, K, K + 2), output and noise.

    A sum of products and not a matrix product, which some devices round to bfloat16.
    """
    from_ = [*(slots[:, k] for k in range(SLOTS)), output, noise]
    weights = updates[..., None, None, None]
    return sum(weights[:, :, j] * vector[:, None] for j, vector in enumerate(from_))  # type: ignore[return-value]
