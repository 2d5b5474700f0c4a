"""A wrong setting is refused before Ray and the weights are loaded, with what was given and what is allowed."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpus import driver_of, several
from transom_cluster.serve import start_checks
from transom_cluster.serve.start_checks import check_start
from transom_core.errors import ConfigError
from transom_core.settings.settings import Settings

WINDOW = '{"type": "window", "window": 64}'
HYBRID: dict[str, Any] = {"window": 64, "window_pattern": "SF"}


def check(model: Path, **settings: object) -> None:
    check_start(Settings.parse(model=str(model), port=0, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_policy": '{"type": "window", "window": 4096}'}, "kv_policy.window is 4096 .* up to 2048 tokens"),
        ({"kv_policy": '{"type": "heavy", "budget": 32}'}, "kv_policy.budget is 32; .* at least 64"),
        ({"kv_policy": WINDOW, **HYBRID}, "2 of its 4 layers have sliding windows"),
        ({"kv_policy": WINDOW, "chunk": 32, "window_pattern": "CF"}, "2 of its 4 layers have chunked attention"),
        ({"kv_cache_dtype": "window=int8"}, "names window, and the KV groups of this model are full"),
        ({"kv_cache_dtype": "chunk=int8", **HYBRID}, r"names chunk, .* window_64 \(kind window\)"),
        ({"kv_cache_dtype": "full=bfloat16", "dtype": "float32"}, "asks for bfloat16 in KV group full, .* float32"),
        ({"tensor_parallel_size": 99}, "99"),
        ({"worker_group": ["role=prefill,tensor_parallel_size=99"]}, "99"),
    ],
)
def test_what_the_model_cannot_take_is_refused(tiny_model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tiny_model, **settings)


def test_what_the_model_can_take_is_not_refused(tiny_model: Path) -> None:
    check(tiny_model, kv_policy=WINDOW, kv_cache_dtype="full=int8")
    check(tiny_model, kv_cache_dtype="window=int4,full=fp8", **HYBRID)
    check(tiny_model, tensor_parallel_size=3, worker_group=["role=prefill,tensor_parallel_size=2"])


@pytest.mark.parametrize(
    ("settings", "visible", "message"),
    [
        ({}, None, None),
        ({"device": "cpu", "quantization": "int8"}, None, None),
        (
            {"quantization": "int4"},
            None,
            "--quantization int4 runs on CPUs, and --device is auto on a machine with 2 GPUs",
        ),
        ({"quantization": "int4"}, "-1", None),
        ({"replicas": 9}, "", None),
        ({"replicas": 2, "tensor_parallel_size": 1}, None, None),
        (
            {"max_replicas": 3, "tensor_parallel_size": 2},
            None,
            "--max-replicas 3 with --tensor-parallel-size 2 needs 6 GPUs",
        ),
        ({"replicas": 3}, None, "needs 3 GPUs and this machine has 2"),
        ({"replicas": 2}, "GPU-1", "needs 2 GPUs and CUDA_VISIBLE_DEVICES 'GPU-1' leaves 1 of this machine's 2"),
        ({"device": "cuda"}, "1", None),
    ],
)
def test_the_machine_is_asked_for_its_gpus(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], visible: str | None, message: str | None
) -> None:
    monkeypatch.setattr(start_checks, "gpu_problem", lambda *_: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        start_checks.check_machine(Settings.parse(model="m", **settings), driver_of(*several(2)))


def test_host_tiers_that_do_not_fit_together_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "role=prefill,tensor_parallel_size=2,swap_space=2GiB"
    settings = Settings.parse(model="tiny", replicas=2, swap_space="1GiB", worker_group=[group])
    monkeypatch.setattr(start_checks, "available_host_bytes", lambda: 6 * 2**30)
    start_checks.check_host_tiers(settings)
    monkeypatch.setattr(start_checks, "available_host_bytes", lambda: 4 * 2**30)
    with pytest.raises(
        ConfigError, match=r"all 4 ranks .* take 6442450944 bytes, .* 4294967296 bytes free.*most 1.00GiB"
    ):
        start_checks.check_host_tiers(settings)
