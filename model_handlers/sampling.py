"""How one request is sampled: its sampler's tables, and which evaluations of the network are guided.

Decided on the host and from the request alone. Guidance is a second pass of the whole batch, so requests with the same
answer share one: a neighbour's would cost a request time, though no bits.
"""

import numpy as np

from model_handlers import samplers
from model_handlers.recipe import ImageRequest, Settings
from model_handlers.samplers import MAX_EVALUATIONS, SchedulerConfig, Steps, Tables

NEVER, ALWAYS = (0, 0), (0, MAX_EVALUATIONS)


def tables_of(num_inference_steps: int, settings: Settings, sampler: SchedulerConfig) -> Tables:
    """The sampler's tables for a request; raises ConfigError if it has none, with the setting that it does not take."""
    return samplers.tables(sampler, Steps(num_inference_steps, settings.timesteps, settings.sigmas, settings.eta))


def guided(request: ImageRequest, sampler: SchedulerConfig) -> tuple[int, int]:
    """The first evaluation that is guided, and the first one after them; `MAX_EVALUATIONS` if all that follow are.

    Guidance is a second evaluation, of the negative prompt. It is left out up to a scale of 1 and outside of
    guidance_interval, which is one range since noise levels only fall. What lies behind the last evaluation does not
    count, so that numbers of steps do not part requests which are guided to the end.
    """
    if request.guidance_scale <= 1:
        return NEVER
    if request.settings.guidance_interval is None:
        return ALWAYS
    low, high = request.settings.guidance_interval
    sigmas = tables_of(request.num_inference_steps, request.settings, sampler).sigmas
    inside = np.flatnonzero((low < sigmas) & (sigmas <= high))
    if not len(inside):
        return NEVER
    last = int(inside[-1]) + 1
    return int(inside[0]), MAX_EVALUATIONS if last == len(sigmas) else last
