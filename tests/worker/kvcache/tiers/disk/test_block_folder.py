"""Files of blocks: what was written is read, by any process of the same model; anything else is found, removed and never served.

A listing finds what came and went, whichever process did it, and costs a bounded number of names a round.
"""

import os
import random
import stat
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.how_many import num_examples
from transom_core.errors import ConfigError
from transom_worker.kvcache.tiers.disk import listing
from transom_worker.kvcache.tiers.disk.folder import HEADER_BYTES, BlockFolder, BlockName, BrokenFile, pack, unpack
from transom_worker.kvcache.tiers.disk.listing import BlockKey, FolderListing
from transom_worker.kvcache.tiers.disk.owned_directory import OwnedDirectory, open_directory

MODEL = b"m" * 32
SIZE = 1000
FILE_BYTES = SIZE + HEADER_BYTES


def folder(path: Path, model: bytes = MODEL, *, space: int = 1 << 20) -> BlockFolder:
    return BlockFolder(path, model, space_bytes=space)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def contents(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def file_of(path: Path, block: bytes, group: int = 0) -> Path:
    name = block.hex()
    return path / "transom-kv" / MODEL.hex()[:32] / name[:2] / f"{name}-{group}.kv"


def block_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def test_blocks_come_back_in_another_process_of_the_same_model(tmp_path: Path) -> None:
    first = folder(tmp_path)
    for number in range(5):
        assert first.write(number % 2, digest(number), contents(number))
    second, other_model = folder(tmp_path), folder(tmp_path, b"o" * 32)
    for number in range(5):
        assert second.read(number % 2, digest(number), SIZE) == contents(number)
        assert second.read(1 - number % 2, digest(number), SIZE) is None
        assert other_model.read(number % 2, digest(number), SIZE) is None
    assert (second.counts.num_read, second.counts.num_missing, second.counts.num_broken) == (5, 5, 0)
    assert second.space.used_bytes == 5 * FILE_BYTES


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "deep" / "down").mkdir(mode=0o1777, parents=True)  # sticky, as /tmp is
        (tmp_path / "deep" / "down").chmod(0o1777)
        (tmp_path / "deep" / "down" / "transom-kv").mkdir(mode=0o777)  # it is closed to others
        folder(tmp_path / "deep" / "down").write(0, digest(1), contents(1))
    finally:
        os.umask(before)
    root = tmp_path / "deep" / "down" / "transom-kv"
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o757, True), (0o1777, False), (0o755, False)])
def test_a_directory_into_which_others_may_write_is_refused(tmp_path: Path, mode: int, is_refused: bool) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    if is_refused:
        with pytest.raises(ConfigError, match="other users may write into it"):
            folder(shared)
        assert not list(shared.iterdir())
    else:
        assert folder(shared).write(0, digest(1), contents(1))
    folder(shared / "below")  # which is made, and ours
    assert stat.S_IMODE((shared / "below").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["", "transom-kv", f"transom-kv/{MODEL.hex()[:32]}"])
def test_no_directory_is_a_link(tmp_path: Path, name: str) -> None:
    """Nothing is changed where it leads."""
    private = tmp_path / "public_html"
    private.mkdir()
    private.chmod(0o755)
    link = tmp_path / "cache" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(private)
    with pytest.raises(ConfigError, match=r"--disk-cache .* cannot be used"):
        folder(tmp_path / "cache")
    assert stat.S_IMODE(private.stat().st_mode) == 0o755
    assert not list(private.iterdir())


def test_a_directory_that_is_replaced_later_is_not_read(tmp_path: Path) -> None:
    store, other = folder(tmp_path / "ours"), folder(tmp_path / "theirs")
    other.write(0, digest(1), contents(2))
    (tmp_path / "ours" / "transom-kv").rename(tmp_path / "moved")
    (tmp_path / "theirs" / "transom-kv").rename(tmp_path / "ours" / "transom-kv")
    assert store.read(0, digest(1), SIZE) is None
    assert store.new_listing().look() == ([], [])
    assert store.write(0, digest(1), contents(1))
    assert store.read(0, digest(1), SIZE) == contents(1)
    assert len(block_files(tmp_path / "moved")) == 1


def test_a_directory_or_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(tmp_path)
    store.write(0, digest(1), contents(1))
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    assert store.read(0, digest(1), SIZE) is None
    assert (store.counts.num_broken, block_files(tmp_path)) == (1, [])
    with pytest.raises(ConfigError, match="belongs to another user"):
        folder(tmp_path)


def link(path: Path) -> None:
    target = path.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "short": lambda path: os.truncate(path, FILE_BYTES - 1),
    "other group": lambda path: path.write_bytes(
        b"".join(bytes(part) for part in pack(BlockName(MODEL, digest(1), 1), contents(1)))
    ),
    "link": link,
    "pipe": pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_removed_and_counted(tmp_path: Path, damage: str) -> None:
    store = folder(tmp_path)
    store.write(0, digest(1), contents(1))
    (path,) = block_files(tmp_path)
    DAMAGES[damage](path)
    assert store.read(0, digest(1), SIZE) is None
    assert store.counts.num_broken == 1
    assert not os.path.lexists(path)
    store.write(0, digest(1), contents(1))
    assert store.read(0, digest(1), SIZE) == contents(1)


def test_any_changed_byte_is_found() -> None:
    """The fuzz test of the reader: changed, cut, joined and invented files."""
    name = BlockName(MODEL, digest(1), 3)
    whole = b"".join(bytes(part) for part in pack(name, contents(1)))
    assert unpack(whole, name, SIZE) == contents(1)
    rng = random.Random(0)
    for _ in range(num_examples(1_000, 50_000)):
        data = bytearray(whole)
        kind = rng.randrange(4)
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data)) :]
        elif kind == 2:
            begin, end = sorted(rng.sample(range(len(data)), 2))
            data[begin:end] = rng.randbytes(end - begin)
        else:
            data = bytearray(rng.randbytes(rng.choice([0, 1, HEADER_BYTES, len(whole)])))
        if bytes(data) != whole:
            with pytest.raises(BrokenFile):
                unpack(bytes(data), name, SIZE)


def test_the_least_recently_used_blocks_leave_first(tmp_path: Path) -> None:
    store = folder(tmp_path, space=8 * FILE_BYTES)
    foreign = tmp_path / "transom-kv" / "notes.txt"
    foreign.write_text("not ours")
    for number in range(8):
        store.write(0, digest(number), contents(number))
        os.utime(file_of(tmp_path, digest(number)), (number, number))
    assert store.read(0, digest(0), SIZE) is not None  # used now
    store.write(0, digest(8), contents(8))
    assert [number for number in range(9) if file_of(tmp_path, digest(number)).exists()] == [0, 2, 3, 4, 5, 6, 7, 8]
    assert store.space.num_evicted == 1
    assert store.space.used_bytes == len(block_files(tmp_path)) * FILE_BYTES <= 8 * FILE_BYTES
    assert foreign.read_text() == "not ours"
    assert folder(tmp_path, space=3 * FILE_BYTES).space.used_bytes <= 3 * FILE_BYTES  # from its start on
    assert not folder(tmp_path, space=FILE_BYTES - 1).write(0, digest(9), contents(9))  # larger than all the space


def test_what_a_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    folder(tmp_path).write(0, digest(1), contents(1))
    path = file_of(tmp_path, digest(1))
    left, running = (path.with_name(f".{path.stem}.{pid}-1.tmp") for pid in (1, 2))
    left.write_bytes(b"x")
    running.write_bytes(b"x")
    os.utime(left, (0, 0))
    folder(tmp_path)
    assert not left.exists()
    assert running.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(tmp_path)
    write = os.write

    def full(file: int, data: memoryview) -> int:
        if len(data) == SIZE:
            write(file, data[:100])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(0, digest(1), contents(1))
    monkeypatch.undo()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "transom-kv" / "bytes_in_use"]
    assert store.space.used_bytes == 0
    assert store.write(0, digest(1), contents(1))


WRITER = """
import sys
from pathlib import Path
from tests.worker.kvcache.tiers.disk.test_block_folder import contents, digest, folder, FILE_BYTES
store = folder(Path(sys.argv[1]), space=20 * FILE_BYTES)
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 60):
    store.write(0, digest(number), contents(number))
    assert store.space.used_bytes <= 20 * FILE_BYTES
"""


def test_processes_share_the_space(tmp_path: Path) -> None:
    """Two processes and two threads write overlapping blocks: the space holds, and each block is whole or absent."""
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(first)]) for first in (0, 30)]
    store = folder(tmp_path, space=20 * FILE_BYTES)
    threads = [
        threading.Thread(target=lambda: [store.write(0, digest(n), contents(n)) for n in range(100)]) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(120) for process in processes] == [0, 0]
    files = block_files(tmp_path)
    assert 0 < len(files) <= 20
    for number in range(100):
        assert store.read(0, digest(number), SIZE) in (None, contents(number))
    assert store.counts.num_broken == 0
    assert store.space.recount() == store.space.used_bytes == len(files) * FILE_BYTES


def test_what_another_process_writes_now_counts(tmp_path: Path) -> None:
    store = folder(tmp_path, space=3 * FILE_BYTES)
    for number in range(3):
        assert store.write(0, digest(number), contents(number))
    file = file_of(tmp_path, digest(0))
    unfinished = file.with_name(f".{file.stem}.1-1.tmp")
    unfinished.write_bytes(bytes(FILE_BYTES))
    assert store.write(0, digest(3), contents(3))
    assert unfinished.exists()
    assert len(block_files(tmp_path)) + 1 <= 3
    unfinished.write_bytes(bytes(3 * FILE_BYTES))
    files = block_files(tmp_path)
    assert not store.write(0, digest(4), contents(4))
    assert not store.write(0, digest(5), bytes(4 * FILE_BYTES))
    assert block_files(tmp_path) == files != []
    assert [path.name for path in file.parent.parent.rglob("*.tmp")] == [unfinished.name]


def test_an_eviction_holds_no_object_for_each_file(tmp_path: Path) -> None:
    store = folder(tmp_path)
    for number in range(4_000):
        file = file_of(tmp_path, digest(number << 240))  # 256 subfolders
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 300)
    tracemalloc.start()
    try:
        store.space.recount()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < store.space.num_evicted < 1_500
    assert peak_bytes < 600_000  # as a list of files 1,200,000


def key(number: int, group: int = 0) -> BlockKey:
    return group, random.Random(number).randbytes(32)


def count_names(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have listings note how many names each subfolder gave them."""
    counts: list[int] = []
    plain = listing._files

    def counted(folder: OwnedDirectory, name: str) -> list[str]:
        names = plain(folder, name)
        counts.append(len(names))
        return names

    monkeypatch.setattr(listing, "_files", counted)
    return counts


def take(known: set[BlockKey], found: FolderListing, *, most_files: int = listing.MOST_FILES) -> None:
    changes = found.look(most_files=most_files)
    assert not known.intersection(changes.added)
    assert known.issuperset(changes.removed)
    known.difference_update(changes.removed)
    known.update(changes.added)


def test_random_changes_are_found(tmp_path: Path) -> None:
    rng = random.Random(3)
    store = folder(tmp_path)
    found, known = store.new_listing(), set[BlockKey]()
    there: set[BlockKey] = set()
    for _ in range(num_examples(daily=150, exhaustive=1500)):
        for _ in range(rng.randrange(4)):
            block = key(rng.randrange(400), rng.randrange(2))
            assert store.write(*block, b"contents")
            there.add(block)
        for block in rng.sample(sorted(there), min(len(there), rng.randrange(3))):
            group, name = block
            file_of(tmp_path, name, group).unlink()
            there.remove(block)
        if rng.random() < 0.05:
            gone = rng.sample(sorted(there), min(len(there), 5))
            found.forget(gone)
            known.difference_update(gone)
        take(known, found)
        if rng.random() < 0.3:  # time passes, and what was written in the same tick as a listing is seen
            take(known, found)
        if not rng.randrange(10):
            os.sync()
    for _ in range(2):
        take(known, found)
    assert known == there
    assert store.new_listing().look_at_all().added
    assert set(store.new_listing().look_at_all().added) == there


def test_a_file_of_the_same_tick_as_a_listing_is_found(tmp_path: Path) -> None:
    store = folder(tmp_path)
    first, second = key(1), key(1, group=1)  # in one subfolder
    store.write(*first, b"contents")
    found = store.new_listing()
    assert found.look().added == [first]
    parent = file_of(tmp_path, first[1]).parent
    status = parent.stat()
    store.write(*second, b"contents")
    os.utime(parent, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert found.look().added == [second]


def test_a_round_reads_a_bounded_number_of_names_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder(tmp_path)
    for number in range(600):
        store.write(*key(number), b"contents")
    found, known = store.new_listing(), set[BlockKey]()
    counts = count_names(monkeypatch)
    rounds = 0
    while len(known) < 600:
        counts.clear()
        take(known, found, most_files=100)
        rounds += 1
        assert sum(counts) < 100 + max(counts)
    assert 5 <= rounds <= 7
    for _ in range(rounds + 1):
        take(known, found, most_files=100)
    counts.clear()
    take(known, found, most_files=100)
    assert counts == []  # nothing has changed
    store.write(*key(600), b"contents")
    take(known, found, most_files=100)
    assert len(counts) == 1


def test_other_files_folders_links_and_a_missing_folder_are_nothing(tmp_path: Path) -> None:
    store = folder(tmp_path)
    store.write(*key(1), b"contents")
    path = file_of(tmp_path, key(1)[1])
    (path.parent / "notes.txt").write_text("mine")
    (path.parent / f".{path.stem}.1-2.tmp").write_bytes(b"")
    (path.parent.parent / "zz").write_text("no folder")
    (path.parent / f"{path.name[:2]}{'0' * 62}-0.kv").mkdir()
    (path.parent / f"{path.name[:2]}{'a' * 62}-0.kv").symlink_to(path)
    found = store.new_listing()
    assert found.look() == ([key(1)], [])
    path.parent.rename(tmp_path / "elsewhere")
    assert found.look() == ([], [key(1)])
    nowhere = open_directory(tmp_path / "nowhere")
    (tmp_path / "nowhere").rmdir()
    assert FolderListing(nowhere).look() == ([], [])
