"""DeepSeek V4's MoE layer: routed experts, chosen by score or looked up by token id (hash routing), and one shared expert.

Every rank holds a part of the inner width of each expert, routed or shared, so each rank's output is a partial sum over the
inner width. Routed and shared partial sums are added first; then one all-reduce completes both.

Legend: T tokens, N hidden width, I inner width, E experts, V vocabulary, K experts chosen per token.
"""

import torch

from transom_core.errors import ModelError
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.deepseek_v4 import DeepseekV4Shape
from transom_kernels.moe import GateRule
from transom_kernels.route import Routing
from transom_worker.models.expert_loading import experts_by_name
from transom_worker.models.layers.experts import ExpertRouter, apply_gate, make_experts
from transom_worker.models.loading import Loader

_NAMES = ("experts.{}.w1.weight", "experts.{}.w3.weight", "experts.{}.w2.weight")  # gate, up, down projection


class ExpertLayer:
    """The experts of one layer.

    `load` reads tensors by their names after the layer's prefix `ffn.`. If `hashed`, a table gives the experts of each token id.
    """

    def __init__(self, load: Loader, architecture: Architecture, shape: DeepseekV4Shape, *, hashed: bool) -> None:
        mixture = architecture.mixture
        if mixture is None or mixture.clamp is None:
            raise ModelError("A deepseek_v4 model has experts in every layer; config.json gives none.")
        routing = Routing(num_chosen=mixture.num_chosen, score=shape.expert_score, scale=mixture.scale)
        hidden, inner, experts = architecture.hidden_size, mixture.inner_size, mixture.num_experts
        table_shape = (architecture.vocab_size, mixture.num_chosen)
        self._chosen_VK = _experts_by_token(load, table_shape, experts) if hashed else None
        correction = None if hashed else load.tensor("gate.bias", torch.float32, shape=(experts,))
        gate_EN = load.tensor("gate.weight", torch.float32, shape=(experts, hidden))
        self._router = ExpertRouter(gate_EN, routing, correction_E=correction)
        # for w1 and w3 within an expert; `gate.weight` is the router's
        self._rule = GateRule(limits=(mixture.clamp, mixture.clamp))
        weights = experts_by_name(load, _NAMES, mixture, hidden)
        self._experts = make_experts(weights, self._rule, quantization=load.quantization)
        self._comm = load.comm
        own = load.share(inner)  # this rank's part of the inner width
        shared = load.under("shared_experts.")
        self._shared_in = shared.linear("w1", "w3", shapes=[(inner, hidden)] * 2, rows=[own] * 2)
        # `partial`: no all-reduce within the shared expert, because this layer reduces routed and shared outputs together.
        self._shared_out = shared.partial().row_parallel("w2", shape=(hidden, inner), columns=own)
        parts = (self._router, self._experts, self._shared_in, self._shared_out)
        table_bytes = 0 if self._chosen_VK is None else self._chosen_VK.nbytes
        self.weight_bytes = table_bytes + sum(part.weight_bytes for part in parts)

    def __call__(self, x_TN: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the output [T, N] for `x` [T, N]."""
        chosen_TK = None if self._chosen_VK is None else self._chosen_VK[token_ids_T]
        routed_TN = self._experts(x_TN, *self._router(x_TN, chosen_TK))
        return self._comm.all_reduce_(self._shared_out.add_to(routed_TN, apply_gate(self._shared_in(x_TN), self._rule)))


def _experts_by_token(load: Loader, shape: tuple[int, int], num_experts: int) -> torch.Tensor:
    """Load the table [V, K] of each token id's experts.

    Raises:
        ModelError: the table names an expert that does not exist.
    """
    name = f"{load.prefix}gate.tid2eid"
    table_VK = load.weights(name, shape=shape).to(device=load.device, dtype=torch.int64)
    if table_VK.is_meta:  # memory is planned
        return table_VK
    low, high = int(table_VK.min()), int(table_VK.max())
    if low < 0 or high >= num_experts:
        raise ModelError(f"Tensor {name!r} names experts {low} to {high}; the model has {num_experts}, from 0.")
    return table_VK
