"""What a worker chooses when it knows its device, and what the report of its start says of tiers."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fake_gpus import H100, L4, LOST, driver_of, host, install, part, several
from transom_core.config import CacheConfig
from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import GroupLayout, LayerTensors
from transom_core.machine.gpus import NO_DRIVER, Gpu, GpuDriver
from transom_core.settings.settings import Settings
from transom_worker.engine import startup
from transom_worker.execution.executor import ExecutorInfo, MemoryReport
from transom_worker.execution.setup import model_loading
from transom_worker.planner.plan import plan_cache

DIVIDED = replace(H100, parts=(part(1), part(2)))


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, (), (64, 1024, 1)),
        ({}, (H100,), (256, 8192, 2)),
        ({}, (L4,), (128, 2048, 2)),
        ({}, (H100, L4), (128, 2048, 2)),
        ({}, (DIVIDED,), (128, 2048, 2)),
        ({"device": "cpu"}, (H100,), (64, 1024, 1)),
        ({"device": "cuda"}, (H100,), (256, 8192, 2)),
        ({"tensor_parallel_size": 2}, (), (64, 1024, 2)),
        ({"steps_in_flight": 1, "max_num_seqs": 9, "max_num_batched_tokens": 99}, (H100,), (9, 99, 1)),
    ],
)
def test_batches_as_the_device_allows(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], gpus: tuple[Gpu, ...], expected: tuple[int, int, int]
) -> None:
    host(monkeypatch, driver_of(*gpus) if gpus else NO_DRIVER)
    chosen = startup.resolve_for_device(Settings.parse(model="m", **settings).engine_config()).scheduler
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens, chosen.steps_in_flight) == expected


@pytest.mark.parametrize(("visible", "gpu_share", "expected"), [("0", 1.0, 256), ("1", 1.0, 128), ("0", 0.5, 128)])
def test_only_visible_memory_counts(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpu_share: float, expected: int
) -> None:
    """Ray leaves a worker one GPU of a host with others, or a share of it."""
    host(monkeypatch, driver_of(H100, L4), visible)
    config = Settings.parse(model="m").engine_config()
    config = replace(config, cache=replace(config.cache, gpu_share=gpu_share))
    assert startup.resolve_for_device(config).scheduler.max_num_seqs == expected


@pytest.mark.parametrize(
    ("node", "expected"), [(driver_of(*several(8)), 256), (driver_of(DIVIDED), 128), (NO_DRIVER, 128)]
)
def test_actors_have_the_gpus_of_their_worker(monkeypatch: pytest.MonkeyPatch, node: GpuDriver, expected: int) -> None:
    """Ray may hide them from the worker itself, which may also run on a host without any."""
    host(monkeypatch, node, "")
    config = Settings.parse(model="m", device="cuda", tensor_parallel_size=2).engine_config()
    config = replace(config, ranks=replace(config.ranks, launcher="ray"))
    assert startup.resolve_for_device(config).scheduler.max_num_seqs == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_get_the_device_that_auto_means(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """So that none of them chooses the CPU where its worker has chosen GPUs."""
    config = Settings.parse(model="m", tensor_parallel_size=num_ranks).engine_config()
    for driver, device in ((driver_of(H100), "cuda"), (NO_DRIVER, "cpu")):
        host(monkeypatch, driver)
        assert startup.resolve_for_device(config).model.device == device


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("driver", "visible", "message"),
    [
        (driver_of(LOST), None, "GPU 0 cannot be used: GPU is lost"),
        (driver_of(H100), "1", "'1', which leaves none of this machine's 1 GPUs"),
        (replace(NO_DRIVER, error="mismatch"), None, "The NVIDIA driver does not answer"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_never_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, driver: GpuDriver, visible: str | None, message: str
) -> None:
    host(monkeypatch, driver, visible)
    with pytest.raises(ConfigError, match=f"--device {device}: .*{message}"):
        model_loading.choose_device(device)
    assert model_loading.choose_device("cpu") == torch.device("cpu")


def test_a_gpu_that_fails_when_cuda_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(driver_of(H100, L4), monkeypatch.setattr, broken=L4.uuid)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    model_loading.open_device(torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(
        ConfigError, match=r"^CUDA cannot use the GPU GPU-bbbb-2: .* busy or unavailable\. See with [^\n]*$"
    ):
        model_loading.open_device(torch.device("cuda"))
    model_loading.open_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "runs"), [((8, 0), True), ((8, 9), True), ((9, 0), True), ((10, 0), False), ((12, 0), True)]
)
def test_a_gpu_that_torch_has_no_code_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    """torch here is built for sm_80, sm_86, sm_90a and compute_110."""
    host(monkeypatch, driver_of(replace(H100, capability=capability)))
    refused = pytest.raises(ConfigError, match=r"no code for the GPU GPU-aaaa-1, .* is 10\.0: .*newer")
    with nullcontext() if runs else refused:
        model_loading.open_device(torch.device("cuda"))


def test_the_report_says_what_the_tiers_below_the_device_hold() -> None:
    """`test_engine_plan` has its other figures."""
    tensors = LayerTensors(layer=0, num_kv_heads=1, k_size=1, v_size=1, dtype="int8", k_offset=0, v_offset=0)
    spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0, 1), block_size=16)
    group = GroupLayout(spec=spec, block_bytes=1000, stride_bytes=1024, layers=(tensors,))
    sizes: dict[str, Any] = {"memory_bytes": 2**20, "host_bytes": 3 << 20, "block_size": 16, "max_model_len": 4096}
    plan = plan_cache([group], max_num_batched_tokens=512, tensor_parallel_size=2, **sizes)
    memory = MemoryReport(device="cpu", weight_bytes=0, activation_bytes=0, kv_bytes=0)
    info = ExecutorInfo(plan=plan, max_model_len=4096, vocab_size=10, eos_token_ids=(), memory=memory)
    lines = startup.startup_report(
        info, model="m", cache=CacheConfig(disk_cache="/d", disk_space_bytes=5 << 30)
    ).splitlines()
    (host,) = [line for line in lines if line.startswith("host tier")]
    assert host.startswith("host tier 3 MiB on each rank (3,072 pages) for evicted prefixes and preempted sequences")
    assert host.endswith(": the KV of 48 of 1,024, 12 of 4,096")
    # each of the two ranks writes 64 or 256 blocks of 1,000 bytes, in 1,024
    on_disk = [(5 << 30) // (2 * num_blocks * 1024) for num_blocks in (64, 256)]
    assert (
        "disk tier in /d, up to 5,120 MiB for all processes that use it: the KV of about "
        f"{on_disk[0]:,} of 1,024, {on_disk[1]:,} of 4,096" in lines
    )
    assert plan.as_json()["host_concurrency"][1]["requests"] == 12
