"""Token embedding and LM head; the two may share their weight.

With several ranks the vocabulary is sharded: each rank has the rows of its own tokens, for look-ups and for logits.

Legend: T tokens, R rows that need logits, V vocabulary of this rank, N hidden width.
"""

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.linear import PackedWeight, embedding_rows
from transom_worker.models.layers.linear import KernelLinear, Linear, PlainLinear, make_linear
from transom_worker.models.layers.quantisation import Quantization, Weight
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator


class Embedding:
    """Looks up tokens in a table, and multiplies their rows by `scale`, rounded to the table's dtype.

    The table is a tensor [V, N]. A tied head may pack it (`LmHead`); then head and embedding share the packed weight. On one of
    several ranks, another rank's token gets a row of zeros, and an all-reduce adds the ranks' rows.
    """

    def __init__(
        self, weight_VN: torch.Tensor, *, first_id: int = 0, comm: Communicator = SINGLE_RANK, scale: float = 1.0
    ) -> None:
        """`first_id` is the token id of the table's first row."""
        self.table: torch.Tensor | PackedWeight = weight_VN
        self._first_id, self._comm, self._num_rows = first_id, comm, len(weight_VN)
        self._scale = float(torch.tensor(scale, dtype=weight_VN.dtype))
        self.weight_bytes = weight_VN.nbytes

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of these tokens, [T, N]."""
        if isinstance(self.table, PackedWeight) or uses_cpu_kernels(self.table):
            rows_TN = embedding_rows(token_ids_T, self.table, first_id=self._first_id, scale=self._scale)
            return self._comm.all_reduce_(rows_TN)
        if self._comm is SINGLE_RANK:
            return self._look_up(token_ids_T, self.table)
        rows_T = token_ids_T - self._first_id
        absent_T = (rows_T < 0) | (rows_T >= self._num_rows)
        rows_TN = self._look_up(rows_T.masked_fill_(absent_T, 0), self.table)
        return self._comm.all_reduce_(rows_TN.masked_fill_(absent_T[:, None], 0.0))

    def _look_up(self, rows_T: torch.Tensor, table_VN: torch.Tensor) -> torch.Tensor:
        rows_TN = F.embedding(rows_T, table_VN)
        return rows_TN if self._scale == 1.0 else rows_TN.mul_(self._scale)


class LmHead:
    """Computes logits in float32 over this rank's vocabulary.

    A tied head shares its weight with the embedding, even if the weight is packed. A quantised head is a second copy, because an
    embedding cannot look up rows in it.
    """

    def __init__(
        self,
        weight_VN: Weight | None,
        *,
        quantization: Quantization,
        tied_to: Embedding | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """Use `weight_VN`, or the weight of the embedding `tied_to`; then `weight_VN` is None.

        Logits are multiplied by `scale`; then `soft_cap` bounds them smoothly: soft_cap * tanh(logit / soft_cap).
        """
        self._scale, self._soft_cap = scale, soft_cap
        if tied_to is not None:
            assert isinstance(tied_to.table, torch.Tensor)
            weight_VN = tied_to.table
        assert weight_VN is not None
        # If the other layers have 4 bits, the head has 8: the head's rounding errors reach the logits directly.
        self._linear = make_linear(weight_VN, quantization="int8" if quantization == "int4" else quantization)
        self.weight_bytes = self._linear.weight_bytes
        shared = _table_of(self._linear)
        if tied_to is not None and shared is not None:
            tied_to.table, self.weight_bytes = shared, 0

    def __call__(self, x_RN: torch.Tensor) -> torch.Tensor:
        """Return logits, [R, V] float32."""
        return self._linear.logits(x_RN, scale=self._scale, soft_cap=self._soft_cap)


def _table_of(layer: Linear) -> torch.Tensor | PackedWeight | None:
    """Return a layer's weight as an embedding's table; None if an embedding cannot look up rows in it."""
    if isinstance(layer, PlainLinear):
        return layer.weight_NK
    return layer.weight if isinstance(layer, KernelLinear) and isinstance(layer.weight, PackedWeight) else None
