"""A server's processes are all of its session, and all of them end."""

import signal
import sys

import pytest

from benchmarks.server_process import ServerError, ServerProcess


def test_processes_are_counted_and_ended() -> None:
    server = ServerProcess([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '600']).wait()"])
    try:
        server.wait_until(lambda: len(server.processes()) == 2, 60)
        with pytest.raises(ServerError, match="not ready after 0 s"):
            server.wait_until(lambda: False, 0.0)
    finally:
        status, killed = server.stop(timeout_s=0.5)
    assert (status, len(killed)) == (-signal.SIGTERM, 1)
    assert server.processes() == []
