"""The worker image, as far as it goes without an engine that builds images: each command in a folder of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import dataflow, template
from tests.end_to_end.command import REPOSITORY

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
LOCKED = dict(line.split("==") for line in (REPOSITORY / "requirements.lock").read_text().split())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """The image's working folder after the Dockerfile's COPY commands, and the package installed from it alone."""
    folder = tmp_path_factory.mktemp("image")
    for command in instructions("COPY"):
        if command.startswith("--from"):
            continue
        *sources, target = command.split()
        for source in (path for pattern in sources for path in sorted(REPOSITORY.glob(pattern))):
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / target, ignore=ignored, dirs_exist_ok=True)
            else:
                Path(folder, target).mkdir(exist_ok=True)
                shutil.copy(source, folder / target)
    quick = ["--no-deps", "--quiet", "--disable-pip-version-check"]  # what the package needs is here
    subprocess.run([sys.executable, "-m", "pip", "install", *quick, "--target=installed", "."], cwd=folder, check=True)
    return folder


def test_what_is_copied_suffices_to_install_and_to_make_a_picture(image):
    (command,) = (command for command in instructions("RUN") if command.startswith("lightmill"))
    # Beside the package only what pip installed for the tests, and not this repository.
    code = f"import sys; sys.path[:0] = ['{image}/installed']; from pipeline.__main__ import main; sys.exit(main())"
    finished = subprocess.run(
        [sys.executable, "-P", "-c", code, *command.split()[1:]], cwd=image, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"^selftest: a picture of 64 x 64 in .* on 1 x cpu", finished.stdout, re.MULTILINE)


def test_the_launcher_takes_parameters_as_flags_of_generate(image):
    environment = os.environ | {"PYTHONPATH": f"{image}/installed"}
    command = [sys.executable, image / "launcher/template.py", "--input=gs://b/a.csv", "--output=gs://b/o", "--tpu=v9"]
    finished = subprocess.run(command, cwd=image, env=environment, capture_output=True, text=True)
    assert finished.returncode == 2 and "--tpu: invalid choice: 'v9'" in finished.stderr


def test_the_image_has_the_versions_of_the_lock_file(image):
    assert re.search(r"^FROM apache/beam_python3\.11_sdk:(\S+)$", DOCKERFILE, re.MULTILINE)[1] == LOCKED["apache-beam"]
    (command,) = (command for command in instructions("RUN") if command.startswith("pip"))
    assert "--constraint requirements.lock" in command and (image / "requirements.lock").exists()
    assert LOCKED.keys() >= {"jax", "jaxlib", "libtpu"}


def test_paths_in_the_image_are_those_that_the_program_names(image):
    (folder,) = instructions("WORKDIR")
    (launched,) = re.findall(r"^ENV FLEX_TEMPLATE_PYTHON_PY_FILE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert (image / Path(launched).relative_to(folder)).read_text() == Path(template.__file__).read_text()
    assert (image / Path(dataflow.BAKED_CHECKPOINT).relative_to(folder)).is_dir()


def test_everything_that_is_copied_passes_the_ignore_file():
    allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source.rstrip("*").split("/")[0]
        for command in instructions("COPY")
        if not command.startswith("--from")
        for source in command.split()[:-1]
    }
    assert copied == allowed
