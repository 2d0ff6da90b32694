"""Two runs never write into one output at a time, and a run that was killed is in nobody's way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import lock
from pipeline.options import UsageError

HOLD = """
import sys, time
from pipeline.lock import hold
with hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the output's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_with_a_line_that_names_the_first(holder, tmp_path):
    message = f"another run is writing into {tmp_path} .process {holder.pid} on "
    with pytest.raises(UsageError, match=message), lock.hold(str(tmp_path)):
        pass


def test_a_run_that_was_killed_is_in_nobodys_way(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with lock.hold(str(tmp_path)):
        assert json.loads((tmp_path / lock.FILE).read_text())["process"] == os.getpid()
    assert (tmp_path / lock.FILE).read_text() == ""
    with lock.hold(str(tmp_path)):
        pass
    assert [path.name for path in Path(tmp_path).iterdir()] == [lock.FILE]
