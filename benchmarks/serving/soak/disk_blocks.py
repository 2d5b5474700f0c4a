"""Is every block on the disk of the model that its folder names? Asked of the files when the server has ended.

The header of every file must be right. The prompts of the soak are computed again, by each model alone with an empty cache; where
this leaves a block under the name of one of the soak's, both must have the same numbers.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.cases import COMPLETIONS, Case
from benchmarks.serving.soak.cluster import LAYOUTS, settings_of
from benchmarks.serving.soak.journal import Journal
from transom_core.contract import SamplingParams
from transom_worker.kvcache.tiers.disk.folder import HEADER_BYTES, BlockName, BrokenFile, unpack
from transom_worker.llm import LLM

COMPUTED_AGAIN = "blocks on the disk that were computed again"
ROUNDING = 1e-3  # of the largest number of a block; blocks of two models differ by about that number itself


def check_disk(disk: Path, models: Sequence[Path], cases: Sequence[Case], journal: Journal) -> None:
    """Count the blocks, and break the promise for each one that is of another model."""
    folder = disk / "transom-kv"
    journal.counts["folders of blocks on the disk"] = sum(one.is_dir() for one in folder.iterdir())
    for path in folder.rglob("*.kv"):
        journal.count("blocks on the disk")
        contents_of(path, journal)
    prompts = [prompt for case in cases if case.path == COMPLETIONS for prompt in prompts_of(case)]
    for layout in LAYOUTS[:2]:
        for model in models:
            with tempfile.TemporaryDirectory() as again:
                with LLM(str(model), **settings_of(layout, Path(again))) as llm:
                    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
                compare(folder, Path(again, "transom-kv"), journal)
    if not journal.counts[COMPUTED_AGAIN]:
        journal.broke(promises.FILES, "no block on the disk could be computed again")


def prompts_of(case: Case) -> list[str | dict[str, list[int]]]:
    """All prompts of a request, as `LLM` takes them."""
    prompt = case.body["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    return [{"prompt_token_ids": ids} for ids in (prompt if isinstance(prompt[0], list) else [prompt])]


def compare(folder: Path, again: Path, journal: Journal) -> None:
    """Compare the blocks that both folders have."""
    for path in again.rglob("*.kv"):
        ours = folder / path.relative_to(again)
        if ours.exists():
            journal.count(COMPUTED_AGAIN)
            got, want = (np.frombuffer(contents_of(one, journal), np.float32) for one in (ours, path))
            if got.shape != want.shape or np.abs(got - want).max() > ROUNDING * np.abs(want).max():
                journal.broke(promises.FILES, f"{ours} has other numbers")


def contents_of(path: Path, journal: Journal) -> bytes:
    """The contents of a file, which must be the block of its name, and of the fingerprint of its folder."""
    data, (digest, _, group) = path.read_bytes(), path.stem.partition("-")
    fingerprint = data[8:40]
    try:
        if fingerprint.hex()[:32] != path.parents[1].name:
            raise BrokenFile(f"its fingerprint is {fingerprint.hex()}")
        return unpack(data, BlockName(fingerprint, bytes.fromhex(digest), int(group)), len(data) - HEADER_BYTES)
    except BrokenFile as wrong:
        journal.broke(promises.FILES, f"{path}: {wrong}")
        return b""
