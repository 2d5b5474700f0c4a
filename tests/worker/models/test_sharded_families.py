"""Every family on 2, 3 and 4 ranks against one: logits and tokens, through chunks, hits and lost windows. And each rank reads and
keeps its own part of a checkpoint, quantised weights included.

One rank is compared with transformers in `family_tests`. Heads are 4 with 1 or 2 KV heads, which 3 and 4 ranks hold several times;
or 9 with 3 KV heads, dealt 6 + 3, 3 + 3 + 3 and unevenly to 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.checkpoints import SIZES, make_checkpoint, prompt
from tests.engine_driver import Whole, make_request, run
from tests.lost_windows import lose_windows
from tests.matrices import matrix, some_daily
from tests.thread_ranks import RankThreads, ThreadRanks, make_sharded_engine
from tests.worker.models import test_moe_families
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.family_tests import FamilyCase
from tests.worker.models.quantised_checkpoints import to_mxfp4
from tests.worker.models.test_dense_families import CASES as DENSE
from tests.worker.models.test_moe_families import CASES as MIXTURES, QUANTISED
from transom_core.errors import ConfigError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.resolve import resolve_model
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.registry import build_model
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights, WeightsView
from transom_worker.models.weights.load import load_weights

TOLERANCE = 1e-4
NUM_TOKENS = 6
LENGTHS = (5, 41, 90)
NINE_HEADS = dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, attention_bias=True, mlp_bias=True)
# At the sharpness of its other tests one rank's own logits move by more than the tolerance when its chunks are cut otherwise.
BLUNT = FamilyCase(family="gemma4_text", config=DENSE["gemma4"].config | {"looking": 0.5})
NINE = FamilyCase(family="llama", config=NINE_HEADS)
# As many key heads as the most ranks; three ranks have two, one and one of them. Of Mamba-2's groups, whose heads ranks divide,
# there are one (Granite), two (Falcon) and four (Nemotron).
FOUR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_num_heads": 4}
FOUR_KEY_HEADS = {
    name: replace(case, config=case.config | {field: value for field, value in FOUR.items() if field in case.config})
    for name, case in (DENSE | MIXTURES).items()
}
CASES = FOUR_KEY_HEADS | {"gemma4": BLUNT, "llama with nine heads": NINE}
VARIANTS = ("llama3", "mistral without windows", "mixtral", "qwen3_moe as it is", "llama4 without norms", *QUANTISED)
FAMILIES = [name for name in (*CASES, "deepseek_v4") if name not in VARIANTS]
NUM_RANKS = (2, 3, 4)
EVERY = [*CASES, *QUANTISED, "deepseek_v4"]
# Every day one family of each way to divide heads, norms, residuals and experts, with one size.
DIVIDED = (
    "llama with nine heads", "olmo3", "cohere2", "gemma3", "gemma4", "gemma4 with experts", "mixtral", "gpt_oss", "llama4",
    "mimo_v2_flash", *QUANTISED, "deepseek_v4", "deepseek_v2", "deepseek_v3", "qwen3_next",
    "granite4 with experts", "nemotron_h with experts", "falcon_h1", "glm_moe_dsa", "kimi_linear", "jamba", "step3p5",
)  # fmt: skip
DAILY = {name: NUM_RANKS[at % 3] for at, name in enumerate(DIVIDED)}
DAILY_DENSE = ("gpt_oss", "deepseek_v4")
CHUNKS = {"block_size": 8, "max_model_len": 768, "max_num_batched_tokens": 45, "dtype": "float32"}
CUT = ("embed_tokens", "lm_head", "_proj", "experts", "sinks")  # and their biases; what is left are norms and routers
WIDE = {"hidden_size": 96, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


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
    return test_moe_families.make_folder(folder, name, CASES)


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
    return run(engine, [make_request(f"{name}{i}", prompt(n), max_tokens=NUM_TOKENS) for i, n in enumerate(lengths)])


def tokens(wholes: list[Whole]) -> list[list[int]]:
    return [whole.token_ids for whole in wholes]


@pytest.mark.parametrize(
    ("one_rank", "size"), some_daily(product(EVERY, NUM_RANKS), daily=DAILY.items()), indirect=["one_rank"]
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


class CountedWeights(WeightsView):
    """Remembers how many elements were asked for by name."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.num_elements: dict[str, int] = {}

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        tensor = super().__call__(name, shape=shape, part=part)
        self.num_elements[name] = self.num_elements.get(name, 0) + tensor.numel()
        return tensor


def build(folder: Path, parallel: Parallel) -> tuple[Model, dict[str, int]]:
    files = resolve_model(str(folder))
    weights = CountedWeights(load_weights(files))
    model = build_model(read_architecture(files.config), weights, dtype=torch.float32, device="cpu", parallel=parallel)
    return model, weights.num_elements


def is_cut(name: str, family: str) -> bool:
    if family == "olmo3" and name.endswith(("q_norm.weight", "k_norm.weight")):  # over all heads
        return True
    return any(part in name for part in CUT) and not name.endswith(("o_proj.bias", "down_proj.bias", "down_proj_bias"))


LOADED = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 512, "attention_chunk_size": 16},
    "olmo3": {"sliding_window": 16},
}


@pytest.mark.parametrize(("name", "size"), matrix([*LOADED, "gpt_oss in MXFP4"], [2, 4], strength=1))
def test_a_rank_reads_its_part_alone(tmp_path: Path, name: str, size: int) -> None:
    family = name.split()[0]
    folder = make_checkpoint(tmp_path / "plain", family, **(WIDE | LOADED[family]))
    if name != family:
        to_mxfp4(folder, tmp_path / "packed")
        folder = tmp_path / "packed"
    whole, elements = build(folder, Parallel())
    threads = RankThreads(size)
    parts = threads.on_each(lambda parallel: build(folder, parallel))
    threads.close()
    for tensor, count in elements.items():
        read = [found[tensor] for _, found in parts]
        assert read == [count // size if is_cut(tensor, family) else count] * size, tensor
    bytes_of = {model.vocab.start: model.weight_bytes for model, _ in parts}
    assert sorted(bytes_of) == [512 // size * rank for rank in range(size)]
    replicated = sum(bytes_of.values()) - whole.weight_bytes
    alike = sum(count for tensor, count in elements.items() if not is_cut(tensor, family)) * 4
    assert 0 < replicated <= (size - 1) * alike * 2  # a head norm's weight is kept once for each head


@pytest.mark.parametrize(("name", "quantization"), [("llama3", "none"), ("mixtral", "none"), ("llama3", "int8")])
def test_packed_and_int8_weights_are_cut_too(tmp_path: Path, name: str, quantization: str) -> None:
    """In bfloat16, so that CPUs pack the weights: two ranks write what one does but for rounding."""
    folder = make_folder(tmp_path, name)
    kept = {}
    for size in (1, 2):
        settings = CHUNKS | {"dtype": "bfloat16", "quantization": quantization}
        engine, ranks = make_sharded_engine(str(folder), size, **settings)
        put(engine, "once", (90,))
        kept[size] = ranks.logits()[1]
        engine.shutdown()
    correlation = torch.corrcoef(torch.stack((kept[1][0], kept[2][0])))[0, 1]
    assert correlation > (0.999 if quantization == "none" else 0.98)


def test_one_sum_a_sublayer(tmp_path: Path) -> None:
    """After the embedding: attention and feed-forward layer each, both at once where they stand side by side.

    Counted without recorded decode steps, because a step that is recorded is also computed a second time, to check the recording.
    """
    sums = {}
    for family, config in {"llama": {}, "cohere2": {"sliding_window": 16}, "qwen3_moe": LOADED["qwen3_moe"]}.items():
        folder = make_checkpoint(tmp_path / family, family, num_hidden_layers=4, **config)
        engine, ranks = make_sharded_engine(str(folder), 2, **CHUNKS, enforce_eager=True)
        ranks.threads.rendezvous.sum_widths.clear()
        put(engine, "once", (5,))
        sums[family] = ranks.threads.rendezvous.sum_widths.count(SIZES["hidden_size"]) / len(ranks.logits())
        engine.shutdown()
    assert sums == {"llama": 9, "cohere2": 5, "qwen3_moe": 9}


def test_too_many_ranks_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")

    def start(size: int) -> ExecutorInfo:
        return make_sharded_engine(str(folder), size, **CHUNKS)[0].info

    with pytest.raises(ConfigError, match=r"tensor-parallel-size is 5; this llama model has 4 query heads.*at most 4"):
        start(5)
