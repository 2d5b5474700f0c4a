"""Builds and runs Gemma 4's text decoder.

- The last layers have no KV cache of their own: each reads the cache of an earlier layer of its type (window or full).
- Each layer has its own embedding of every token (per-layer embedding), which the model adds to the residual after the layer; then
  it scales the residual.
- Layers with a window and full layers differ in head width and number of KV heads. Each query, key and value head is normalised.
- Some models have experts besides the dense MLP (`DenseAndExperts`).

Sources: the model card of Gemma 4, transformers' `Gemma4ForCausalLM`.

Legend: T tokens, R rows whose logits are requested, N hidden width, L layers, P width of a per-layer embedding,
E experts.
"""

from dataclasses import replace

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.gated_mlp import activated_product
from transom_kernels.hyper_connections import hc_norm
from transom_kernels.moe import GateRule
from transom_kernels.rms_norm import rms_norm
from transom_kernels.route import Routing
from transom_worker.models.decoder import Decoder
from transom_worker.models.expert_loading import experts_by_stack_or_name
from transom_worker.models.layers.experts import ExpertRouter, make_experts
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.residual import Residual, select_rows
from transom_worker.models.loading import Loader
from transom_worker.models.parallel.communicator import SINGLE_RANK
from transom_worker.models.style import Style, dense_feed_forward

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
        self._scales = [
            float(layer.weights(f"{layer.prefix}layer_scalar", shape=(1,)).to(load.dtype)) for layer in layers
        ]
        self._embeddings = LayerEmbeddings(architecture, load) if architecture.layer_embedding_size else None
        self._additions = [LayerAddition(architecture, layer) for layer in layers] if self._embeddings else []
        parts = (*self._additions, *((self._embeddings,) if self._embeddings else ()))
        self.weight_bytes += sum(part.weight_bytes for part in parts)

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Model.hidden`."""
        self._begin_adapters(batch)
        x_TN = self._embedding(batch.token_ids)
        own_TLP = self._embeddings(batch.token_ids, x_TN) if self._embeddings else None
        rotations, residual = self._rotations(batch, x_TN.dtype), Residual(x_TN)
        for index, scale in enumerate(self._scales):
            self._layer(index, residual, rotations, batch)
            if own_TLP is not None:
                own_TP, is_last = own_TLP[:, index], index == len(self._scales) - 1
                self._additions[index].add_to(residual, select_rows(own_TP, batch.logit_rows) if is_last else own_TP)
            residual.scale(scale)
            if batch.after_layer is not None:
                batch.after_layer(index, residual.read())
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


class DenseAndExperts:
    """A dense MLP and routed experts in parallel, each with its own norms around it.

    The output is `norm(mlp(norm(x))) + norm(experts(norm(x)))`. The router reads x / rms(x), without a norm weight.
    """

    adds_in_product = False

    def __init__(self, architecture: Architecture, index: int, load: Loader) -> None:
        """Load layer `index`; `load` reads names within the layer."""
        mixture, eps, hidden = architecture.mixture, architecture.rms_norm_eps, architecture.hidden_size
        assert mixture is not None
        experts = mixture.num_experts
        self._mlp = dense_feed_forward(architecture, index, load.partial())
        weights = experts_by_stack_or_name(load, ("gate_proj", "up_proj", "down_proj"), mixture, hidden)
        rule = GateRule(activation=architecture.gate_activation)
        self._experts = make_experts(weights, rule, quantization=load.quantization)
        scale_N = load.tensor("router.scale", torch.float32, shape=(hidden,)) * hidden**-0.5
        weight_EN = load.tensor("router.proj.weight", torch.float32, shape=(experts, hidden)) * scale_N
        expert_scale_E = load.tensor("router.per_expert_scale", torch.float32, shape=(experts,))
        self._router = ExpertRouter(weight_EN, Routing(num_chosen=mixture.num_chosen), expert_scale_E=expert_scale_E)
        self._eps, self._comm = eps, load.comm
        self._before_mlp = load.norm("pre_feedforward_layernorm", eps, size=hidden, wide=True)
        self._after_mlp = load.norm("post_feedforward_layernorm_1", eps, size=hidden, wide=True)
        self._before_experts = load.norm("pre_feedforward_layernorm_2", eps, size=hidden, wide=True)
        self._after_experts = load.norm("post_feedforward_layernorm_2", eps, size=hidden, wide=True)
        norms = (self._before_mlp, self._after_mlp, self._before_experts, self._after_experts)
        self.weight_bytes = sum(part.weight_bytes for part in (self._mlp, self._experts, self._router, *norms))

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the output [T, N] of `x` [T, N]."""
        dense_TN = self._mlp(self._before_mlp(x_TN))
        direction_TN = hc_norm(x_TN[:, None], self._eps)  # x / rms(x) in float32, the router's number format
        routed_TN = self._experts(self._before_experts(x_TN), *self._router(direction_TN))
        if self._comm is not SINGLE_RANK:
            dense_TN, routed_TN = self._comm.all_reduce_(torch.stack((dense_TN, routed_TN)))  # one all-reduce for both
        return self._after_mlp.add_to(self._after_experts(routed_TN), dense_TN)

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [T, N]."""
        return residual_TN + self(x_TN)
