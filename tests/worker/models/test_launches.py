"""What a layer launches for one token where Triton computes, as docs/kernels.md says."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_request, run
from tests.graph_recorder import recorded
from tests.thread_ranks import make_sharded_engine
from tests.worker.models.deepseek_v4_checkpoint import SLIDING, make_deepseek_v4
from tests.worker.models.test_dense_families import CASES as DENSE
from tests.worker.models.test_interpreted_models import SETTINGS, kernels_of
from tests.worker.models.test_moe_families import CASES as MIXTURES
from transom_kernels.launch import INTERPRETED
from transom_worker.execution.setup import model_loading
from transom_worker.models.registry import build_model

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
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
