"""Tests that compile for TPUs, on any machine that has libtpu."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, TPU's compiler, is not installed: pip install '.[tpu]'"
)
