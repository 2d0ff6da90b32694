"""Workers that are processes of their own, as Dataflow's are, and a model that notes where it is loaded."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.cloud import free_port
from tests.fakes import FakeHandler

KINDS = ("multi_processing", "external")


@contextlib.contextmanager
def workers(kind: str) -> Iterator[list[str]]:
    """Gives Beam's flags for workers in other processes: FnApiRunner's two, or one of a pool behind a job server."""
    if kind == "multi_processing":
        yield ["--runner=FnApiRunner", "--direct_running_mode=multi_processing", "--direct_num_workers=2"]
        return
    port = free_port()
    command = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]
    # It starts its workers as `python`, and the job waits for ever if there is none.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    pool = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _listens(port):
            assert pool.poll() is None
            time.sleep(0.1)
        place = [f"--environment_config=localhost:{port}", "--environment_type=EXTERNAL"]
        yield ["--runner=PortableRunner", "--job_endpoint=embed", *place]
    finally:
        os.killpg(pool.pid, signal.SIGKILL)  # its workers too
        pool.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


class NotingHandler(FakeHandler):
    """Notes each load of a model in a folder, and, if told so, kills its process once, in the middle of the run."""

    def __init__(self, folder: Path, kill: bool = False, **settings):
        super().__init__(**settings)
        self._folder, self._kill = str(folder), kill

    def load_model(self):
        Path(self._folder, f"load-{os.getpid()}-{uuid.uuid4().hex}").touch()
        return super().load_model()

    def run_inference(self, batch, model, inference_args=None):
        results = list(super().run_inference(batch, model, inference_args))
        time.sleep(0.05)  # so that another worker gets its share
        if self._kill and len(list(Path(self._folder, "out", "commits").glob("*.json"))) >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from results


def loads(folder: Path) -> list[int]:
    """The process of each load, which are then forgotten."""
    notes = list(folder.glob("load-*"))
    for note in notes:
        note.unlink()
    return [int(note.name.split("-")[1]) for note in notes]
