"""Every family on 2, 3 and 4 ranks against one: logits and tokens, through chunks, hits and lost windows.

One rank is compared with transformers in `family_tests`. Heads are 4 with 1 or 2 KV heads, which 3 and 4 ranks hold several times;
or 9 with 3 KV heads, dealt 6 + 3, 3 + 3 + 3 and unevenly to 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import Whole, make_request, run
from tests.lost_windows import lose_windows
from tests.matrices import some_daily
from tests.thread_ranks import ThreadRanks, make_sharded_engine
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.family_tests import FamilyCase
from tests.worker.models.test_dense_families import CASES as DENSE
from tests.worker.models.test_moe_families import CASES as MIXTURES
from tests.worker.models.test_moe_families import QUANTISED, draw_corrections
from transom_worker.engine.engine import Engine

TOLERANCE = 1e-4
NUM_TOKENS = 6
LENGTHS = (5, 41, 90)
NINE_HEADS = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "attention_bias": True,
    "mlp_bias": True,
}
# At the sharpness of its other tests one rank's own logits move by more than the tolerance when its chunks are cut otherwise.
BLUNT = FamilyCase(family="gemma4_text", config=DENSE["gemma4"].config | {"looking": 0.5})
NINE = FamilyCase(family="llama", config=NINE_HEADS)
# As many key heads (Mamba: groups) as the most ranks; three ranks have two, one and one of them.
FOUR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_num_heads": 4, "mamba_n_groups": 4}
FOUR_KEY_HEADS = {
    name: replace(case, config=case.config | {field: value for field, value in FOUR.items() if field in case.config})
    for name, case in (DENSE | MIXTURES).items()
}
CASES = FOUR_KEY_HEADS | {"gemma4": BLUNT, "llama with nine heads": NINE}
VARIANTS = ("llama3", "mistral without windows", "mixtral", "qwen3_moe as it is", "llama4 without norms", *QUANTISED)
FAMILIES = [name for name in (*CASES, "deepseek_v4") if name not in VARIANTS]
SIZES = (2, 3, 4)
EVERY = [*CASES, *QUANTISED, "deepseek_v4"]
# Every day one family of each way to divide heads, norms, residuals and experts, with one size.
DIVIDED = (
    "llama with nine heads", "olmo3", "cohere2", "gemma3", "gemma4", "gemma4 with experts", "mixtral", "gpt_oss", "llama4",
    "mimo_v2_flash", *QUANTISED, "deepseek_v4", "deepseek_v2", "deepseek_v3", "qwen3_next",
    "granite4 with experts", "nemotron_h with experts", "falcon_h1", "glm_moe_dsa", "kimi_linear",
)  # fmt: skip
DAILY = {name: SIZES[at % 3] for at, name in enumerate(DIVIDED)}
DAILY_DENSE = ("gpt_oss", "deepseek_v4")
CHUNKS = {"block_size": 8, "max_model_len": 768, "max_num_batched_tokens": 45, "dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker writes in each situation, and the logits of its steps."""

    wholes: dict[str, list[Whole]]
    logits: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class OneRank:
    """A checkpoint and what one rank makes of it."""

    folder: Path
    answers: Answers


def make_folder(folder: Path, name: str) -> Path:
    if name == "deepseek_v4":
        return make_deepseek_v4(folder, o_groups=4)
    case = CASES[name.split(" in ")[0]]
    plain = make_checkpoint(folder / "plain", case.family, **case.config)
    if name in QUANTISED:
        QUANTISED[name](plain, folder / "packed")
        return folder / "packed"
    draw_corrections(plain)
    return plain


@pytest.fixture(scope="module", params=EVERY)
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRank]:
    folder = make_folder(tmp_path_factory.mktemp("sharded"), request.param)
    engine, ranks = make_sharded_engine(str(folder), 1, **CHUNKS)
    yield OneRank(folder, ask(engine, ranks))
    engine.shutdown()


def ask(engine: Engine, ranks: ThreadRanks) -> Answers:
    """Prompts in small chunks beside each other, from the cache, and with lost windows."""
    ranks.logits()
    wholes = {"cold": put(engine, "cold"), "hit": put(engine, "hit")}
    assert all(whole.num_cached_tokens > 0 for whole in wholes["hit"][1:])
    lose_windows(engine.scheduler.cache)
    wholes["repaired"] = put(engine, "repaired")
    return Answers(wholes, ranks.logits())


def put(engine: Engine, name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Whole]:
    requests = [make_request(f"{name}{i}", prompt(n), max_tokens=NUM_TOKENS) for i, n in enumerate(lengths)]
    return run(engine, requests)


def tokens(wholes: list[Whole]) -> list[list[int]]:
    return [whole.token_ids for whole in wholes]


@pytest.mark.parametrize(
    ("one_rank", "size"), some_daily(product(EVERY, SIZES), daily=DAILY.items()), indirect=["one_rank"]
)
def test_ranks_compute_what_one_rank_does(one_rank: OneRank, size: int) -> None:
    engine, ranks = make_sharded_engine(str(one_rank.folder), size, **CHUNKS)
    got, wanted = ask(engine, ranks), one_rank.answers
    for situation, wholes in wanted.wholes.items():
        assert tokens(got.wholes[situation]) == tokens(wholes), situation
    for theirs, ours in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    engine.shutdown()


@pytest.mark.parametrize(
    "one_rank",
    some_daily(["smollm3", "gemma4", "gpt_oss", "mimo_v2_flash", "deepseek_v4"], daily=DAILY_DENSE),
    indirect=True,
)
def test_without_the_hybrid_cache(one_rank: OneRank) -> None:
    engine, _ = make_sharded_engine(str(one_rank.folder), 3, hybrid_kv_cache=False, **CHUNKS)
    for situation in ("cold", "hit"):
        assert tokens(put(engine, situation)) == tokens(one_rank.answers.wholes[situation])
    engine.shutdown()
