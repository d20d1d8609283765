"""A file server over HTTP whose faults are to order: it counts what is read, sends wrong bytes, and waits when told.

python -m tests.data.stage.file_server ROOT HOST [--wrong NAME ...]     prints its port, and counts when asked to end
"""

import argparse
import contextlib
import http.server
import json
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0


class FileServer(http.server.ThreadingHTTPServer):
    """Serves the folder `root` on `host`."""

    daemon_threads = True

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.root = root
        self.lock = threading.Lock()
        self.read_bytes: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        """How often a file is still to be sent with one byte of its middle changed."""
        self.gates: dict[str, threading.Event] = {}
        """A file that has one is sent up to its middle, and on when the event is set."""
        self.moved: dict[str, str] = {}
        """Where a file is instead."""
        self.queries: set[str] = set()
        """Those of all that were asked for."""
        self.reached = threading.Event()
        """Set when a gate has been reached."""

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: those who ask may be killed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        asked = urllib.parse.urlsplit(self.path)
        name = asked.path.lstrip("/")
        self.server.queries.add(asked.query)
        if name in self.server.moved:
            self.send_response(302)
            self.send_header("Location", self.server.moved[name])
            self.end_headers()
            return
        path = self.server.root / name
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.flush()
        is_wrong = self.server.wrong[name] > 0
        self.server.wrong[name] -= is_wrong
        with path.open("rb") as file:
            self._send(file, name, 0, size // 2)
            if (gate := self.server.gates.get(name)) is not None:
                self.server.reached.set()
                gate.wait(_TIMEOUT_S)
            if is_wrong:
                file.seek(size // 2)
                self.connection.sendall(bytes([file.read(1)[0] ^ 1]))
            self._send(file, name, size // 2 + is_wrong, size)

    def _send(self, file: Any, name: str, begin: int, end: int) -> None:
        if end > begin:
            count = self.connection.sendfile(file, begin, end - begin)
            with self.server.lock:
                self.server.read_bytes[name] += count

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def serving(root: Path, host: str = "127.0.0.1") -> Iterator[FileServer]:
    """Serve `root` for the length of a `with` block."""
    server = FileServer(root, host)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        for gate in server.gates.values():
            gate.set()
        server.shutdown()
        thread.join(_TIMEOUT_S)
        server.server_close()


def main() -> None:
    """Serve until standard input ends; then print what was read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("host")
    parser.add_argument("--wrong", nargs="*", default=[])
    options = parser.parse_args()
    with serving(options.root, options.host) as server:
        server.wrong.update(options.wrong)
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()
        print(json.dumps(server.read_bytes), flush=True)


if __name__ == "__main__":
    main()
