"""What end-to-end tests share: a demo server, and threads for a real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.end_to_end.server import API_KEY, Server, assert_ended_cleanly, start_server, stop_server


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model behind an API key, in fp32 so that texts can be compared."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = start_server(
        "smollm2", log, "--dtype", "float32", "--kv-cache-memory-bytes", "512MiB", "--api-key", API_KEY
    )
    yield server
    assert_ended_cleanly(server, stop_server(server))  # Ctrl-C


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Of torch, for a module that computes with a real model; other tests have `cpu_threads.NUM_THREADS`."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
