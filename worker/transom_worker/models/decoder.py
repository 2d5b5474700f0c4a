"""A decoder over shared layers, put together as a family's `Style` says.

Legend: T tokens, R rows whose logits are wanted, N hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.layers.norm import Norm
from transom_worker.layers.rope import RotaryTables
from transom_worker.models.architecture import Architecture
from transom_worker.models.loading import Loader
from transom_worker.models.parts import make_attention, make_norm, make_rotary
from transom_worker.models.rope import Rope
from transom_worker.models.style import Style


@dataclass(frozen=True, slots=True)
class Rotations:
    """A step's rotary tables, and what queries in layers that do not rotate are multiplied by."""

    tables: dict[Rope, RotaryTables]
    query_scale_T11: torch.Tensor | None


class Decoder:
    """Embedding, layers, norm, head."""

    def __init__(self, architecture: Architecture, load: Loader, style: Style) -> None:
        """`load` reads tensors by their Hugging Face names."""
        scales, tied = architecture.scales, architecture.tie_embeddings
        table = (architecture.vocab_size, architecture.hidden_size)
        self.architecture, self._style = architecture, style
        self.vocab = load.cut(architecture.vocab_size)
        self._embedding = load.embedding("model.embed_tokens", table, scale=scales.embedding)
        self._layers = [
            DecoderLayer(architecture, index, style, load.under(f"model.layers.{index}."))
            for index in range(architecture.num_layers)
        ]
        self._norm = make_norm("model.norm", architecture, style, load)
        self._head = load.head("lm_head", table, tied_to=self._embedding if tied else None, scales=scales)
        self._rotary = {rope: make_rotary(rope, load) for rope in set(architecture.ropes) if rope is not None}
        ends = self._embedding.weight_bytes + self._norm.weight_bytes + self._head.weight_bytes
        self.weight_bytes = ends + sum(layer.weight_bytes for layer in self._layers)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] in float32 over `vocab`; writes the batch's keys and values into its caches."""
        x_TN = self._embedding(batch.token_ids)
        rotations = self._rotations(batch, x_TN.dtype)
        for index in range(len(self._layers)):
            x_TN = self._layer(index, x_TN, rotations, batch)
        return self._head(self._norm(x_TN))

    def _rotations(self, batch: ForwardBatch, dtype: torch.dtype) -> Rotations:
        """What layers need to know of the tokens' positions."""
        tables = {rope: rotary(batch.positions) for rope, rotary in self._rotary.items()}
        scale = self._style.query_scale
        return Rotations(tables, None if scale is None else scale(batch.positions).to(dtype)[:, None, None])

    def _layer(self, index: int, x_TN: torch.Tensor, rotations: Rotations, batch: ForwardBatch) -> torch.Tensor:
        """Layer `index`: [T, N], after the last layer only the rows whose logits are wanted."""
        rope, source = self.architecture.ropes[index], self.architecture.layers[index].reads_cache_of
        cache = index if source is None else source
        return self._layers[index](
            x_TN,
            None if rope is None else rotations.tables[rope],
            batch.caches[cache],
            batch.groups[batch.group_of_layer[cache]],
            query_scale_T11=rotations.query_scale_T11 if rope is None else None,
            rows=batch.logit_rows if index == len(self._layers) - 1 else None,
        )


class DecoderLayer:
    """Attention and feed-forward part, each added to what came in."""

    def __init__(self, architecture: Architecture, index: int, style: Style, load: Loader) -> None:
        def norm(name: str) -> Norm | None:
            return make_norm(name, architecture, style, load) if name else None

        self._side_by_side, self._parallel = style.side_by_side, load.parallel
        load = load.partial() if style.side_by_side else load
        self._attention = make_attention(architecture, index, style, load.under("self_attn."))
        self._feed_forward = style.feed_forward(architecture, index, load)
        self._before_attention, self._after_attention = (
            norm(style.norm_before_attention),
            norm(style.norm_after_attention),
        )
        self._before_mlp, self._after_mlp = norm(style.norm_before_mlp), norm(style.norm_after_mlp)
        norms = (self._before_attention, self._after_attention, self._before_mlp, self._after_mlp)
        parts = (self._attention, self._feed_forward, *norms)
        self.weight_bytes = sum(part.weight_bytes for part in parts if part is not None)

    def __call__(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        *,
        query_scale_T11: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, N], or only `rows` of it where nobody reads the others."""
        seen_TN = x_TN if self._before_attention is None else self._before_attention(x_TN)
        if self._side_by_side:  # on the first rank with the residual, so that one sum over the ranks brings everything
            attend = partial(self._attention.add_to, x_TN) if self._parallel.is_first else self._attention
            x_TN = attend(seen_TN, tables, cache, batch, query_scale_T11)
        elif self._after_attention is None:
            x_TN = self._attention.add_to(x_TN, seen_TN, tables, cache, batch, query_scale_T11)
        else:
            x_TN = x_TN + self._after_attention(self._attention(seen_TN, tables, cache, batch, query_scale_T11))
        if rows is not None:
            x_TN = x_TN.index_select(0, rows)
        if self._side_by_side:
            seen_TN = seen_TN if rows is None else seen_TN.index_select(0, rows)
            return self._parallel.comm.all_reduce_(self._feed_forward.add_to(x_TN, seen_TN))
        seen_TN = x_TN if self._before_mlp is None else self._before_mlp(x_TN)
        if self._after_mlp is None:
            return self._feed_forward.add_to(x_TN, seen_TN)
        return x_TN + self._after_mlp(self._feed_forward(seen_TN))
