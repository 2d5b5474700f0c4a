"""Adapters in PEFT's format: scales and ranks of single modules, a digest of the content, and refusals that say why."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_folders import write_adapter
from transom_core.errors import RequestError
from transom_core.model_files.adapter_files import CONFIG_FILE, WEIGHTS_FILE, resolve_adapter


def test_ranks_and_scales_are_pefts(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 4, r"layers\.1\..*": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 4},
    }
    files = resolve_adapter(write_adapter(tmp_path / "a", **patterns), max_rank=8)
    ranks = {"layers.0.self_attn.q_proj": 4, "layers.1.mlp.up_proj": 2, "layers.0.mlp.up_proj": 8, "xq_proj": 8}
    assert {name: files.rank(f"model.{name}") for name in ranks} == ranks
    assert files.scale("model.layers.0.self_attn.q_proj") == 4 / 4
    assert files.scale("model.layers.1.mlp.up_proj") == 16 / 2
    slora = resolve_adapter(write_adapter(tmp_path / "b", use_rslora=True), max_rank=8)
    assert slora.scale("q_proj") == 16 / math.sqrt(8)


def test_the_identity_is_that_of_the_content(tmp_path: Path) -> None:
    first, copy, others = (
        resolve_adapter(write_adapter(tmp_path / name, given), max_rank=8)
        for name, given in (("a", b"weights"), ("b", b"weights"), ("c", b"Weights"))
    )
    assert first.identity() == copy.identity() != others.identity()
    before = first.identity()
    assert (first.name, first.weights) == (str(tmp_path / "a"), tmp_path / "a" / WEIGHTS_FILE)
    assert resolve_adapter(write_adapter(tmp_path / "a", r=4), max_rank=8).identity() != before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA"),
        ({"use_dora": True}, "uses use_dora"),
        ({"bias": "all"}, "has bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"r": 16}, "has rank 16, and --max-lora-rank is 8"),
        ({"rank_pattern": {"q_proj": 9}}, "has rank 9"),
        ({"rank_pattern": {"(": 4}}, "no object of regular expressions"),
        ({"r": True}, "not a whole number"),
        ({"lora_alpha": None}, "not a number"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        resolve_adapter(write_adapter(tmp_path / "a", **config), max_rank=8)
    assert refusal.value.param == "lora_path"


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a"))
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(RequestError, match=f"has no {WEIGHTS_FILE}; pickled"):
        resolve_adapter(str(folder), max_rank=8)
    with pytest.raises(RequestError, match=f"{CONFIG_FILE} is missing"):
        resolve_adapter(str(tmp_path / "none"), max_rank=8)
