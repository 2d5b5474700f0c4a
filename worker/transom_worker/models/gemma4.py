"""Gemma 4's text decoder.

- The last layers have no KV cache of their own: each reads the cache of an earlier layer of its type (window or full).
- Each layer has its own embedding of every token (per-layer embedding), which is added after the layer; then the sum is scaled.
- Layers with a window and full layers differ in head width and number of KV heads. Each query, key and value head is normalised.
- Some models have experts besides the dense MLP (`gemma4_experts.py`).

Sources: the model card of Gemma 4, transformers' `Gemma4ForCausalLM`.

Legend: T tokens, R rows whose logits are requested, N hidden width, L layers, P width of a per-layer embedding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.gated_mlp import activated_product
from transom_kernels.rms_norm import rms_norm
from transom_worker.models.decoder import Decoder
from transom_worker.models.gemma4_experts import DenseAndExperts
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.residual import Residual, select_rows
from transom_worker.models.loading import Loader
from transom_worker.models.style import Style

STYLE = Style(
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
    norm_wide=True,
    qk_norm="each",
    value_norm=True,
)


class Gemma4(Decoder):
    """Gemma 4's decoder. After each layer it adds that layer's embedding of the tokens, and scales the sum."""

    def __init__(self, architecture: Architecture, load: Loader) -> None:
        """`load` reads tensors by their Hugging Face names."""
        style = STYLE
        if architecture.mixture is not None:  # `DenseAndExperts` has the norms before its dense MLP and its experts
            style = replace(STYLE, norm_before_mlp="", feed_forward=DenseAndExperts)
        super().__init__(architecture, load, style)
        load = load.under("model.")
        layers = [load.under(f"layers.{index}.") for index in range(architecture.num_layers)]
        self._scales = [float(layer.tensor("layer_scalar", shape=(1,))) for layer in layers]
        self._embeddings = LayerEmbeddings(architecture, load) if architecture.layer_embedding_size else None
        self._additions = [LayerAddition(architecture, layer) for layer in layers] if self._embeddings else []
        parts = (*self._additions, *((self._embeddings,) if self._embeddings else ()))
        self.weight_bytes += sum(part.weight_bytes for part in parts)

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Return normalised hidden states [R, N]; write the batch's keys and values into its caches."""
        x_TN = self._embedding(batch.token_ids)
        own_TLP = self._embeddings(batch.token_ids, x_TN) if self._embeddings else None
        rotations, residual = self._rotations(batch, x_TN.dtype), Residual(x_TN)
        for index, scale in enumerate(self._scales):
            self._layer(index, residual, rotations, batch)
            if own_TLP is not None:
                own_TP, is_last = own_TLP[:, index], index == len(self._scales) - 1
                self._additions[index].add_to(residual, select_rows(own_TP, batch.logit_rows) if is_last else own_TP)
            residual.scale(scale)
        return residual.read(self._norm)


class LayerEmbeddings:
    """The per-layer embeddings of each token: (normalised projection of the token's embedding + table look-up) / sqrt(2)."""

    def __init__(self, architecture: Architecture, load: Loader) -> None:
        size, hidden = architecture.layer_embedding_size, architecture.hidden_size
        width = architecture.num_layers * size
        table = (architecture.layer_vocab_size, width)
        self._table = load.embedding("embed_tokens_per_layer", table, scale=size**0.5)
        self._projection = load.linear("per_layer_model_projection", shapes=[(width, hidden)])
        self._norm = load.norm("per_layer_projection_norm", architecture.rms_norm_eps, size=size, wide=True)
        self._shape = (-1, architecture.num_layers, size)
        # transformers multiplies the projection by hidden**-0.5 before this norm; epsilon times `hidden` has the same effect.
        self._scaled_eps = self._norm.eps * hidden
        self.weight_bytes = self._table.weight_bytes + self._projection.weight_bytes + self._norm.weight_bytes

    def __call__(self, token_ids_T: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the per-layer embeddings [T, L, P] of the tokens; `x` [T, N] is their embedding."""
        made, own = (x.view(-1, self._shape[-1]) for x in (self._projection(x_TN), self._table(token_ids_T)))
        sums = rms_norm(made, None, self._scaled_eps, own, inner=self._norm.weight_N, factor=0.5**0.5)[1]
        return sums.view(self._shape)


class LayerAddition:
    """Adds a layer's own embedding of the tokens to the residual, after a gate that the residual controls."""

    def __init__(self, architecture: Architecture, load: Loader) -> None:
        size, hidden = architecture.layer_embedding_size, architecture.hidden_size
        self._gate = load.linear("per_layer_input_gate", shapes=[(size, hidden)])
        self._back = load.linear("per_layer_projection", shapes=[(hidden, size)])
        self._norm = load.norm("post_per_layer_input_norm", architecture.rms_norm_eps, size=hidden, wide=True)
        self.weight_bytes = sum(part.weight_bytes for part in (self._gate, self._back, self._norm))

    def add_to(self, residual: Residual, own_TP: torch.Tensor) -> None:
        """Add the gated, projected and normalised embedding `own` [T, P] of each token to the residual."""
        gated_TP = activated_product(self._gate(residual.read()), own_TP, "gelu_tanh")
        residual.add(self._back(gated_TP), self._norm)
