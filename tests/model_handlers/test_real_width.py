"""SDXL base 1.0 and its forerunners, as shapes only: the published number of parameters under the published names."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from model_handlers import checkpoint
from model_handlers.samplers import SchedulerConfig
from model_handlers.stable_diffusion.model import Configs, Networks, _one_key
from model_handlers.stable_diffusion.text import TextConfig
from model_handlers.stable_diffusion.unet import UNetConfig
from model_handlers.stable_diffusion.vae import VAEConfig
from model_handlers.tensors import Tensor, renamed
from tests import layouts
from tests.parity import cases

PARAMETERS = {
    ("sdxl", "text_encoder"): 123_060_480,
    ("sdxl", "text_encoder_2"): 694_659_840,
    ("sdxl", "unet"): 2_567_463_684,
    ("sdxl", "vae"): 83_653_863,
    ("sd_1", "text_encoder"): 123_060_480,
    ("sd_1", "unet"): 859_520_964,
    ("sd_1", "vae"): 83_653_863,
    ("sd_2", "text_encoder"): 340_387_840,
    ("sd_2", "unet"): 865_910_724,
    ("sd_2", "vae"): 83_653_863,
}
# Of UNet, VAE and text encoders, the latter with position_ids or logit_scale, and with q, k and v of OpenCLIP in one.
IN_ONE_FILE = {"sdxl": 1680 + 248 + 197 + 390, "sd_1": 686 + 248 + 197, "sd_2": 686 + 248 + 281}
# Counted by the reference's own classes on torch's meta device, see tests/parity/reference.py.
REFERENCE = json.loads(Path(cases.__file__).with_name("real_width.json").read_text())


@pytest.fixture(scope="module")
def networks():
    kinds = {"text_encoder": TextConfig, "text_encoder_2": TextConfig, "unet": UNetConfig, "vae": VAEConfig}
    made = {}
    for release, settings in cases.RELEASES.items():
        configs = {name: kind.read(settings[name], name) if name in settings else None for name, kind in kinds.items()}
        configs = Configs(**configs, scheduler=SchedulerConfig(), force_zeros_for_empty_prompt=True)
        made[release] = nnx.eval_shape(lambda configs=configs: Networks(configs, _one_key(), param_dtype="bfloat16"))
    return made


@pytest.mark.parametrize(("release", "name"), PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(release, name, networks):
    shapes = checkpoint.tensor_shapes(getattr(networks[release], name))
    assert sum(map(math.prod, shapes.values())) == PARAMETERS[release, name]
    assert REFERENCE[release][name]["parameters"] == PARAMETERS[release, name]


@pytest.mark.parametrize(("release", "name"), PARAMETERS)
def test_tensors_have_the_references_names_and_shapes(release, name, networks):
    shapes = checkpoint.tensor_shapes(getattr(networks[release], name))
    assert len(shapes) == REFERENCE[release][name]["tensors"]
    assert cases.digest(shapes) == REFERENCE[release][name]["digest"]


@pytest.mark.parametrize("release", cases.RELEASES)
def test_every_tensor_of_a_releases_single_file_is_read_once(release, networks):
    shapes = {name: checkpoint.tensor_shapes(getattr(networks[release], name)) for name in cases.RELEASES[release]}
    blank = {
        name: {tensor: np.broadcast_to(np.int8(0), shape) for tensor, shape in of_network.items()}
        for name, of_network in shapes.items()
    }
    file = layouts.original(blank, release, layers_per_block=2)
    assert len(file) == IN_ONE_FILE[release]
    tensors = {name: Tensor(value.shape, lambda value=value: value) for name, value in file.items()}
    for name, of_network in shapes.items():
        network = getattr(networks[release], name)
        found = network.from_original(tensors)
        renames = getattr(type(network), "RENAMES", ())
        assert {new: tensor.shape for old, tensor in found.items() if (new := renamed(old, renames))} == of_network
