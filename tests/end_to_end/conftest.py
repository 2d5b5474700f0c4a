"""One demo server for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server import Server, assert_ended_cleanly, start_server, stop_server


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, in fp32 so that texts can be compared, with an API key-free default set-up."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = start_server("smollm2", log, "--dtype", "float32", "--kv-cache-memory-bytes", "512MiB")
    yield server
    assert_ended_cleanly(server, stop_server(server))  # Ctrl-C
