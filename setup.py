"""For Dataflow's --setup_file; everything is in pyproject.toml."""

from setuptools import setup

setup()
