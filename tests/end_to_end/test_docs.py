"""The commands of docs/ do what the pages say: the shell blocks of each are run, top to bottom, in an empty folder.

A block marked ```sh cloud needs an account and is not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import REPOSITORY

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {page.stem: BLOCK.findall(page.read_text()) for page in sorted(REPOSITORY.glob("docs/*.md"))}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """JAX's compilation cache, so that the pages do not each compile the same program."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_every_command_of_a_page_works(page, tmp_path, cache):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    script = "\n".join(PAGES[page])
    finished = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, f"{finished.stdout[-2000:]}\n{finished.stderr[-2000:]}"


def test_the_pages_have_commands_to_run():
    assert sum(map(len, PAGES.values())) > 5
