"""Engines on Triton's kernels, in the interpreter, against equal engines on torch's operators.

One small model in `make test`; every family, several ranks and replayed CUDA graphs in `make test-interpreter`. And what a layer
launches for one token, as docs/kernels.md says.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor

from tests.checkpoints import make_checkpoint, prompt
from tests.cpu_threads import NUM_THREADS
from tests.engine_driver import Whole, make_request, run
from tests.graph_recorder import RecorderDevice, recorded
from tests.lost_windows import lose_windows
from tests.thread_ranks import make_sharded_engine
from tests.tiny_checkpoints import tiny_llama
from tests.worker.execution.hand_scheduler import make_runner
from tests.worker.models.deepseek_v4_checkpoint import SLIDING, make_deepseek_v4
from tests.worker.models.test_dense_families import CASES as DENSE
from tests.worker.models.test_moe_families import CASES as MIXTURES, QUANTISED
from tests.worker.models.test_sharded_families import CASES, FAMILIES, make_folder
from transom_core.settings.settings import Settings
from transom_kernels.launch import INTERPRETED, Kernels, prefer
from transom_kernels.paged_attention.triton import tuning, work_items
from transom_worker.execution.replay import backends, decode_sizes
from transom_worker.execution.setup import model_loading
from transom_worker.models.registry import build_model

TOLERANCE = 1e-3
BLOCK = 8
LENGTHS = (9, 26)  # the second beyond windows of 16 and 20 once it goes on, and cut in chunks
NUM_TOKENS = 4
SITUATIONS = ("cold", "hit", "repaired")
SETTINGS = {"block_size": BLOCK, "max_model_len": 64, "max_num_batched_tokens": 16, "dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine wrote in each situation, and the logits of its steps."""

    wholes: dict[str, list[Whole]]
    logits: list[torch.Tensor]
    outcomes: dict[str, int]


@contextmanager
def kernels_of(kernels: Kernels) -> Iterator[None]:
    """Operators compute so; the interpreter, which is one for the process, serves a thread at a time."""
    lock, launch = threading.Lock(), GridExecutor.__call__

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    with prefer(kernels), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", alone)
        yield


def run_engine(
    folder: Path,
    kernels: Kernels,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    size: int = 1,
    situations: tuple[str, ...] = SITUATIONS,
    **settings: Any,
) -> Run:
    """Prompts together in chunks; all but the first again from the cache, and again with lost windows."""
    with kernels_of(kernels):
        engine, ranks = make_sharded_engine(str(folder), size, **(SETTINGS | settings))
        ranks.logits()
        wholes = {}
        for situation in situations:
            if situation == "repaired":
                lose_windows(engine.scheduler.cache)
            chosen = lengths if situation == "cold" else lengths[1:]
            requests = [make_request(f"{situation}{n}", prompt(n), max_tokens=NUM_TOKENS) for n in chosen]
            wholes[situation] = run(engine, requests)
        made = Run(wholes, ranks.logits(), dict(engine.scheduler.stats().outcome_tokens))
        engine.shutdown()
    return made


def check(folder: Path, *, size: int = 1, situations: tuple[str, ...] = SITUATIONS, **settings: Any) -> Run:
    """Tokens and logits are those of torch's operators on one rank."""
    wanted = run_engine(folder, "reference", situations=situations, **settings)
    got = run_engine(folder, "interpreted", size=size, situations=situations, **settings)
    if "hit" in situations:
        assert [whole.num_cached_tokens for whole in got.wholes["hit"]] == [(LENGTHS[1] - 1) // BLOCK * BLOCK]
    check_equal(got, wanted, TOLERANCE)
    return got


def check_equal(got: Run, wanted: Run, tolerance: float) -> None:
    """Both wrote the same tokens, and their logits differ by up to `tolerance`."""
    for situation, wholes in wanted.wholes.items():
        assert [w.token_ids for w in got.wholes[situation]] == [w.token_ids for w in wholes], situation
    for theirs, ours in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
WINDOW = 6  # so small that lost windows of short prompts are cheaper to repair than to compute anew
SEVERAL_RANKS = (
    "gpt_oss", "gpt_oss in MXFP4", "gemma4", "gemma4 with experts", "llama4", "olmo3", "deepseek_v3", "glm_moe_dsa",
    "deepseek_v4",
)  # fmt: skip
# Engines that replay their decode steps as CUDA graphs.
SHORT_TOKENS = 16  # so that levels differ
GRAPH_LENGTHS = (9, 5, 26)  # three sequences in a graph for four
GRAPHED: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 32, "window": 6, "sinks": 2, "window_pattern": "SF"}
ROUNDING = 2e-5  # rows that are added change how torch's products round


def test_windows_and_sinks(tmp_path: Path) -> None:
    tiny_llama(tmp_path, layers=2, hidden=48, heads=4, kv_heads=2)
    settings: dict[str, Any] = {"window": WINDOW, "sinks": 2, "window_pattern": "SF"}
    assert check(tmp_path, situations=("cold", "repaired"), **settings).outcomes["repaired"] > 0


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [*CASES, *QUANTISED, "deepseek_v4"])
def test_every_family(tmp_path: Path, name: str) -> None:
    check(make_folder(tmp_path, name))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", SEVERAL_RANKS)
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks(tmp_path: Path, name: str, size: int) -> None:
    check(make_folder(tmp_path, name), size=size)


@pytest.mark.interpreter
def test_two_runs_give_the_same_bits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_oss")
    first, second = (run_engine(folder, "interpreted") for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first.logits, second.logits, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek_v4"])
def test_a_decode_step_and_a_mixed_step_are_captured_and_checked(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, device = make_folder(tmp_path, name), RecorderDevice()
    monkeypatch.setattr(backends, "capture_device", lambda _: device)
    monkeypatch.setattr(decode_sizes, "MIXED_TOKENS", (12,))
    settings = dict(
        kv_cache_memory_bytes="4MiB", block_size=8, max_model_len=24, max_num_seqs=1, num_threads=NUM_THREADS
    )
    with prefer("interpreted"), caplog.at_level(logging.INFO):
        runner = make_runner(Settings.parse(model=str(folder), dtype="float32", **settings).engine_config())
    has_mixed = name not in (
        "deepseek_v32",
        "glm_moe_dsa",
    )  # their only queries are split, which mixed graphs cannot tell
    assert runner.info.num_graphs == len(device.graphs) == 1 + has_mixed
    assert "differs by" not in caplog.text


@contextmanager
def recording() -> Iterator[RecorderDevice]:
    """Engines that are made within record and replay their steps."""
    device = RecorderDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "capture_device", lambda _: device)
        yield device
    assert sum(graph.num_replays - 1 for graph in device.graphs) > 0, "nothing was replayed"


@pytest.mark.interpreter
def test_replayed_steps_in_hits_and_repairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path, layers=2, hidden=48, heads=4, kv_heads=2)
    with monkeypatch.context() as patch:
        patch.setattr(decode_sizes, "SHORT_TOKENS", SHORT_TOKENS)
        patch.setattr(work_items, "WHOLE_UNITS", 0.5)
        patch.setattr(work_items, "LEAST_HALF_UNITS", 1)
        patch.setattr(tuning, "SPLIT_UNIT_BYTES", 256)
        patch.setattr(decode_sizes, "MIXED_TOKENS", (8, 16))
        wanted = run_engine(tmp_path, "interpreted", lengths=GRAPH_LENGTHS, **GRAPHED)
        with recording():
            got = run_engine(tmp_path, "interpreted", lengths=GRAPH_LENGTHS, **GRAPHED)
    check_equal(got, wanted, ROUNDING)
    assert got.outcomes["repaired"] > 0


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name", ["qwen3_5", "granite4", "nemotron_h", "falcon_h1", "lfm2", "kimi_linear", "glm_moe_dsa", "jamba"]
)
def test_replayed_steps_of_recurrent_layers_and_indexers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences update their states in place, and keep one where a later prompt hits; or queries read 12 rows of up to 32."""
    folder = make_folder(tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    if "index_topk" in config:
        (folder / "config.json").write_text(json.dumps(config | {"index_topk": 12}))
    how: dict[str, Any] = dict(lengths=GRAPH_LENGTHS, situations=("cold", "hit"), max_num_seqs=4, max_model_len=32)
    monkeypatch.setattr(decode_sizes, "MIXED_TOKENS", (8, 16))
    wanted = run_engine(folder, "interpreted", **how)
    with recording():
        got = run_engine(folder, "interpreted", **how)
    check_equal(got, wanted, TOLERANCE)
    assert got.wholes["hit"][-1].num_cached_tokens > 0


DENSE_LAYER = Counter(norm_rows=2, product=4, prepare_and_write=1, attend=1, activate=1)
ROUTER = Counter(score_experts=1, choose_experts=1)  # for every kind of score
EXPERTS = Counter(sort_pairs=1, into_experts=1, out_of_experts=1, sum_experts=1)
MIXTURE_LAYER = Counter(norm_rows=2, product=2, prepare_and_write=1, attend=1) + ROUTER + EXPERTS
# Of a sublayer, for any number of rounds.
HYPER_CONNECTION = Counter(normalise_streams=1, product=1, pre_and_mix=1, post_and_mix=1)
LATENT = Counter(norm_rows=3, product=3, bmm=1, prepare_and_write=1, attend_rows=1, neg=1, rotate=1)
SHARED_EXPERT = Counter(product=2, activate=1, add=1)
WINDOW_LAYER = HYPER_CONNECTION + HYPER_CONNECTION + LATENT + ROUTER + EXPERTS + SHARED_EXPERT
LAYERS = {
    "llama3": DENSE_LAYER,
    "gpt_oss": MIXTURE_LAYER,
    "gemma3": DENSE_LAYER,
    "qwen3_moe": MIXTURE_LAYER,
    "olmo3": DENSE_LAYER + Counter(norm_rows=2),  # QK norms over all heads
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gemma3" else pytest.mark.interpreter) for name in LAYERS]
)
def test_launches_of_a_layer(tmp_path: Path, name: str) -> None:
    assert layer_of(tmp_path, name) == LAYERS[name]


@pytest.mark.exhaustive
def test_launches_of_a_layer_with_hyper_connections(tmp_path: Path) -> None:
    def make(num_layers: int) -> Path:
        kinds: dict[str, Any] = {"layer_types": [SLIDING] * num_layers, "mlp_layer_types": ["moe"] * num_layers}
        return make_deepseek_v4(tmp_path / str(num_layers), num_hidden_layers=num_layers, hc_sinkhorn_iters=20, **kinds)

    assert added_by_a_layer(make) == WINDOW_LAYER


def layer_of(folder: Path, name: str) -> Counter[str]:
    case = (DENSE | MIXTURES)[name]

    def make(num_layers: int) -> Path:
        config = case.config | {"num_hidden_layers": num_layers}
        if name == "qwen3_moe":
            config["mlp_only_layers"] = []
        if name in ("gemma3", "olmo3"):
            config["layer_types"] = ["sliding_attention"] * num_layers
        return make_checkpoint(folder / str(num_layers), case.family, **config)

    return added_by_a_layer(make)


def added_by_a_layer(make: Callable[[int], Path]) -> Counter[str]:
    """What the second layer adds to the first; `make` writes a checkpoint with a given number of layers."""
    one, two = (decoding_step(make(num_layers)) for num_layers in (1, 2))
    two.subtract(one)
    layer = Counter({kind: count for kind, count in two.items() if count})
    layer["product"] = layer.pop("mm", 0) + layer.pop("addmm", 0)
    return layer


def decoding_step(folder: Path, **settings: Any) -> Counter[str]:
    """Launches of the last forward pass of a short request: one token."""
    steps: list[Counter[str]] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        forward = model.forward

        def counting(batch: Any) -> torch.Tensor:
            with recorded(refuses=False) as recording:
                logits: torch.Tensor = forward(batch)
            steps.append(recording.names)
            return logits

        model.forward = counting  # type: ignore[method-assign]
        return model

    with kernels_of("interpreted"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "build_model", build)
        engine, _ = make_sharded_engine(str(folder), 1, **(SETTINGS | settings))
        run(engine, [make_request("one", prompt(3), max_tokens=2)])
        engine.shutdown()
    return steps[-1]
