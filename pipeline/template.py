"""The Flex Template: what its launcher runs, which is `generate`, and metadata.json, which is the flags of `generate`.

python -c "from pipeline.template import metadata; print(metadata())" > pipeline/metadata.json
"""

import argparse
import json
import sys

from pipeline.__main__ import main
from pipeline.options import SETTINGS, add_generate_flags

# Of Beam's own flags those that a job cannot do without; the others are in the launch request's environment.
_OF_BEAM = {
    "sdk_container_image": ("the image of the workers, built by docs/dataflow.md", False, ".+"),
    "worker_zone": ("of the TPU or GPU, in the region of the job; required with --tpu", True, "[a-z0-9]+(-[a-z0-9]+)+"),
}
_ON_CLOUD_STORAGE = ("input", "output", "jax_cache_dir", "executables")
# What follows from --tpu or --gpu.
_LEFT_OUT = ("device", "devices_per_worker")


def metadata() -> str:
    """The text of metadata.json: every flag of `generate` that takes one value, with its help as description.

    Its format: https://docs.cloud.google.com/dataflow/docs/guides/templates/configuring-flex-templates
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_generate_flags(parser)
    parameters = [
        _parameter(action.dest, str(action.help), not action.required, _pattern(action))
        for action in parser._actions
        if (action.nargs is None or action.dest == "input") and action.dest not in _LEFT_OUT
    ]
    parameters += [_parameter(name, *rest) for name, rest in _OF_BEAM.items()]
    described = {
        "name": "Lightmill",
        "description": "Makes a picture of every prompt of a file, or goes on where an earlier run stopped.",
        "parameters": parameters,
    }
    return json.dumps(described, indent=2, ensure_ascii=False)


def _parameter(name: str, help_text: str, optional: bool, pattern: str) -> dict[str, object]:
    return {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "helpText": help_text,
        "isOptional": optional,
        "regexes": [f"^({pattern})$"],
    }


def _pattern(action: argparse.Action) -> str:
    """What the service lets through to the launcher; the flag itself is stricter, and says why."""
    if action.choices:
        return "|".join(str(choice) for choice in action.choices)
    if action.dest in _ON_CLOUD_STORAGE:
        return "gs://.+"
    return r"[0-9]+([.][0-9]+)?" if action.type and action.dest not in (*SETTINGS, "mesh") else ".+"


if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
