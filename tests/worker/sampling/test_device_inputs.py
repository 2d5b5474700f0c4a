"""What sampling on a device costs beside its kernels: everything comes by pinned memory, and only rows that change are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.late_uploads import PromptUploads
from tests.worker.sampling.test_sampler import EOS, KINDS, VOCABULARY, add
from transom_kernels.launch import prefer
from transom_worker.sampling import sampler as sampler_module
from transom_worker.sampling.sampler import UPLOADS_PER_STEP, Sampler

NUM_BYTES = -(-VOCABULARY // 8)


def make(kinds: list[str]) -> Sampler:
    sampler = Sampler(eos_token_ids=(EOS,))
    for row, kind in enumerate(kinds):
        add(sampler, row, [1, 2, 3, 4], 2, KINDS[kind])
    return sampler


def grammar(num_rows: int, held: list[int]) -> bytes:
    """Some rows may choose odd tokens alone, the others every token."""
    bits = np.full((num_rows, NUM_BYTES), 0xFF, dtype=np.uint8)
    bits[held] = 0b1010_1010
    return bits.tobytes()


@pytest.mark.parametrize("held", [[], [3], [0, 4, 9], list(range(len(KINDS)))])
def test_all_numbers_come_by_pinned_memory(held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of rows, step after step; a grammar holds some of them."""
    uploads, generator = PromptUploads(per_step=UPLOADS_PER_STEP), torch.Generator().manual_seed(2)
    on_device, on_host = make(list(KINDS)), make(list(KINDS))
    on_device._uploads = uploads
    mask, rows = grammar(len(KINDS), held), list(range(len(KINDS)))
    with prefer("reference"):
        for _ in range(6):
            logits = torch.randn(len(KINDS), VOCABULARY, generator=generator) * 3
            kept, wanted = logits.clone(), on_host.sample(logits, rows, mask).token_ids
            before = len(uploads.copied)
            with monkeypatch.context() as watched:
                for name in ("from_numpy", "tensor", "as_tensor"):
                    watched.setattr(torch, name, lambda *_, **__: pytest.fail("a number goes another way"))
                got: list[int] = on_device._token_ids(logits, on_device._rows_of(rows), mask).tolist()
            assert got == wanted
            assert all(got[row] % 2 for row in held)
            assert torch.equal(logits, kept)
            assert 1 < len(uploads.copied) - before <= UPLOADS_PER_STEP
            for sampler in (on_device, on_host):
                for row, token in zip(rows, wanted, strict=True):
                    sampler.append([row], [token])


class LargestResult(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that operators make, views and results in place not counted."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._logits, self.numel = logits.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self._logits:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize(
    ("kinds", "held"),
    [(["plain"] * 12, [2, 7]), (["plain"] * 9 + ["penalised", "biased", "patient"], []), (["plain"] * 12, [])],
    ids=["grammar", "changes", "none"],
)
def test_rows_that_do_not_change_are_not_copied(
    kinds: list[str], held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, logits = make(kinds), torch.randn(12, VOCABULARY)
    monkeypatch.setattr(sampler_module, "sample_fused", lambda *_: torch.zeros(12, dtype=torch.int64))
    num_changed = len(held) + sum(kind != "plain" for kind in kinds)
    with prefer("reference"), LargestResult(logits) as largest:
        sampler.sample(logits, list(range(12)), grammar(12, held))
    assert largest.numel <= max(12, num_changed * 8 * NUM_BYTES)
