"""Prompts whose latent rows are expanded into keys and values: which ones, in which pieces of a step, and what comes out."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import run
from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.worker.models.family_tests import asked, make_roomy_engine
from tests.worker.models.test_moe_families import CASES
from transom_core.model_config.mla import Mla
from transom_kernels.launch import Kernels, has_cpu_kernels, prefer
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_worker.models import expanded_prompts
from transom_worker.models.expanded_prompts import LEAST_TOKENS, is_expanded, pieces_of

V3 = Mla(query_rank=1536, latent_rank=512, plain_size=128, rope_size=64, value_size=128, scale=192**-0.5)
SMALL = Mla(query_rank=0, latent_rank=24, plain_size=12, rope_size=8, value_size=10, scale=1.0)  # as in the checkpoints


def test_whole_prompts_are_expanded_and_short_ends_of_long_ones_are_not():
    counts = (1, LEAST_TOKENS - 1, LEAST_TOKENS, 8192)
    assert [is_expanded(V3, 0, count) for count in counts] == [False, False, True, True]
    assert [is_expanded(V3, 100_000, count) for count in (1, 64, 170, 171, 8192)] == [False, False, False, True, True]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_read_what_the_step_reads(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Attention over gathered blocks, by the tables of the pieces, is that of the whole step bit by bit: no key is misplaced."""
    rng = random.Random(seed)
    monkeypatch.setattr(expanded_prompts, "MOST_BYTES", rng.choice([1, 100, 1 << 20]))
    sequences = [
        Sequence(start=rng.choice([0, 3, 60]), count=rng.choice([0, 1, 2, 15, 16, 17, 40]))
        for _ in range(rng.randint(1, 8))
    ]
    case = make_case(sequences, Shape(heads=3, kv_heads=1, size=8), seed)
    if seed % 2:  # Triton kernels read the table on the device, and the host has no copy
        case.batch.block_table_host = []
    expected = paged_attention_reference(make_case(sequences, Shape(heads=3, kv_heads=1, size=8), seed).inputs())
    pieces = pieces_of(case.batch, SMALL, token_bytes=1)
    assert bool(pieces) == any(is_expanded(SMALL, one.start, one.count) for one in sequences)
    assert [a.rows.stop for a in pieces[:-1]] == [b.rows.start for b in pieces[1:]]
    assert not pieces or (pieces[0].rows.start, pieces[-1].rows.stop) == (0, len(case.q))
    for a, b in pairwise(pieces):
        assert a.blocks is not None or b.blocks is not None, "two absorbed pieces could be one"
    for piece in pieces:
        k, v = case.k_cache, case.v_cache
        if piece.blocks is not None:
            k, v = (cache.index_select(0, piece.blocks) for cache in (k, v))
        piece.batch.block_table_host = piece.batch.block_table.tolist()
        out = paged_attention_reference(
            PagedInputs(q=case.q[piece.rows], k_cache=k, v_cache=v, batch=piece.batch, scale=0.3)
        )
        assert torch.equal(out, expected[piece.rows])
        assert (
            piece.blocks is None
            or len(piece.batch.count_host) == 1
            or len(piece.blocks) * 4 < expanded_prompts.MOST_BYTES + 32
        )


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_engines_answer_alike_with_and_without(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Absorbed attention rounds otherwise. With the CPU kernels, the turns of heads and a prompt's neighbours change no bit."""
    case = CASES["deepseek_v3"]
    make_checkpoint(tmp_path, case.family, **case.config)
    lengths = (100, 3, 57, 16)

    def answers(*, alone: bool = False, **settings: Any) -> list[tuple[list[int], list[float]]]:
        engine = make_roomy_engine(tmp_path, enable_prefix_caching=False, **settings)
        requests = [asked(str(length), prompt(length)) for length in lengths]
        wholes = [run(engine, [one])[0] for one in requests] if alone else run(engine, requests)
        return [(whole.token_ids, [one.chosen.logprob for one in whole.logprobs]) for whole in wholes]

    with prefer(kernels):
        whole = answers()
        monkeypatch.setattr(expanded_prompts, "MOST_BYTES", 4096)
        in_turns, alone = answers(), answers(alone=True)
        windows = answers(window=24)
        monkeypatch.setattr(expanded_prompts, "is_expanded", lambda *_: False)
        absorbed = answers()
        assert answers(window=24) == windows, "layers with windows expand nothing"
    for others in (in_turns, alone, absorbed):
        assert [tokens for tokens, _ in others] == [tokens for tokens, _ in whole]
        for (_, logprobs), (_, of_others) in zip(whole, others, strict=True):
            assert logprobs == pytest.approx(of_others, abs=1e-4)
    assert whole != absorbed
    if kernels == "auto" and has_cpu_kernels():
        assert whole == in_turns == alone
