"""Ours against numbers that diffusers once gave: the part of the parity suite that needs no torch."""

import functools
from pathlib import Path

import numpy as np
import pytest

from tests import checkpoints
from tests.parity import cases, ours

GOLDEN = np.load(Path(cases.__file__).with_name("golden.npz"))
CASES = {case.name: case for case in cases.CASES if case.name in cases.GOLDEN}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Our outputs by name of case; the checkpoints are written here, from weights that their names give."""

    @functools.cache
    def outputs_of(name):
        case = CASES[name]
        root = checkpoints.write(case, tmp_path_factory.mktemp(name))
        refiner = checkpoints.write(case.refiner, tmp_path_factory.mktemp("refiner")) if case.refiner else None
        return ours.outputs(root, case, refiner=refiner)

    return outputs_of


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in CASES for what in ours.compared(CASES[name])])
def test_every_output_is_what_diffusers_gave(name, what, outputs):
    mine = cases.subsample(outputs(name)[what]).astype(np.float64)
    assert np.abs(mine - GOLDEN[f"{name} {what}"]).max() <= ours.LIMITS[what]


@pytest.mark.parametrize("name", CASES)
def test_pictures_are_rounded_to_the_nearest(name, outputs):
    mine = cases.subsample(outputs(name)["rounded"])
    assert np.mean(mine != GOLDEN[f"{name} rounded"]) <= ours.SHARE_ROUNDED_APART
