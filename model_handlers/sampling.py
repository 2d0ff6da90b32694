"""How one request is sampled: its samplers' tables, and which evaluations of the network are guided.

Decided on the host and from the request alone. Guidance is a second pass of the whole batch, so requests with the same
answer share one: a neighbour's would cost a request time, though no bits.
"""

import numpy as np

from model_handlers import samplers
from model_handlers.recipe import ImageRequest, Settings
from model_handlers.samplers import MAX_EVALUATIONS, SchedulerConfig, Steps, Tables

# The sampler of each stage: the checkpoint's and, if there is one, its refiner's.
Sampler = tuple[SchedulerConfig, ...]
# Behind the last evaluation of the last stage.
END = 2 * MAX_EVALUATIONS
NEVER, ALWAYS = (0, 0), (0, END)


def tables_of(num_inference_steps: int, settings: Settings, sampler: Sampler) -> tuple[Tables, ...]:
    """The tables of each stage for a request.

    Raises:
      ConfigError: a sampler has none, with the setting that it does not take.
    """
    steps = Steps(num_inference_steps, settings.timesteps, settings.sigmas, settings.eta)
    if len(sampler) == 1:
        return (samplers.tables(sampler[0], steps),)
    base, refiner = sampler
    share = settings.denoising_end
    return samplers.tables_until(base, steps, share), samplers.tables_from(refiner, steps, share)


def guided(request: ImageRequest, sampler: Sampler) -> tuple[int, int]:
    """The first evaluation that is guided, and the first one after them, of both stages; `END` if all that follow are.

    Guidance is a second evaluation, of the negative prompt. It is left out up to a scale of 1 and outside of
    guidance_interval, which is one range since noise levels only fall. What lies behind the last evaluation does not
    count, so that numbers of steps do not part requests which are guided to the end.
    """
    if request.guidance_scale <= 1:
        return NEVER
    if request.settings.guidance_interval is None:
        return ALWAYS
    low, high = request.settings.guidance_interval
    tables = tables_of(request.num_inference_steps, request.settings, sampler)
    sigmas = np.concatenate([of_stage.sigmas for of_stage in tables])
    inside = np.flatnonzero((low < sigmas) & (sigmas <= high))
    if not len(inside):
        return NEVER
    last = int(inside[-1]) + 1
    return int(inside[0]), END if last == len(sigmas) else last
