"""Engines that end with the test that starts them, and loads in small pieces."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import make_engine
from transom_worker.engine.engine import Engine
from transom_worker.kvcache.blocks import block_copies

Start = Callable[..., Engine]


@pytest.fixture
def one_block_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are made in pieces of one block, of which one is in flight."""
    monkeypatch.setattr(block_copies, "PIECE_S", 0.0)
    monkeypatch.setattr(block_copies, "WINDOW_S", 1e-12)
    monkeypatch.setattr(block_copies, "STEPS_IN_WINDOW", 0.0)


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Start]:
    """Starts engines of the tiny model, or of another one, with the settings of `make_engine`."""
    with ExitStack() as engines:

        def start_engine(model: Path = tiny_model, **settings: Any) -> Engine:
            engine = make_engine(str(model), **settings)
            engines.callback(engine.shutdown)
            return engine

        yield start_engine
