"""The memory that the host has free, which a control group may limit."""

from pathlib import Path

import pytest

from transom_core.errors import ConfigError
from transom_core.machine import host_memory


@pytest.mark.parametrize(
    ("limit", "use", "cache", "expected"),
    [
        ("max", 5, 0, 4_096_000),
        ("1000000", 400_000, None, 600_000),
        ("1000000", 900_000, 300_000, 400_000),
        ("9", 50, 0, 0),
    ],
)
def test_a_control_group_lowers_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, use: int, cache: int | None, expected: int
) -> None:
    """File cache counts as the group's use, but the kernel frees it when a process needs host_memory."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (tmp_path / "limit").write_text(limit + "\n")
    (tmp_path / "use").write_text(f"{use}\n")
    if cache is not None:
        (tmp_path / "memory.stat").write_text(f"anon 7\nactive_file 9\ninactive_file {cache}\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    here = host_memory.ControlGroup(tmp_path, "limit", "use", "inactive_file")
    monkeypatch.setattr(host_memory, "CGROUPS", (here._replace(folder=tmp_path / "none"), here))
    assert host_memory.available_host_bytes() == expected


def test_a_machine_that_does_not_report_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "absent")
    with pytest.raises(ConfigError, match="give --kv-cache-memory-bytes"):
        host_memory.available_host_bytes()
