"""SDXL base 1.0, as shapes only: the published number of parameters under the published names."""

import json
import math
from pathlib import Path

import pytest
from flax import nnx

from model_handlers import checkpoint
from model_handlers.samplers import SchedulerConfig
from model_handlers.stable_diffusion.model import NETWORKS, Configs, Networks
from model_handlers.stable_diffusion.text import TextConfig
from model_handlers.stable_diffusion.unet import UNetConfig
from model_handlers.stable_diffusion.vae import VAEConfig
from tests.parity import cases

PARAMETERS = {
    "text_encoder": 123_060_480,
    "text_encoder_2": 694_659_840,
    "unet": 2_567_463_684,
    "vae": 83_653_863,
}
# Counted by the reference's own classes on torch's meta device, see tests/parity/reference.py.
REFERENCE = json.loads(Path(cases.__file__).with_name("real_width.json").read_text())


@pytest.fixture(scope="module")
def networks():
    kinds = {"text_encoder": TextConfig, "text_encoder_2": TextConfig, "unet": UNetConfig, "vae": VAEConfig}
    configs = {name: kind.read(cases.SDXL_BASE[name], name) for name, kind in kinds.items()}
    configs = Configs(**configs, scheduler=SchedulerConfig(), force_zeros_for_empty_prompt=True)
    return nnx.eval_shape(lambda: Networks(configs, nnx.Rngs(0), param_dtype="bfloat16"))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_number_of_parameters_is_the_published_one(name, networks):
    shapes = checkpoint.tensor_shapes(getattr(networks, name))
    assert sum(map(math.prod, shapes.values())) == PARAMETERS[name] == REFERENCE[name]["parameters"]


@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_have_the_references_names_and_shapes(name, networks):
    shapes = checkpoint.tensor_shapes(getattr(networks, name))
    assert len(shapes) == REFERENCE[name]["tensors"]
    assert cases.digest(shapes) == REFERENCE[name]["digest"]
