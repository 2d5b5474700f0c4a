"""What a worker chooses when it knows its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transom_core.settings.settings import Settings
from transom_worker.engine.startup import resolve_steps_in_flight


@pytest.mark.parametrize(
    ("settings", "has_gpu", "expected"),
    [
        ({}, False, 1),
        ({}, True, 2),
        ({"device": "cpu"}, True, 1),
        ({"device": "cuda"}, True, 2),
        ({"tensor_parallel_size": 2}, False, 2),
        ({"steps_in_flight": 1}, True, 1),
    ],
)
def test_two_steps_in_flight_on_gpus_and_with_several_ranks(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], has_gpu: bool, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = Settings.parse(model="m", **settings).engine_config()
    assert resolve_steps_in_flight(config).scheduler.steps_in_flight == expected
