"""Quantised KV caches: every family stays near its own logits, on several ranks, too, and other formats are refused.

A *bound* is the mean KL divergence in nats of four next-token distributions from those with a float32 cache. These checkpoints have
random weights and logits with a standard deviation of 4, which amplify every error; among random experts a close choice may fall
otherwise. The demo model's figures are in docs/quantised_kv.md. torch computes here; `tests/kernels` compares kernels with it.
That what is cached depends on a token and its prefix alone is tested in `execution/test_cached_bits.py`.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import prompt
from tests.engine_driver import make_request, run
from tests.matrices import some_daily
from tests.thread_ranks import make_sharded_engine
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.test_moe_families import CASES as MIXTURES
from tests.worker.models.test_sharded_families import CASES, make_folder
from transom_core.errors import ConfigError
from transom_core.model_config.mla import MLA_FAMILIES
from transom_kernels.quantised_kv import dequantise_rows

LENGTHS = (5, 41, 90, 200)
FORMATS = ("fp8", "int8", "int4")
BOUNDS = {"fp8": 0.25, "int8": 0.01, "int4": 2.5}
BOUNDS_WITH_EXPERTS = {"fp8": 1.0, "int8": 0.2, "int4": 4.0}
NAMES = [name for name in CASES if " in " not in name and name not in MLA_FAMILIES]
# Every day families of each kind of layer: plain, windows, shared caches, experts, learned sinks, chunks, narrow values.
KINDS = ("llama3", "gemma3", "gemma4", "gemma4 with experts", "gpt_oss", "llama4", "mimo_v2_flash")
DAILY = [(name, FORMATS[at % 3]) for at, name in enumerate(KINDS)]
pytestmark = pytest.mark.usefixtures("torch_operators")
CHUNKS: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "max_num_batched_tokens": 45, "dtype": "float32"}


def log_probabilities(folder: Path, num_ranks: int = 1, **settings: Any) -> torch.Tensor:
    """Of the token behind each of the prompts, [prompts, vocabulary]. Their later chunks read what the first ones wrote."""
    engine, ranks = make_sharded_engine(str(folder), num_ranks, **(CHUNKS | settings))
    try:
        rows = []
        for length in LENGTHS:
            run(engine, [make_request(f"{length}", prompt(length), max_tokens=1)])
            rows.append(ranks.logits()[-1][-1].float())
        return torch.stack(rows).log_softmax(dim=-1)
    finally:
        engine.shutdown()


def divergence(folder: Path, exact: torch.Tensor, num_ranks: int = 1, **settings: Any) -> float:
    got = log_probabilities(folder, num_ranks, **settings)
    return float((exact.exp() * (exact - got)).sum(dim=-1).mean())


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quantised"), request.param)


@pytest.mark.parametrize(("folder", "asked"), some_daily(product(NAMES, FORMATS), daily=DAILY), indirect=["folder"])
def test_every_family_stays_near_its_logits(folder: Path, asked: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["folder"]
    exact = log_probabilities(folder)
    bound = (BOUNDS_WITH_EXPERTS if name in MIXTURES or "experts" in name else BOUNDS)[asked]
    assert 0 < divergence(folder, exact, kv_cache_dtype=asked) < bound


@pytest.mark.parametrize("folder", some_daily(MLA_FAMILIES, daily=["deepseek_v2"]), indirect=True)
def test_latent_rows_in_other_formats_are_refused(folder: Path) -> None:
    log_probabilities(folder)  # also computes a step without rows, the last one of each request
    with pytest.raises(ConfigError, match=r"asks for int8 in KV group latent"):
        make_sharded_engine(str(folder), 1, **CHUNKS, kv_cache_dtype="int8")


@pytest.mark.parametrize("folder", ["llama3"], indirect=True)
@pytest.mark.parametrize("asked", some_daily(FORMATS, daily=["int8"]))
def test_a_wrong_scale_would_show(monkeypatch: pytest.MonkeyPatch, folder: Path, asked: str) -> None:
    exact = log_probabilities(folder)
    name = "transom_kernels.paged_attention.reference.dequantise_rows"
    monkeypatch.setattr(name, lambda elements, scale: dequantise_rows(elements, scale.roll(1, dims=-1)))
    assert divergence(folder, exact, kv_cache_dtype=asked) > BOUNDS[asked]


@pytest.mark.parametrize(
    ("folder", "asked", "size"),
    some_daily(
        product(["gpt_oss", "gemma4", "llama with nine heads"], FORMATS, [2, 3]), daily=[("gpt_oss", "int4", 3)]
    ),
    indirect=["folder"],
)
def test_ranks_stay_near_one_rank(folder: Path, asked: str, size: int) -> None:
    """Sums of several ranks round otherwise, and a number at the edge of two stored ones may fall to the other side."""
    one_rank = log_probabilities(folder, kv_cache_dtype=asked)
    assert divergence(folder, one_rank, size, kv_cache_dtype=asked) < BOUNDS[asked] / 50


def test_latent_groups_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_deepseek_v4(tmp_path)
    for asked, message in (
        ("int8", r"int8 in KV group compressed_4, whose rows are keys and values of all heads"),
        ("fp8", r"fp8 in KV group compressed_4, .*run in the model's format, float32, alone: give auto"),
        ("window=bfloat16", r"bfloat16 in KV group window_16, .*give auto"),
        ("full=int8", r"names full, and the KV groups of this model are .*window_16 \(kind window\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sharded_engine(str(folder), 1, **CHUNKS, kv_cache_dtype=asked)


@pytest.mark.parametrize("folder", ["llama3"], indirect=True)
def test_a_format_that_is_neither_the_models_nor_quantised_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"bfloat16 in KV group full, and the model runs in float32; give auto, fp8, int8, int4"
    ):
        make_sharded_engine(str(folder), 1, **CHUNKS, kv_cache_dtype="bfloat16")
    engine, _ = make_sharded_engine(str(folder), 1, **CHUNKS, kv_cache_dtype="float32")
    assert engine.info.plan.kv_dtype == "float32"
    engine.shutdown()
