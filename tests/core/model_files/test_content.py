"""The digest of a model's files: any change of contents changes it, names of copies and times do not."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from transom_core.errors import ModelError
from transom_core.model_files import content
from transom_core.model_files.content import ContentPart, ContentReading, join_parts
from transom_core.model_files.resolve import ModelFiles, resolve_model
from transom_core.model_files.text_files import INDEX_FILE

SIZE = 3000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(content, "PIECE_BYTES", 1000)
    monkeypatch.setattr(content, "_BUFFER_BYTES", 300)
    folder = tmp_path / "model"
    folder.mkdir()
    for name, fill in (("a.safetensors", b"a"), ("b.safetensors", b"b"), ("other.safetensors", b"c")):
        (folder / name).write_bytes(fill * SIZE)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    return folder


def digest(folder: Path, num_ranks: int = 1) -> str:
    files = resolve_model(str(folder))
    return join_parts([ContentReading(files, index=r, count=num_ranks).finish() for r in range(num_ranks)]).hex()


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
def test_ranks_share_the_pieces_and_find_the_same_digest(folder: Path, num_ranks: int) -> None:
    assert digest(folder, num_ranks) == digest(folder)
    parts = [ContentReading(resolve_model(str(folder)), index=r, count=num_ranks).finish() for r in range(num_ranks)]
    assert sum(len(part.digests) for part in parts) == 2 * 3 + 1  # pieces of both files of weights, and the tokenizer


def test_a_byte_that_changes_in_place_is_found_whatever_the_times_say(folder: Path) -> None:
    found = {digest(folder)}
    for name, position in (("a.safetensors", 0), ("a.safetensors", SIZE - 1), ("b.safetensors", 1500)):
        times = (folder / name).stat().st_atime_ns, (folder / name).stat().st_mtime_ns
        with (folder / name).open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        os.utime(folder / name, ns=times)
        found.add(digest(folder))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_text('{"a": 1}')
        found.add(digest(folder))
    assert len(found) == 7


def test_a_copy_is_equal_and_files_that_are_not_loaded_do_not_count(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/README.md").write_text("Read me")
    (tmp_path / "copy/other.safetensors").unlink()
    os.utime(tmp_path / "copy/a.safetensors", ns=(0, 0))
    assert digest(tmp_path / "copy") == before


def test_a_link_to_a_blob_counts_by_its_contents(folder: Path, tmp_path: Path) -> None:
    """A hub's cache names blobs by their hashes; who writes through a link leaves the name as it was."""
    blob = tmp_path / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    shutil.move(folder / "a.safetensors", blob)
    (folder / "a.safetensors").symlink_to(blob)
    before = digest(folder)
    blob.write_bytes(b"z" * SIZE)
    assert digest(folder) != before


def test_files_that_change_during_the_loading_are_an_error(folder: Path) -> None:
    reading = ContentReading(resolve_model(str(folder)))
    (folder / "b.safetensors").write_bytes(b"z" * SIZE)
    with pytest.raises(ModelError, match=r"b\.safetensors changed while the model was loaded"):
        reading.finish()


def test_ranks_with_different_files_do_not_start(folder: Path) -> None:
    files: ModelFiles = resolve_model(str(folder))
    parts = [ContentReading(files).finish(), ContentReading(replace(files, config={"a": 1})).finish()]
    with pytest.raises(ModelError, match="different files"):
        join_parts(parts)


@pytest.mark.parametrize("ranks_on_hosts", [(1, 1), (2, 1), (2, 3)])
def test_hosts_with_other_weights_of_the_same_sizes_do_not_start(
    folder: Path, tmp_path: Path, ranks_on_hosts: tuple[int, int]
) -> None:
    shutil.copytree(folder, tmp_path / "copy")

    def parts() -> list[ContentPart]:
        return [
            ContentReading(resolve_model(str(path)), index=index, count=count).finish()
            for path, count in zip((folder, tmp_path / "copy"), ranks_on_hosts, strict=True)
            for index in range(count)
        ]

    assert join_parts(parts()).hex() == digest(folder)
    with (tmp_path / "copy/b.safetensors").open("r+b") as file:
        file.seek(1500)
        file.write(b"x")
    with pytest.raises(ModelError, match="different files"):
        join_parts(parts())


def test_a_model_without_files_has_no_digest() -> None:
    assert join_parts([]) == b""
