"""A real MLflow server on loopback, with a database and artifacts in a folder.

`mlflow-skinny` has the server's code; what it needs besides (Flask and a few more) is in the extra dev. The whole
`mlflow` cannot be installed beside what shoal pins: it wants an older pandas.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 120.0


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Have a server, and its address; ended at the end."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        _wait(address, process, folder / "server.log")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_port() -> int:
    """Return a port of loopback on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the MLflow server did not start: {log.read_text()[-2000:]}")
