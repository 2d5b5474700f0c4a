"""Rows with KV policies on one rank, against transformers with the same mask: answers, attention mass, quality, long streams."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoints import load_oracle, make_checkpoint, prompt
from tests.matrices import some_daily
from tests.tiny_checkpoints import masked, visible
from tests.worker.execution.hand_scheduler import engine_config, make_runner
from tests.worker.execution.policy_scheduler import PolicyScheduler
from transom_core.contract import HeavyPolicy, WindowPolicy
from transom_kernels.launch import prefer
from transom_worker.execution.runner import ModelRunner

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"layer_types": ["full_attention"] * 4, "attn_logit_softcapping": 5.0},
    "olmo3": {"layer_types": ["full_attention"] * 4},
    "cohere2": {"layer_types": ["full_attention"] * 4},
    "gpt_oss": {"layer_types": ["full_attention"] * 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"use_sliding_window": False, "no_rope_layer_interval": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
MIN_MARGIN = 1e-4  # a closer choice may be the other one by rounding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
        return made[family]

    return make


def start_runner(folder: Path, **settings: Any) -> ModelRunner:
    return make_runner(engine_config(folder, pool_bytes=2**21, dtype="float32", **settings))


Mask = Callable[
    [int, int, int], torch.Tensor
]  # of a layer, for the numbers of queries and keys; both are all tokens here


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: list[int], make_mask: Mask) -> torch.Tensor:
    with masked(model, make_mask):
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def check_greedy(model: PreTrainedModel, tokens: list[int], num_prompt: int, make_mask: Mask) -> None:
    """Every token after the prompt is the model's own choice, except where its margin is that of rounding."""
    logits = logits_of(model, tokens[:-1], make_mask)[num_prompt - 1 :]
    best = logits.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > MIN_MARGIN
    assert clear.float().mean() > 0.9
    assert best.indices[clear, 0].tolist() == torch.tensor(tokens[num_prompt:])[clear].tolist()


def window_mask(window: int | None, sinks: int) -> Mask:
    return lambda _layer, queries, keys: visible(queries, keys, window=window, sinks=sinks)


@pytest.mark.parametrize("family", some_daily(FAMILIES, daily=["qwen3", "olmo3", "gpt_oss", "smollm3"]))
def test_a_window_with_sinks_equals_transformers_with_the_same_mask(family: str, checkpoint: Any) -> None:
    folder = checkpoint(family)
    hand, model = PolicyScheduler(start_runner(folder)), load_oracle(folder)
    tokens = prompt(150)
    hand.add_row(0, tokens, WindowPolicy(sinks=5, window=21))
    for count in (40, 1, 63, 46):
        hand.step({0: count})
    hand.decode(0, 30)
    assert len(hand.sequences[0].blocks[0]) <= 2 + -(-21 // 4) + 1
    check_greedy(model, hand.sequences[0].tokens, 150, window_mask(21, 5))


def test_attention_mass_is_that_of_transformers_by_block(checkpoint: Any) -> None:
    folder = checkpoint("qwen3")
    hand, model = PolicyScheduler(start_runner(folder)), load_oracle(folder)
    hand.add_row(0, prompt(30), WindowPolicy(sinks=3, window=11))
    results = [hand.step({0: 17}, mass=True), hand.step({0: 13}, mass=True), *hand.decode(0, 6, mass=True)]
    assert hand.runner.usage.num_graph_steps == 6
    tokens = hand.sequences[0].tokens[:-1]
    with masked(model, window_mask(11, 3)), torch.inference_mode():
        attentions = model(torch.tensor([tokens]), use_cache=False, output_attentions=True).attentions
    share = torch.stack(attentions).mean(dim=(0, 1, 2))  # [queries, keys]
    ends = [0, 17, *range(30, 37)]
    for result, (start, end) in zip(results, itertools.pairwise(ends), strict=True):
        found = result.attention_mass[0]
        first = max(0, start - 11 + 1) // 4
        blocks = [0, *range(max(1, first), -(-end // 4))]
        expected = [float(share[start:end, 4 * block : 4 * block + 4].sum()) for block in blocks]
        assert found == pytest.approx(expected, abs=1e-5)
        assert sum(found) == pytest.approx(end - start, abs=1e-4)


def test_quality_compares_with_attention_to_all_that_was_dropped(checkpoint: Any) -> None:
    folder = checkpoint("llama")
    hand, model = PolicyScheduler(start_runner(folder)), load_oracle(folder)
    hand.add_row(0, prompt(60), WindowPolicy(sinks=3, window=11), quality=True)
    hand.add_row(1, prompt(20))
    hand.step({0: 60})
    hand.step({1: 20, 0: 1}, measure=True)
    results = [hand.step({1: 1, 0: 1}, measure=True) for _ in range(3)]
    tokens = hand.sequences[0].tokens[:-1]
    for result, length in zip(results, (62, 63, 64), strict=True):

        def last_row_sees_all(_layer: int, queries: int, keys: int) -> torch.Tensor:
            mask = visible(queries, keys, window=11, sinks=3)
            mask[-1] = True
            return mask

        log_p = logits_of(model, tokens[:length], window_mask(11, 3))[-1].double().log_softmax(-1)
        with masked(model, last_row_sees_all), torch.inference_mode():
            out = model(torch.tensor([tokens[:length]]), use_cache=False, output_attentions=True)
        log_q = out.logits[0, -1].double().log_softmax(-1)
        quality = result.quality[1]
        assert quality.kl == pytest.approx(float((log_q.exp() * (log_q - log_p)).sum()), rel=1e-3, abs=1e-5)
        assert quality.kl > 0.01
        assert quality.top_token_agrees == bool(log_p.argmax() == log_q.argmax())
        attention = torch.stack(out.attentions).mean(dim=(0, 1, 2))[-1]
        assert quality.dropped_mass == pytest.approx(float(attention[3 : length - 11].sum()), abs=1e-4)


def test_blocks_removed_from_the_middle_are_not_read(checkpoint: Any) -> None:
    """As if the mask had hidden these keys from the row on that first lacks them."""
    folder = checkpoint("llama")
    hand, model = PolicyScheduler(start_runner(folder)), load_oracle(folder)
    hand.add_row(0, prompt(41), HeavyPolicy(sinks=4, budget=32), quality=True)
    hand.step({0: 41})
    hand.decode(0, 2)
    for logical in (3, 7, 8):
        hand.remove(0, logical)
    hand.decode(0, 6)
    hand.remove(0, 10)
    measured = hand.decode(0, 4, measure=True)

    def mask(_layer: int, queries: int, keys: int) -> torch.Tensor:
        seen = visible(queries, keys, window=None, sinks=0)
        for logical, first_row in ((3, 43), (7, 43), (8, 43), (10, 49)):
            seen[first_row:, 4 * logical : 4 * logical + 4] = False
        return seen

    check_greedy(model, hand.sequences[0].tokens, 41, mask)
    assert all(0 < result.quality[0].dropped_mass < 1 for result in measured)


@pytest.mark.parametrize("kernels", some_daily(["auto", "reference"], daily=["auto"]))
def test_streams_beyond_the_trained_length_rotate_a_second_query_for_sinks(
    kernels: Any, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "short", "llama", max_position_embeddings=64)
    from transformers.models.llama import modeling_llama

    model = load_oracle(folder)
    frequency = model.model.rotary_emb.inv_freq
    plain = modeling_llama.eager_attention_forward

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        length = query.shape[2]
        back = (torch.arange(length).clamp(max=63) - torch.arange(length))[:, None] * frequency
        cos, sin = torch.cat([back.cos()] * 2, -1), torch.cat([back.sin()] * 2, -1)
        sink_query = query * cos + modeling_llama.rotate_half(query) * sin
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ keys.transpose(2, 3)
        scores[..., :6] = (sink_query @ keys.transpose(2, 3))[..., :6]
        weights = (scores * options["scaling"] + mask).softmax(-1)
        return (weights @ values).transpose(1, 2).contiguous(), weights

    with prefer(kernels):
        hand = PolicyScheduler(start_runner(folder))
        hand.add_row(0, prompt(50), WindowPolicy(sinks=6, window=20))
        hand.add_row(1, prompt(40, salt=1))
        hand.step({0: 50, 1: 14})
        hand.step({0: 1, 1: 26})
        for _ in range(15):
            hand.step({0: 1, 1: 1})
        hand.decode(0, 120)
    assert max(len(row.blocks[0]) for row in hand.sequences.values()) <= 15
    # below the trained length: the ordinary mask
    check_greedy(model, hand.sequences[0].tokens[:64], 50, window_mask(20, 6))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    check_greedy(model, hand.sequences[0].tokens, 50, window_mask(20, 6))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", plain)
    check_greedy(model, hand.sequences[1].tokens, 40, window_mask(None, 0))
