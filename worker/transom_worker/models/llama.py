"""The llama family: pre-norm, rotary attention with grouped heads, gated SiLU feed-forward.

Legend: T tokens, R rows whose logits are wanted, N hidden width, V vocabulary, D head width.
"""

from __future__ import annotations

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.layers.attention import Attention, AttentionShape
from transom_worker.layers.embedding import Embedding, Head
from transom_worker.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.layers.linear import Linear, Quantization, make_linear
from transom_worker.layers.mlp import GatedMlp
from transom_worker.layers.norm import RmsNorm
from transom_worker.layers.rope import RotaryEmbedding, RotaryTables
from transom_worker.models.architecture import Architecture, LayerAttention
from transom_worker.models.model import Weights


class Llama:
    """The decoder."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization,
    ) -> None:
        """`weights` gives tensors by their Hugging Face names; they are moved to `device` and `dtype` one by one."""

        def load(name: str) -> torch.Tensor:
            return weights(name).to(device=device, dtype=dtype)

        first = architecture.layers[0]
        self.architecture = architecture
        self._embedding = Embedding(load("model.embed_tokens.weight"))
        self._layers = [
            LlamaLayer(f"model.layers.{i}.", layer, architecture, load, quantization)
            for i, layer in enumerate(architecture.layers)
        ]
        self._norm = RmsNorm(load("model.norm.weight"), architecture.rms_norm_eps)
        tied = architecture.tie_embeddings
        head_VN = self._embedding.weight_VN if tied else load("lm_head.weight")
        self._head = Head(head_VN, quantization=quantization, tied=tied)
        self._rotary = RotaryEmbedding(
            head_size=first.head_size,
            theta=architecture.rope_theta,
            dtype=dtype,
            device=device,
        )
        ends = self._embedding.weight_bytes + self._norm.weight_bytes + self._head.weight_bytes
        self.weight_bytes = ends + sum(layer.weight_bytes for layer in self._layers)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] in float32; writes the batch's keys and values into its caches."""
        x_TN = self._embedding(batch.token_ids)
        tables = self._rotary(batch.positions)
        for i, layer in enumerate(self._layers):
            x_TN = layer.attend(x_TN, tables, batch.caches[i], batch.groups[batch.group_of_layer[i]])
            if i == len(self._layers) - 1:  # nobody reads the other rows from here on
                x_TN = x_TN.index_select(0, batch.logit_rows)
            x_TN = layer.feed_forward(x_TN)
        return self._head(self._norm(x_TN))


class LlamaLayer:
    """One decoder layer."""

    def __init__(
        self,
        prefix: str,
        shape: LayerAttention,
        architecture: Architecture,
        load: Weights,
        quantization: Quantization,
    ) -> None:
        def linear(*names: str, bias: bool) -> Linear:
            """Projections of one input, fused."""
            weight = torch.cat([load(f"{prefix}{name}.weight") for name in names])
            biases = [load(f"{prefix}{name}.bias") for name in names] if bias else []
            return make_linear(weight, torch.cat(biases) if bias else None, quantization=quantization)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(load(f"{prefix}{name}.weight"), architecture.rms_norm_eps)

        attention_bias, mlp_bias = architecture.attention_bias, architecture.mlp_bias
        qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=attention_bias)
        self._attention = Attention(qkv, linear("self_attn.o_proj", bias=attention_bias), _shape(shape))
        self._mlp = GatedMlp(
            tuple(load(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down")),
            tuple(load(f"{prefix}mlp.{name}_proj.bias") for name in ("gate", "up", "down")) if mlp_bias else None,
            quantization=quantization,
        )
        self._attention_norm, self._mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        parts = (self._attention, self._mlp, self._attention_norm, self._mlp_norm)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def attend(self, x_TN: torch.Tensor, tables: RotaryTables, cache: LayerCache, batch: PagedBatch) -> torch.Tensor:
        """`x + attention(norm(x))`, [T, N]."""
        return self._attention.add_to(x_TN, self._attention_norm(x_TN), tables, cache, batch)

    def feed_forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        """`x + mlp(norm(x))`, [T, N]."""
        return self._mlp.add_to(x_TN, self._mlp_norm(x_TN))


def _shape(layer: LayerAttention) -> AttentionShape:
    return AttentionShape(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        window=layer.window,
        num_sink_tokens=layer.sinks,
        chunk=layer.chunk,
    )
