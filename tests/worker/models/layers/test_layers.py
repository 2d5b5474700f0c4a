"""The other layers, each against its formula."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from transom_core.model_config.rope import Rope
from transom_kernels.launch import prefer
from transom_worker.models.frequencies import frequencies
from transom_worker.models.layers.embedding import Embedding, LmHead
from transom_worker.models.layers.mlp import GatedMlp
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding
from transom_worker.models.parallel import Parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_rotary_tables_equal_transformers(dtype, kernels):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_theta=100_000.0, max_position_embeddings=9000)
    positions = torch.tensor([0, 1, 2, 77, 4095, 8191])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions[None])
    rope = Rope(theta=100_000.0, head_size=16, size=16)
    with prefer(kernels):
        ours = RotaryEmbedding(frequencies(rope, torch.device("cpu")), dtype=dtype)(positions)
    assert ours.cos.dtype == dtype
    sign = torch.tensor([-1.0] * 8 + [1.0] * 8, dtype=dtype)
    for got, wanted in ((ours.cos[:, 0], cos[0]), (ours.signed_sin[:, 0], sin[0] * sign)):
        if kernels == "reference" or dtype == torch.bfloat16:
            assert got.equal(wanted)
        else:  # torch's own cosines are not always the nearest number of float32 either
            torch.testing.assert_close(got, wanted, rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_mlp(dtype, quantization, biased):
    torch.manual_seed(1)
    shapes = ((32, 24), (32, 24), (24, 32))
    weights = [torch.randn(shape).mul(0.2).to(dtype) for shape in shapes]
    biases = [torch.randn(shape[0]).to(dtype) for shape in shapes] if biased else None
    x, residual = torch.randn(9, 24).to(dtype), torch.randn(9, 24).to(dtype)
    got = GatedMlp(weights, biases, quantization=quantization).add_to(residual, x).float()
    (gate, up, down), wide = (w.float() for w in weights), x.float()
    b = [bias.float() for bias in biases] if biases is not None else [0.0, 0.0, 0.0]
    wanted = (F.silu(wide @ gate.T + b[0]) * (wide @ up.T + b[1])) @ down.T + b[2] + residual.float()
    limit = 1e-5 if dtype == torch.float32 and quantization == "none" else 0.15 if quantization == "int4" else 0.05
    assert (got - wanted).norm() / wanted.norm() < limit


def test_lm_head_gives_float32_and_counts_its_weight():
    table = torch.randn(16, 8)
    ids, embedding = torch.tensor([3, 3, 0]), Embedding(table)
    rows = embedding(ids)
    assert rows.equal(table[[3, 3, 0]])
    tied = LmHead(None, quantization="none", tied_to=embedding)
    torch.testing.assert_close(tied(rows), rows @ table.T)
    assert tied.weight_bytes == 0
    assert embedding(ids).equal(rows)
    assert LmHead(table, quantization="none").weight_bytes == table.nbytes
    assert LmHead(None, quantization="int8", tied_to=Embedding(table)).weight_bytes > 0
    halves = Embedding(table.bfloat16())
    assert LmHead(None, quantization="none", tied_to=halves)(rows.bfloat16()).dtype == torch.float32


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        Parallel(rank=2, size=2)
