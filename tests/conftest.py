"""What tests of several folders share: a small real checkpoint."""

import pytest

from model_handlers.topologies import quiet_libtpu
from tests import checkpoints

quiet_libtpu()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Nothing is left in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIGHTMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A checkpoint folder of `checkpoints.TINY`, written once; not to be changed."""
    return checkpoints.write(checkpoints.TINY, tmp_path_factory.mktemp("checkpoint"))
