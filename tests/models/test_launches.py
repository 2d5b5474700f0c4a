"""What a layer launches for one token where Triton computes: the table in docs/kernels.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from launches import decoding_step
from test_dense_families import CASES as DENSE
from test_moe_families import CASES as MIXTURES

from checkpoints import make_checkpoint
from transom_kernels.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
DENSE_LAYER = Counter(norm_rows=2, product=4, prepare_and_write=1, attend=1, activate=1)
ROUTER = Counter(product=1, _softmax=1, topk=1, gather=1, sum=1, add=1, div=1, mul=1)
EXPERTS = Counter(full=1, sort_pairs=1, into_experts=1, out_of_experts=1, add_up=1)
MIXTURE_LAYER = Counter(norm_rows=2, product=2, prepare_and_write=1, attend=1) + ROUTER + EXPERTS
LAYERS = {
    "llama3": DENSE_LAYER,
    "gpt_oss": MIXTURE_LAYER,
    "gemma3": DENSE_LAYER,
    "qwen3_moe": MIXTURE_LAYER,
    "olmo3": DENSE_LAYER + Counter(norm_rows=2, copy_=2),  # norms over all heads at once
}


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_launches_of_a_layer(tmp_path: Path, name: str) -> None:
    assert layer_of(tmp_path, name) == LAYERS[name]


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("llama3", "gemma3")])
def test_launches_of_other_layers(tmp_path: Path, name: str) -> None:
    assert layer_of(tmp_path, name) == LAYERS[name]


def layer_of(folder: Path, name: str) -> Counter[str]:
    """By what the second layer adds to the first."""
    case, steps = (DENSE | MIXTURES)[name], []
    for num_layers in (1, 2):
        config = case.config | {"num_hidden_layers": num_layers}
        if name == "qwen3_moe":
            config["mlp_only_layers"] = []
        if name in ("gemma3", "olmo3"):
            config["layer_types"] = ["sliding_attention"] * num_layers
        steps.append(decoding_step(make_checkpoint(folder / str(num_layers), case.family, **config)))
    steps[1].subtract(steps[0])
    layer = Counter({kind: count for kind, count in steps[1].items() if count})
    layer["product"] = layer.pop("mm", 0) + layer.pop("addmm", 0)
    return layer
