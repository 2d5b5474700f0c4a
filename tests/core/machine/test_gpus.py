"""What the driver reports is read as it is, CUDA_VISIBLE_DEVICES counts as in CUDA, and `auto` never means the CPU by mistake. What
keeps a GPU idle is named in one line, with what to do.

Ray's grant decides the device: never the CPU or another worker's GPU by mistake; a part of a GPU is a part of its memory.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpus import H100, L4, LOST, T4, TORCH, driver_of, host, install, part, several
from transom_core.errors import ConfigError
from transom_core.machine.gpu_checks import TorchBuild, gpu_problem, too_few_gpus, torch_build
from transom_core.machine.gpus import NO_DRIVER, Gpu, GpuDriver, expects_gpu, read_driver, visible_devices
from transom_core.settings.gpu_grant import with_grant
from transom_core.settings.settings import Settings

UNIFIED = replace(H100, name="NVIDIA GB10", memory_bytes=0)  # the host's memory, which NVML does not report
DIVIDED = replace(H100, parts=(part(1), part(2)))
WITHOUT_PARTS = replace(H100, error="it is divided (MIG) and has no part")
DRIVER = driver_of(H100, L4)
LOST_L4 = driver_of(H100, replace(L4, error="GPU is lost"))
OLD = driver_of(H100, cuda=(12, 8))


@pytest.mark.parametrize(
    "driver",
    [
        NO_DRIVER, driver_of(), driver_of(H100, L4, T4), driver_of(LOST, H100, L4), driver_of(UNIFIED),
        driver_of(DIVIDED, L4), driver_of(WITHOUT_PARTS),
        replace(NO_DRIVER, error="RM has detected an NVML/RM version mismatch."),
    ],
)  # fmt: skip
def test_the_driver_is_read(monkeypatch: pytest.MonkeyPatch, driver: GpuDriver) -> None:
    """A GPU that is lost, or a driver that does not answer, hides nothing else."""
    install(driver, monkeypatch.setattr)
    assert read_driver() == driver


NONE_VISIBLE = ("", "-1", "NoDevFiles", "0,1,0", "GPU-bbbb-2,GPU-bbbb", "GPU-unknown", "MIG-part-1")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (H100, L4)),
        *((visible, ()) for visible in NONE_VISIBLE),
        ("GPU-", ()),  # of both
        *((visible, (L4,)) for visible in ("1", "1,-1,0", "GPU-bbbb", "GPU-bbbb-2,0")),
        *((visible, (H100,)) for visible in ("0,2,1", "0,GPU-bbbb-2")),
        *((visible, (L4, H100)) for visible in (" 1 , 0 ", "1gpu,+0", "GPU-bbbb-2,GPU-aaaa-1")),
    ],
)
def test_visible_devices_as_cuda_counts_them(visible: str | None, expected: tuple[Gpu, ...]) -> None:
    assert tuple(visible_devices((H100, L4), visible).values()) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (part(1), L4)),
        ("0,1", (part(1), L4)),
        ("GPU-aaaa", (part(1),)),
        ("MIG-part-2,MIG-part-1", (part(2), part(1))),
        ("MIG-GPU-aaaa-1/2/0", (part(2),)),
        ("MIG-GPU-aaaa-1/5/0", ()),
        ("MIG-part-2,MIG-part-2", ()),
        ("MIG-part-2,0", (part(2),)),
    ],
)
def test_parts_of_a_gpu(visible: str | None, expected: tuple[Gpu, ...]) -> None:
    assert tuple(visible_devices((DIVIDED, L4), visible).values()) == expected


@pytest.mark.parametrize("driver", [driver_of(H100), driver_of(LOST), replace(NO_DRIVER, error="Unknown Error")])
def test_auto_is_the_cpu_only_where_there_is_no_gpu_or_the_user_hides_it(driver: GpuDriver) -> None:
    assert not expects_gpu(NO_DRIVER, {})
    assert not expects_gpu(driver_of(), {})
    for visible, expected in {"": False, "-1": False, " ": False, "NoDevFiles": False, "0,0": True, "9": True}.items():
        assert expects_gpu(driver, {"CUDA_VISIBLE_DEVICES": visible}) == expected
    assert expects_gpu(driver, {})


def test_the_installed_torch_is_read_from_its_files() -> None:
    torch = pytest.importorskip("torch")
    build = torch_build()
    assert build.version == torch.__version__
    assert torch.version.cuda == (None if build.cuda is None else ".".join(map(str, build.cuda)))


@pytest.mark.parametrize(
    ("driver", "torch", "variables", "message"),
    [
        (DRIVER, TORCH, {}, None),
        (driver_of(H100, cuda=(13, 2)), TORCH, {}, None),
        (NO_DRIVER, TORCH, {}, "has no NVIDIA driver"),
        (driver_of(), TORCH, {}, "580.65 finds no GPU"),
        (replace(NO_DRIVER, error="Unknown Error"), TORCH, {}, r"driver does not answer \(Unknown Error\).*restart"),
        (DRIVER, TORCH, {"CUDA_VISIBLE_DEVICES": "-1"}, "'-1', which leaves none of this machine's 2 GPUs"),
        (DRIVER, TORCH, {"CUDA_VISIBLE_DEVICES": "0,0"}, "'0,0', which leaves none .* indices or UUIDs, each once"),
        (LOST_L4, TORCH, {}, "L4 cannot be used: GPU is lost. .*leave it out"),
        (LOST_L4, TORCH, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (DRIVER, TorchBuild(version="2.13.0+cpu", cuda=None), {}, "torch 2.13.0[+]cpu is a build for CPUs"),
        (OLD, TORCH, {}, "580.65 runs CUDA up to 12.8, and torch 2.13.0 is built for CUDA 13.0"),
        (driver_of(H100, T4), TORCH, {}, "Tesla T4 has compute capability 7.5; .* need 8.0"),
        (driver_of(H100, T4), TORCH, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (DRIVER, TORCH, {"PATH": ""}, "no gcc or clang on PATH.*apt-get install gcc libc6-dev"),
        (DRIVER, TORCH, {"CC": "no-such-compiler"}, "no no-such-compiler on PATH"),
    ],
)
def test_what_keeps_a_gpu_idle_is_named(
    tmp_path: Path, driver: GpuDriver, torch: TorchBuild, variables: dict[str, str], message: str | None
) -> None:
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(mode=0o755)
    problem = gpu_problem(driver, torch, {"PATH": str(tmp_path)} | variables, python_include=str(tmp_path))
    assert (problem is None) == (message is None)
    assert message is None or re.search(message, problem or "")


def test_pythons_headers_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "clang").touch(mode=0o755)
    problem = gpu_problem(DRIVER, TORCH, {"PATH": str(tmp_path)}, python_include=str(tmp_path))
    assert problem is not None
    assert "has no Python.h. Install them (Debian and Ubuntu: apt-get install python3-dev)" in problem


@pytest.mark.parametrize(
    ("driver", "visible", "message"),
    [
        (driver_of(*several(4)), None, None),
        (driver_of(*several(8)), "GPU-7,GPU-1,GPU-2,GPU-3", None),
        (
            driver_of(*several(2)),
            None,
            "four ranks needs 4 GPUs and this machine has 2; ask for fewer, or use --device cpu.",
        ),
        (driver_of(*several(8)), "0,1,9,2", "CUDA_VISIBLE_DEVICES '0,1,9,2' leaves 2 of this machine's 8"),
        (driver_of(*several(8)), "", "CUDA_VISIBLE_DEVICES '' leaves 0 of this machine's 8"),
        (driver_of(*several(8)), "1,2,3,1", "CUDA_VISIBLE_DEVICES '1,2,3,1' leaves 0 of this machine's 8"),
        (NO_DRIVER, "", "this machine has 0"),
    ],
)
def test_too_few_gpus(driver: GpuDriver, visible: str | None, message: str | None) -> None:
    problem = too_few_gpus(4, driver, "four ranks", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (problem is None) == (message is None)
    assert (message or "") in (problem or "")


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
    host(monkeypatch, driver_of(*several(8)))
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
