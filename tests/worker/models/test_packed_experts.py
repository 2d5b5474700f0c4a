"""MXFP4 experts stay packed where grouped matmuls compute with them, whole or by rank, with equal results."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from safetensors.torch import save_file

from tests.worker.models.test_deepseek_v4 import in_fp4
from transom_core.model_config.mixture import Mixture
from transom_kernels.launch import INTERPRETED, Kernels, prefer
from transom_kernels.moe import ExpertTensors, MxTensor
from transom_worker.models.expert_loading import experts_by_name, experts_by_stack
from transom_worker.models.layers.experts import GroupedExperts, make_experts
from transom_worker.models.loading import Loader
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.quantised_checkpoint import open_quantised
from transom_worker.models.weights.safetensors_files import SafetensorsWeights

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
EXPERTS, HIDDEN, INNER = 3, 64, 128
MIXTURE = Mixture(num_experts=EXPERTS, num_chosen=2, inner_size=INNER, dense_size=0, layers=frozenset({0}))


def stacks(folder: Path) -> Weights:
    """gpt-oss's form: two stacks and their biases, each gate followed by its up."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        shape = (EXPERTS, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_bias"] = torch.randn(EXPERTS, rows, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return open_quantised(SafetensorsWeights(folder), {"quant_method": "mxfp4"})


def matrices(folder: Path) -> Weights:
    """DeepSeek V4's form: a matrix each."""
    torch.manual_seed(1)
    tensors = {}
    for expert in range(EXPERTS):
        for name, shape in (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER))):
            tensors[f"{expert}.{name}.weight"], tensors[f"{expert}.{name}.scale"], _ = in_fp4(torch.randn(shape))
    save_file(tensors, folder / "model.safetensors")
    return open_quantised(SafetensorsWeights(folder), {"quant_method": "fp8"})


def load(weights: Weights, form: str, parallel: Parallel, kernels: Kernels) -> ExpertTensors:
    loader = Loader(weights=weights, dtype=torch.float32, device=torch.device("cpu"), parallel=parallel)
    with prefer(kernels):
        if form == "stacks":
            return experts_by_stack(loader, MIXTURE, HIDDEN, interleaved=True, biased=True)
        found = experts_by_name(loader, ["{}.w1.weight", "{}.w3.weight", "{}.w2.weight"], MIXTURE, HIDDEN)
        assert isinstance(found, ExpertTensors)
        return found


@pytest.mark.parametrize("form", ["stacks", "matrices"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_packed_experts_are_the_same_numbers(tmp_path: Path, form: str, rank: int, size: int) -> None:
    weights = (stacks if form == "stacks" else matrices)(tmp_path)
    parallel = Parallel(rank=rank, size=size)
    plain = load(weights, form, parallel, "reference")
    packed = load(weights, form, parallel, "interpreted")
    assert isinstance(packed.gate_up, MxTensor)
    assert isinstance(packed.down, MxTensor)
    assert isinstance(plain.gate_up, torch.Tensor)
    assert isinstance(plain.down, torch.Tensor)
    rows, bias = packed.gate_up.dequantised(), packed.gate_up_bias
    if packed.interleaved:
        assert bias is not None
        rows, bias = (torch.cat([part[:, ::2], part[:, 1::2]], dim=1) for part in (rows, bias))
    assert rows.equal(plain.gate_up)
    assert packed.down.dequantised().equal(plain.down)
    if plain.gate_up_bias is None:
        assert bias is None
    else:
        assert bias is not None
        assert bias.equal(plain.gate_up_bias)
    experts = make_experts(packed, rule=None, quantization="none")  # type: ignore[arg-type]
    assert isinstance(experts, GroupedExperts)
    elements = 3 * EXPERTS * HIDDEN * INNER // size
    biases = 0 if bias is None else bias.nbytes + (packed.down_bias.nbytes if packed.down_bias is not None else 0)
    assert experts.weight_bytes == elements * 17 // 32 + biases


def test_parts_of_groups_are_dequantised(tmp_path: Path) -> None:
    """128 columns on three ranks: 43, 43 and 42."""
    for form, make in (("stacks", stacks), ("matrices", matrices)):
        (tmp_path / form).mkdir()
        loaded = load(make(tmp_path / form), form, Parallel(rank=1, size=3), "interpreted")
        assert isinstance(loaded.down, torch.Tensor)
        assert not loaded.interleaved
