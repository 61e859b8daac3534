"""A headless Chromium, driven over a pipe by its DevTools protocol, and the example page that it opens."""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "web"

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]
# Chromium reads commands from descriptor 3 and writes to descriptor 4.
LAUNCHER = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser that runs until `close`. messages: what the page wrote to its console, and its errors.

    asked: the addresses that the page requested.
    """

    def __init__(self, profile):
        commands, self._send = os.pipe()
        self._receive, answers = os.pipe()
        # Neither descriptor may be one that the launcher writes over before it has copied both.
        high = [os.dup2(end, 60 + index, inheritable=True) for index, end in enumerate((commands, answers))]
        command = [sys.executable, "-c", LAUNCHER, *map(str, high), find(), *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        for end in (commands, answers, *high):
            os.close(end)
        self._number, self._buffer, self._session = 0, b"", None
        self.messages, self.asked = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]

    def _next(self):
        """The next message; an event is noted."""
        while b"\0" not in self._buffer:
            read = os.read(self._receive, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        kind = message.get("method")
        if kind == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        elif kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(message["params"])
        elif kind == "Page.javascriptDialogOpening":
            self.messages.append(message["params"])
            self._number += 1
            closing = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._send, json.dumps({**closing, "sessionId": self._session}).encode() + b"\0")
        return message

    def open(self, url, width=1280, height=900, scheme="light"):
        """Load a page, forgetting what pages before it wrote and asked for."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")
        self.messages, self.asked = [], []
        self.call("Page.navigate", url=url)
        while self.value("document.readyState + location.protocol") != f"complete{url.partition(':')[0]}:":
            pass

    def value(self, expression):
        """What a JavaScript expression gives in the page, as JSON has it."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, expression):
        """Wait until a JavaScript expression is true, for at most 30 seconds. Returns milliseconds since navigation."""
        late = "setTimeout(() => done(0), 3e4)"
        look = f"const look = () => (({expression}) ? done(performance.now()) : setTimeout(look, 5)); look()"
        elapsed = self.value(f"new Promise((done) => {{ {late}; {look} }})")
        assert elapsed, f"not true within 30 seconds: {expression}"
        return elapsed

    def drop(self, name):
        """Drop a file of the page's own site on the page."""
        transfer = f"const dataTransfer = new DataTransfer(); dataTransfer.items.add(new File([blob], '{name}'))"
        event = "new DragEvent('drop', { dataTransfer, cancelable: true })"
        dropped = f"(blob) => {{ {transfer}; document.dispatchEvent({event}); }}"
        self.value(f"fetch('{name}').then((read) => read.blob()).then({dropped})")

    def close(self):
        os.close(self._send)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._receive)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP, and return its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def example_site(module: Path, folder: Path) -> Path:
    """Copy the example page and the module that CMake built to a new folder, and return the folder."""
    shutil.copytree(EXAMPLE, folder)
    for name in ("adalog.mjs", "adalog.wasm"):
        shutil.copy(module / name, folder)
    return folder
