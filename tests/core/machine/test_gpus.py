"""What the driver reports is read as it is, CUDA_VISIBLE_DEVICES counts as in CUDA, and `auto` never means the CPU by mistake."""

from dataclasses import replace

import pytest

from tests.fake_gpus import H100, L4, LOST, T4, driver_of, install, part
from transom_core.machine.gpus import NO_DRIVER, Gpu, GpuDriver, expects_gpu, read_driver, visible_devices

UNIFIED = replace(H100, name="NVIDIA GB10", memory_bytes=0)  # the host's memory, which NVML does not report
DIVIDED = replace(H100, parts=(part(1), part(2)))
WITHOUT_PARTS = replace(H100, error="it is divided (MIG) and has no part")


@pytest.mark.parametrize(
    "driver",
    [
        NO_DRIVER,
        driver_of(),
        driver_of(H100, L4, T4),
        driver_of(LOST, H100, L4),
        driver_of(UNIFIED),
        driver_of(DIVIDED, L4),
        driver_of(WITHOUT_PARTS),
        replace(NO_DRIVER, error="RM has detected an NVML/RM version mismatch."),
    ],
)
def test_the_driver_is_read(monkeypatch: pytest.MonkeyPatch, driver: GpuDriver) -> None:
    """A GPU that is lost, or a driver that does not answer, hides nothing else."""
    install(driver, monkeypatch.setattr)
    assert read_driver() == driver


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (H100, L4)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1", (L4,)),
        ("1,-1,0", (L4,)),
        ("0,2,1", (H100,)),
        (" 1 , 0 ", (L4, H100)),
        ("1gpu,+0", (L4, H100)),
        ("0,1,0", ()),
        ("GPU-bbbb", (L4,)),
        ("GPU-bbbb-2,GPU-aaaa-1", (L4, H100)),
        ("GPU-bbbb-2,GPU-bbbb", ()),
        ("GPU-", ()),  # of both
        ("GPU-bbbb-2,0", (L4,)),
        ("0,GPU-bbbb-2", (H100,)),
        ("GPU-unknown", ()),
        ("MIG-part-1", ()),
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
