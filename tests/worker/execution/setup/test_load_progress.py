"""A rank that downloads its model reports progress."""

from __future__ import annotations

import threading

import pytest

from transom_worker.execution.setup import load_progress
from transom_worker.execution.setup.load_progress import fetch_with_progress


def test_a_long_download_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "PERIOD_S", 0.01)
    told, told_twice = [], threading.Event()

    def tell(share: float, num_bytes: int) -> None:
        told.append((share, num_bytes))
        if len(told) == 2:
            told_twice.set()

    assert fetch_with_progress(lambda: told_twice.wait(120), tell)
    assert told[:2] == [(0.0, 0)] * 2


def test_an_error_of_the_download_is_raised() -> None:
    def fail() -> None:
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        fetch_with_progress(fail, lambda share, num_bytes: None)
