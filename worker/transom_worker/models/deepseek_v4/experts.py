"""The feed-forward part: routed experts, chosen by score or looked up by token id, and one that every token passes through.

Legend: T tokens, N hidden width, I inner width, V vocabulary, K experts chosen per token.
"""

from __future__ import annotations

from functools import partial

import torch

from transom_worker.layers.experts import Experts, ExpertWeights, clamped_swiglu
from transom_worker.layers.router import Router, Routing
from transom_worker.models.deepseek_v4.shape import DeepseekV4Shape
from transom_worker.models.loading import Loader


class ExpertLayer:
    """One layer's experts; `load` reads names within `ffn`."""

    def __init__(self, load: Loader, shape: DeepseekV4Shape, *, hashed: bool) -> None:
        routing = Routing(
            num_chosen=shape.num_chosen_experts, score=shape.expert_score, normalise=True, scale=shape.expert_scale
        )
        self._chosen_VK = load.tensor("gate.tid2eid", torch.int64) if hashed else None
        correction = None if hashed else load.tensor("gate.bias", torch.float32)
        self._router = Router(load.tensor("gate.weight"), routing, correction_E=correction)
        self._activation = partial(clamped_swiglu, limit=shape.expert_limit)
        self._experts = Experts(_stacked(load, shape.num_experts), self._activation, quantization=load.quantization)
        self._shared_in = load.linear("shared_experts.w1", "shared_experts.w3")
        self._shared_out = load.linear("shared_experts.w2")
        parts = (self._router, self._experts, self._shared_in, self._shared_out)
        table_bytes = 0 if self._chosen_VK is None else self._chosen_VK.nbytes
        self.weight_bytes = table_bytes + sum(part.weight_bytes for part in parts)

    def __call__(self, x_TN: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        chosen_TK = None if self._chosen_VK is None else self._chosen_VK[token_ids_T]
        routed_TN = self._experts(x_TN, self._router(x_TN, chosen_TK))
        return self._shared_out.add_to(routed_TN, self._activation(self._shared_in(x_TN)))


def _stacked(load: Loader, num_experts: int) -> ExpertWeights:
    """Experts lie one by one in the checkpoint."""
    each = [load.under(f"experts.{expert}.") for expert in range(num_experts)]
    return ExpertWeights(
        gate_up=torch.stack([torch.cat([one.tensor("w1.weight"), one.tensor("w3.weight")]) for one in each]),
        down=torch.stack([one.tensor("w2.weight") for one in each]),
    )
