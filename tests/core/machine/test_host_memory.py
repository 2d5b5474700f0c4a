"""The memory that the host has free, which a control group may limit, and the freed memory that a process returns."""

import ctypes
import queue
import subprocess
import sys
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


CHUNKS = """
import ctypes, sys, threading
from transom_core.machine import host_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

def work() -> None:
    small = [libc.malloc(2000) for _ in range(32 << 9)]  # 32 MiB
    for chunk in small:
        ctypes.memset(chunk, 1, 2000)
    above = libc.malloc(2000) if is_covered else None
    for chunk in small:
        libc.free(chunk)
    if returns:
        host_memory.return_freed_memory()

is_covered, returns = "covered" in sys.argv, "returns" in sys.argv
if "keeps little" in sys.argv:
    host_memory.keep_little_freed_memory()
libc.free(libc.malloc(30 << 20))  # from now on malloc keeps up to 60 MiB, unless it was told to keep little
before = resident()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's malloc")
def test_freed_memory_is_returned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RETURN_PERIOD_S", 0.001)
    calls: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(host_memory, "return_freed_memory", lambda: calls.put(None))
    host_memory.keep_returning_freed_memory.cache_clear()  # an earlier test may have started it
    for _ in range(2):
        host_memory.keep_returning_freed_memory()
    for _ in range(3):
        calls.get(timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's malloc")
@pytest.mark.parametrize("place", ["above", "covered"])
@pytest.mark.parametrize("is_told", [True, False])
def test_freed_memory_goes_back_to_the_kernel(place: str, is_told: bool) -> None:
    """Memory below a chunk in use is returned by one call, and memory above all chunks of a thread's arena by the other."""
    calls = {"above": "keeps little", "covered": "returns"}
    command = [sys.executable, "-c", CHUNKS, place, *([calls[place]] if is_told else [])]
    grown_mib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown_mib <= 8 if is_told else grown_mib >= 24
