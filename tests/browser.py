"""A real browser for tests of the page: headless Chromium, spoken to over a pipe, so no port and no library.

The protocol is DevTools': JSON messages, each ended by a NUL, into file descriptor 3 and out of 4.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One tab."""

    def __init__(self, to: int, back: int):
        self._to, self._back = to, os.fdopen(back, "rb")
        self._number = 0
        self._waiting: dict[str, list] = {}
        tab = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.call("Page.enable")

    def open(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Shows a local page in a window of that size, and returns when all of it is loaded."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol to the tab, and its result."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._back.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a profile of its own and ends it."""
    assert CHROMIUM
    (theirs, ours), (back, answers) = os.pipe(), os.pipe()
    flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    # bash puts the pipes where Chromium expects them; sh need not know descriptors of two digits.
    moved = [
        "bash",
        "-c",
        f'exec "$@" 3<&{theirs} 4>&{answers}',
        "bash",
        CHROMIUM,
        *flags,
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(moved, pass_fds=(theirs, answers), stderr=subprocess.DEVNULL)
    os.close(theirs)
    os.close(answers)
    try:
        yield Browser(ours, back)
    finally:
        os.close(ours)  # upon which Chromium ends by itself
        process.wait(timeout=60)
