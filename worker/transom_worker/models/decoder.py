"""Builds and runs the decoder that most families share: embedding, layers, final norm and output head, as a family's `Style` says.

`Gemma4` is a subclass; `DeepseekV4` has a decoder of its own. The *residual* is the sum to which layers add their outputs.

Legend: T tokens, R rows whose logits are requested, N hidden width, V this rank's part of the vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.rope import Rope
from transom_kernels.position_scale import position_scale
from transom_worker.models.layer_factory import make_norm, make_rms_norm, make_rotary, make_token_mixer
from transom_worker.models.layers.attention import LayerContext
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.norm import Norm, RmsNorm
from transom_worker.models.layers.residual import Residual, select_rows
from transom_worker.models.layers.rotary_embedding import RotaryTables
from transom_worker.models.loading import Loader
from transom_worker.models.model import Model
from transom_worker.models.style import Style


@dataclass(frozen=True, slots=True)
class Rotations:
    """A step's rotary tables, one for each RoPE of the model, and the factor of queries, if the model has one."""

    tables: dict[Rope, RotaryTables]
    query_scale_T11: torch.Tensor | None


class Decoder(Model):
    """Embedding, layers, final norm and output head of a model."""

    def __init__(self, architecture: Architecture, load: Loader, style: Style) -> None:
        """`load` reads tensors by their Hugging Face names."""
        scales, tied = architecture.scales, architecture.tie_embeddings
        table = (architecture.vocab_size, architecture.hidden_size)
        self.architecture = architecture
        self.vocab, self._adapters = load.share(architecture.vocab_size), load.adapters
        self._embedding = load.embedding("model.embed_tokens", table, scale=scales.embedding)
        self._layers = [
            DecoderLayer(architecture, index, style, load.under(f"model.layers.{index}."))
            for index in range(architecture.num_layers)
        ]
        self._norm = make_norm("model.norm", architecture, style, load)
        self._head = load.head(
            "model.embed_tokens" if tied else "lm_head", table, tied_to=self._embedding if tied else None, scales=scales
        )
        ropes = [rope for rope in set(architecture.ropes) if rope is not None]
        self._rotary = {rope: make_rotary(rope, load, interleaved=rope.stays_interleaved) for rope in ropes}
        indexer = architecture.mla.indexer if architecture.mla is not None else None
        self._index_rotary = {
            rope: make_rotary(rope, load, interleaved=indexer.interleaved)
            for rope in ropes
            if indexer is not None and indexer.interleaved != rope.interleaved
        }
        ends = self._embedding.weight_bytes + self._norm.weight_bytes + self._head.weight_bytes
        self.weight_bytes = ends + sum(layer.weight_bytes for layer in self._layers)

    @torch.inference_mode()
    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._head(hidden_RN)

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Model.hidden`."""
        self._begin_adapters(batch)
        x_TN = self._embedding(batch.token_ids)
        rotations, residual = self._rotations(batch, x_TN.dtype), Residual(x_TN)
        for index in range(len(self._layers)):
            self._layer(index, residual, rotations, batch)
            if batch.after_layer is not None:
                batch.after_layer(index, residual.read())
        return residual.read(self._norm)

    def _begin_adapters(self, batch: ForwardBatch) -> None:
        """Tell the layers which adapters the tokens have."""
        if self._adapters is not None:
            self._adapters.begin(batch.adapter_slots, batch.logit_rows)

    def _rotations(self, batch: ForwardBatch, dtype: torch.dtype) -> Rotations:
        """Return the rotary tables and query factors of the tokens' positions."""
        tables = {rope: rotary(batch.positions, batch.sink_positions) for rope, rotary in self._rotary.items()}
        for rope, rotary in self._index_rotary.items():
            tables[rope] = replace(tables[rope], for_index=rotary(batch.positions))
        scale = self.architecture.scales.query_by_position
        if scale is None:
            return Rotations(tables, None)
        scale_T = position_scale(
            batch.positions, factor=scale.factor, interval=scale.interval, first=scale.first, dtype=dtype
        )
        return Rotations(tables, scale_T[:, None, None])

    def _layer(self, index: int, residual: Residual, rotations: Rotations, batch: ForwardBatch) -> None:
        """Run layer `index`. After the last layer the residual has only the rows whose logits are requested."""
        rope, source = self.architecture.ropes[index], self.architecture.layers[index].reads_cache_of
        cache = index if source is None else source
        scale = self.architecture.scales.query_by_position
        has_scale = scale is not None and (scale.in_all_layers or rope is None)
        context = LayerContext(
            tables=None if rope is None else rotations.tables[rope],
            cache=batch.caches[cache],
            batch=batch.groups[batch.group_of_layer[cache]],
            query_scale_T11=rotations.query_scale_T11 if has_scale else None,
        )
        self._layers[index](residual, context, rows=batch.logit_rows if index == len(self._layers) - 1 else None)


class DecoderLayer:
    """One layer: attention and feed-forward network (none to several in hybrids), whose outputs are added to the residual."""

    def __init__(self, architecture: Architecture, index: int, style: Style, load: Loader) -> None:
        style = style.recurrent if style.recurrent and architecture.layers[index].recurrent is not None else style

        def norm(name: str, load: Loader) -> Norm | None:
            return make_norm(name, architecture, style, load) if name else None

        # Norms of sublayers' outputs, which the next read of the residual applies: only RMS norms can be fused so.
        def sum_norm(name: str) -> RmsNorm | None:
            return make_rms_norm(name, architecture, style, load) if name else None

        self._shares_input = index + 1 in architecture.beside  # the next layer reads the rows that this one reads
        self._before_attention = None if index in architecture.beside else norm(style.norm_before_attention, load)
        self._after_attention, self._after_mlp = sum_norm(style.norm_after_attention), sum_norm(style.norm_after_mlp)
        self._parallel_residual, self._parallel = style.parallel_residual, load.parallel
        load = load.partial() if style.parallel_residual else load
        self._attention = make_token_mixer(architecture, index, style, load)
        count = architecture.num_feed_forwards_of(index)
        # Each feed-forward network and the norm before it; the second is named `1.mlp` and so on.
        self._feed_forwards = [
            (norm(style.norm_before_mlp, part), style.feed_forward(architecture, index, part))
            for part in (load.under(f"{number}." if number else "") for number in range(count))
        ]
        norms = (self._before_attention, self._after_attention, self._after_mlp)
        parts = (self._attention, *norms, *chain.from_iterable(self._feed_forwards))
        self.weight_bytes = sum(part.weight_bytes for part in parts if part is not None)

    def __call__(self, residual: Residual, context: LayerContext, *, rows: torch.Tensor | None = None) -> None:
        """Add the layer's outputs to the residual [T, N]. With `rows` (last layer), keep only these rows after attention."""
        seen_TN = residual.read(self._before_attention) if residual.shared_TN is None else residual.shared_TN
        residual.shared_TN = seen_TN if self._shares_input else None
        if self._parallel_residual:
            self._add_both(residual, seen_TN, context, rows)
            return
        residual.add_output(self._attention, self._after_attention, seen_TN, context)
        if rows is not None:
            residual.select(rows)
        for norm, feed_forward in self._feed_forwards:
            residual.add_output(feed_forward, self._after_mlp, residual.read(norm))

    def _add_both(
        self, residual: Residual, seen_TN: torch.Tensor, context: LayerContext, rows: torch.Tensor | None
    ) -> None:
        """Run a parallel residual: attention and feed-forward network both read the same normalised residual.

        One all-reduce sums both outputs over the ranks. Rank 0 adds the residual to its own outputs before the all-reduce, so that
        the residual counts once.
        """
        before_TN = residual.read()
        attend = partial(self._attention.add_to, before_TN) if self._parallel.is_first else self._attention
        x_TN = attend(seen_TN, context)
        if rows is not None:
            x_TN, seen_TN = select_rows(x_TN, rows), select_rows(seen_TN, rows)
        ((_, feed_forward),) = self._feed_forwards
        residual.replace(self._parallel.comm.all_reduce_(feed_forward.add_to(x_TN, seen_TN)))
