"""Each rank reads and keeps its own part of a checkpoint, quantised weights included."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import SIZES, make_checkpoint
from tests.matrices import matrix
from tests.thread_ranks import RankThreads, make_sharded_engine
from tests.worker.models.quantised_checkpoints import to_mxfp4
from tests.worker.models.test_sharded_families import CHUNKS, make_folder, put
from transom_core.errors import ConfigError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.resolve import resolve_model
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.registry import build_model
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights, WeightsView
from transom_worker.models.weights.load import load_weights

CUT = ("embed_tokens", "lm_head", "_proj", "experts", "sinks")  # and their biases; what is left are norms and routers
WIDE = {"hidden_size": 96, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


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


CASES = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 512, "attention_chunk_size": 16},
    "olmo3": {"sliding_window": 16},
}


@pytest.mark.parametrize(("name", "size"), matrix([*CASES, "gpt_oss in MXFP4"], [2, 4], strength=1))
def test_a_rank_reads_its_part_alone(tmp_path: Path, name: str, size: int) -> None:
    family = name.split()[0]
    folder = make_checkpoint(tmp_path / "plain", family, **(WIDE | CASES[family]))
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
    for family, config in {"llama": {}, "cohere2": {"sliding_window": 16}, "qwen3_moe": CASES["qwen3_moe"]}.items():
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
