"""A checkpoint whose files change while workers run: no KV of the old model is ever used by the new one, or the other way round."""

import shutil
from pathlib import Path

import pytest

from tests.cluster.router.engine_workers import HYBRID, LocalPeers, at_worker, evict_all, request
from tests.tiny_checkpoints import tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed) for seed in (0, 1)]


@pytest.mark.parametrize("how", ["written over", "replaced"])
async def test_a_folder_that_changes_in_place(models: list[Path], tmp_path: Path, fast_reads: None, how: str) -> None:
    """A worker computes with the files that it loaded. The next one has another identity, and uses no file of its disk tier."""
    folder, disk = tmp_path / "model", tmp_path / "disk"
    peers, settings = LocalPeers(), {**HYBRID, "disk_cache": str(disk)}
    shutil.copytree(models[0], folder)
    first = peers.start(folder, **settings)
    old, _ = await at_worker(first, request("warm"))
    weights, newer = folder / "model.safetensors", (models[1] / "model.safetensors").read_bytes()
    if how == "replaced":
        weights.unlink()
    with weights.open("r+b" if how == "written over" else "wb") as file:
        file.write(newer)
    evict_all(first)
    tokens, _ = await at_worker(first, request("after"))
    assert tokens == old
    second = peers.start(folder, **settings)
    assert (await second.info()).identity not in ("", (await first.info()).identity)
    first.shutdown()
    assert list(disk.rglob("*.kv"))
    new, usage = await at_worker(second, request("second"))
    assert new != old
    assert (usage.num_cached_tokens, usage.num_disk_tokens) == (0, 0)
    second.shutdown()
    third = peers.start(folder, **settings)
    tokens, usage = await at_worker(third, request("third"))
    assert tokens == new
    assert usage.num_disk_tokens > 0  # the second one's files
    third.shutdown()
    again = peers.start(models[0], **settings)
    tokens, usage = await at_worker(again, request("again"))
    assert tokens == old
    assert usage.num_disk_tokens > 0  # the first one's: a copy of the same files is the same model
    again.shutdown()
