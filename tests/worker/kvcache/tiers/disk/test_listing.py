"""A listing finds what came and went, whichever process did it, and costs a bounded number of names a round."""

import os
import random
from pathlib import Path

import pytest

from tests.how_many import num_examples
from transom_worker.kvcache.tiers.disk import listing
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.kvcache.tiers.disk.listing import BlockKey, FolderListing
from transom_worker.kvcache.tiers.disk.owned_directory import OwnedDirectory, open_directory

FINGERPRINT = b"f" * 32


def folder_in(path: Path, *, space_bytes: int = 1 << 30) -> BlockFolder:
    return BlockFolder(path, FINGERPRINT, space_bytes=space_bytes)


def file_of(path: Path, block: BlockKey) -> Path:
    name = block[1].hex()
    return path / "transom-kv" / FINGERPRINT.hex()[:32] / name[:2] / f"{name}-{block[0]}.kv"


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
    folder = folder_in(tmp_path)
    found, known = folder.new_listing(), set[BlockKey]()
    there: set[BlockKey] = set()
    for _ in range(num_examples(daily=150, exhaustive=1500)):
        for _ in range(rng.randrange(4)):
            block = key(rng.randrange(400), rng.randrange(2))
            assert folder.write(*block, b"contents")
            there.add(block)
        for block in rng.sample(sorted(there), min(len(there), rng.randrange(3))):
            file_of(tmp_path, block).unlink()
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
    assert folder.new_listing().look_at_all().added
    assert set(folder.new_listing().look_at_all().added) == there


def test_a_file_of_the_same_tick_as_a_listing_is_found(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    first, second = key(1), key(1, group=1)  # in one subfolder
    folder.write(*first, b"contents")
    found = folder.new_listing()
    assert found.look().added == [first]
    parent = file_of(tmp_path, first).parent
    status = parent.stat()
    folder.write(*second, b"contents")
    os.utime(parent, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert found.look().added == [second]


def test_a_round_reads_a_bounded_number_of_names_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    for number in range(600):
        folder.write(*key(number), b"contents")
    found, known = folder.new_listing(), set[BlockKey]()
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
    folder.write(*key(600), b"contents")
    take(known, found, most_files=100)
    assert len(counts) == 1


def test_other_files_folders_links_and_a_missing_folder_are_nothing(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.write(*key(1), b"contents")
    path = file_of(tmp_path, key(1))
    (path.parent / "notes.txt").write_text("mine")
    (path.parent / f".{path.stem}.1-2.tmp").write_bytes(b"")
    (path.parent.parent / "zz").write_text("no folder")
    (path.parent / f"{path.name[:2]}{'0' * 62}-0.kv").mkdir()
    (path.parent / f"{path.name[:2]}{'a' * 62}-0.kv").symlink_to(path)
    found = folder.new_listing()
    assert found.look() == ([key(1)], [])
    path.parent.rename(tmp_path / "elsewhere")
    assert found.look() == ([], [key(1)])
    nowhere = open_directory(tmp_path / "nowhere")
    (tmp_path / "nowhere").rmdir()
    assert FolderListing(nowhere).look() == ([], [])
