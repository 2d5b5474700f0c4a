"""The sampler by Triton's kernels chooses what it chooses by torch's operators: all kinds of rows in one batch, step after step."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from tests.worker.sampling.test_sampler import KINDS, VOCABULARY, add
from transom_core.contract import SamplingParams
from transom_kernels.launch import INTERPRETED, prefer
from transom_kernels.sample import gpu
from transom_worker.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5])
def test_parameters_of_any_number_of_rows(num_rows: int) -> None:
    kinds, logits = list(KINDS)[-num_rows:], torch.randn(num_rows, VOCABULARY) * 3
    sampler, mask = Sampler(eos_token_ids=(3,)), bytes(range(1, 1 + num_rows * -(-VOCABULARY // 8)))
    for row, kind in enumerate(kinds):
        add(sampler, row, [1, 2, 3, 4], 2, KINDS[kind])
    kept = logits.clone()
    with prefer("reference"):
        wanted = sampler.sample(logits, list(range(num_rows)), mask)
    with prefer("interpreted"):
        assert sampler.sample(logits, list(range(num_rows)), mask) == wanted
    assert logits.equal(kept)


class Watched:
    """A kernel; keeps what a launch makes Triton compile for: tensors that begin at multiples of 16 bytes, numbers by 1 and 16."""

    def __init__(self, kernel: Any, seen: set[tuple[object, ...]], ignored: set[int]) -> None:
        self._kernel, self._seen, self._ignored = kernel, seen, ignored

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            kinds = (
                value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else (value == 1, value % 16 == 0)
                for at, value in enumerate(arguments)
                if at not in self._ignored
            )
            self._seen.add((*kinds, *constants.items()))
            self._kernel[grid](*arguments, **constants)

        return launch


def test_no_batch_makes_triton_compile_what_one_row_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks of 64 ids: three numbers a block begin at multiples of 16 bytes only if they are tensors of their own."""
    kernels = ("block_maxima", "sample_rows", "apply_logit_changes")
    seen: dict[str, set[tuple[object, ...]]] = {name: set() for name in kernels}
    for name, calls in seen.items():
        ignored = {6} if name == "apply_logit_changes" else set()  # the number of changes, which is not specialised
        monkeypatch.setattr(gpu, name, Watched(getattr(gpu, name), calls, ignored))
    kinds = ["penalised", "greedy", "top_k", "greedy_penalised", "top_p"]  # the first is what a warm-up samples
    for num_rows in (1, 2, 5):
        sampler = Sampler()
        for row, kind in enumerate(kinds[:num_rows]):
            add(sampler, row, list(range(row + 3)), 2, KINDS[kind])
        with prefer("interpreted"):
            sampler.sample(torch.randn(num_rows, 384), list(range(num_rows)))
    assert {name: len(calls) for name, calls in seen.items()} == dict.fromkeys(kernels, 1)


def test_top_k_beyond_any_vocabulary_is_off() -> None:
    sampler, logits = Sampler(), torch.randn(1, VOCABULARY)
    add(sampler, 0, [1], 1, SamplingParams(top_k=2**40))
    wanted = sampler.sample(logits, [0])
    with prefer("interpreted"):
        assert sampler.sample(logits, [0]) == wanted
