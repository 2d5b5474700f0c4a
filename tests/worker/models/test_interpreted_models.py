"""Engines on Triton's kernels, in the interpreter, against equal engines on torch's operators.

Two small models in `make test`, more in `make test-all`; every family and several ranks in `make test-interpreter`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.checkpoints import make_checkpoint
from tests.tiny_checkpoints import tiny_llama
from tests.worker.models.deepseek_v4_checkpoint import HEAVY, SLIDING, SPARSE, make_deepseek_v4
from tests.worker.models.interpreted import check, check_preempted, run_engine
from tests.worker.models.test_moe_families import CASES as MIXTURES
from tests.worker.models.test_moe_families import QUANTISED
from tests.worker.models.test_sharded_families import CASES, make_folder
from transom_kernels.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
WINDOW = 6  # so small that lost windows of short prompts are cheaper to repair than to compute anew
SEVERAL_RANKS = ("gpt_oss", "gpt_oss in MXFP4", "gemma4", "gemma4 with experts", "llama4", "olmo3", "deepseek_v4")


def test_windows_and_sinks(tmp_path: Path) -> None:
    tiny_llama(tmp_path, layers=2, hidden=48, heads=4, kv_heads=2)
    settings: dict[str, Any] = {"window": WINDOW, "sinks": 2, "window_pattern": "SF"}
    assert check(tmp_path, situations=("cold", "repaired"), **settings).outcomes["repaired"] > 0


@pytest.mark.exhaustive
def test_windows_and_sinks_in_a_small_pool(tmp_path: Path) -> None:
    tiny_llama(tmp_path, layers=2, hidden=48, heads=4, kv_heads=2)
    check_preempted(tmp_path, window=WINDOW, sinks=2, window_pattern="SF")


@pytest.mark.exhaustive
def test_learned_sinks_and_experts(tmp_path: Path) -> None:
    config = MIXTURES["gpt_oss"].config | {"num_hidden_layers": 2, "sliding_window": WINDOW}
    make_checkpoint(tmp_path, "gpt_oss", **config)
    assert check(tmp_path).outcomes["repaired"] > 0


def make_three_layers(folder: Path) -> None:
    """Write a DeepSeek V4 checkpoint that has a layer of each kind."""
    layers: dict[str, Any] = {"layer_types": [SLIDING, SPARSE, HEAVY], "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    make_deepseek_v4(folder, num_hidden_layers=3, sliding_window=WINDOW, **layers)


@pytest.mark.exhaustive
def test_latent_attention_without_a_cached_prefix(tmp_path: Path) -> None:
    make_three_layers(tmp_path)
    check(tmp_path, lengths=(3, 26), situations=("cold",))


@pytest.mark.exhaustive
def test_latent_attention_over_compressed_entries(tmp_path: Path) -> None:
    make_three_layers(tmp_path)
    assert check(tmp_path, lengths=(9, 34)).outcomes["repaired"] > 0


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
@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])  # so short, V4 sequences that fit alone fit together
def test_preempted(tmp_path: Path, name: str) -> None:
    check_preempted(make_folder(tmp_path, name), size=2)


@pytest.mark.interpreter
def test_two_runs_give_the_same_bits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_oss")
    first, second = (run_engine(folder, "interpreted") for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first.logits, second.logits, strict=True))
