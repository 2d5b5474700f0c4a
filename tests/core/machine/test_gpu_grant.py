"""Ray's grant decides the device: never the CPU or another worker's GPU by mistake; a part of a GPU is a part of its memory."""

from typing import Any

import pytest

from tests.fake_gpus import driver_of, install, several
from transom_core.errors import ConfigError
from transom_core.machine.gpus import NO_DRIVER
from transom_core.settings.gpu_grant import with_grant
from transom_core.settings.settings import Settings


@pytest.mark.parametrize(
    ("device", "num_ranks", "granted", "expected"),
    [
        ("cuda", 1, 1.0, ("cuda", 1.0)),
        ("auto", 1, 1.0, ("cuda", 1.0)),
        ("cuda", 1, 0.5, ("cuda", 0.5)),
        ("cuda", 2, 1.0, ("cuda", 1.0)),
        ("cpu", 1, 0.0, ("cpu", 1.0)),
        ("cpu", 1, 1.0, ("cpu", 1.0)),
        ("cuda", 1, 0.0, "grants 0 GPUs, and the device is cuda; grant 1"),
        ("auto", 1, 0.0, "grants 0 GPUs, and this host has 8; start Ray with them .*, or say device: cpu"),
        ("cuda", 1, 2.0, "grants 2 GPUs, and a rank uses one; grant 1, and set tensor_parallel_size"),
        ("cuda", 2, 2.0, "grants 2 GPUs, and a rank uses one"),
        ("cuda", 2, 0.5, "grants 0.5 GPUs, and each of 2 ranks needs a whole one"),
    ],
)
def test_a_grant(
    monkeypatch: pytest.MonkeyPatch, device: Any, num_ranks: int, granted: float, expected: tuple[str, float] | str
) -> None:
    install(driver_of(*several(8)), monkeypatch.setattr)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = Settings.parse(model="m", device=device, tensor_parallel_size=num_ranks).engine_config()
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            with_grant(config, granted)
    else:
        found = with_grant(config, granted)
        assert (found.model.device, found.cache.gpu_share) == expected


def test_without_gpus_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the user hides them."""
    config = Settings.parse(model="m").engine_config()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for driver in (NO_DRIVER, driver_of(*several(8))):
        install(driver, monkeypatch.setattr)
        assert with_grant(config, 0.0).model.device == "cpu"
