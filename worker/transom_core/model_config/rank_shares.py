"""Describes what each tensor-parallel rank holds, for `transom plan` and the start-up log. This module imports no torch.

Example of a line: "rank 0 of 2: query heads 0-5 of 9, KV heads 0-1 of 3; inner columns ...; vocabulary ...". `sharding.py` computes
the parts; this module collects them into dataclasses, JSON values and lines of text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.sharding import head_share, inner_sizes, kv_holders, width_share

Span = tuple[int, int]  # [start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    """One rank's heads in a kind of layer: the layers whose heads are divided in the same way. `kv_heads` is None for latent KV.

    In layers with a short convolution `channels` are the rank's channels; its heads are units of neighbouring channels.
    """

    num_layers: int
    query_heads: Span
    of_query_heads: int
    kv_heads: Span | None
    of_kv_heads: int
    channels: Span | None = None
    has_states: bool = False  # recurrent layers: the heads are those of states, and key heads instead of KV heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank holds of everything that is divided among ranks.

    `heads` has one entry per kind of layer, `columns` maps a kind of feed-forward layer to inner columns, and `vocabulary` gives
    rows of the embedding.
    """

    rank: int
    heads: tuple[LayerHeads, ...]
    columns: dict[str, Span]
    vocabulary: Span

    def as_json(self) -> dict[str, Any]:
        """Return the share as JSON values; spans are [start, end)."""
        heads = [{name: _listed(value) for name, value in asdict(part).items()} for part in self.heads]
        columns = {what: list(span) for what, span in self.columns.items()}
        return {"rank": self.rank, "heads": heads, "columns": columns, "vocabulary": list(self.vocabulary)}


def rank_shares(architecture: Architecture, size: int) -> tuple[RankShare, ...]:
    """Return the shares of all ranks; `size` is a number of ranks that `check_size` allows."""
    return tuple(
        RankShare(
            rank=rank,
            heads=_heads(architecture, rank, size),
            columns={what: _span(width_share(width, rank, size)) for what, width in inner_sizes(architecture).items()},
            vocabulary=_span(width_share(architecture.vocab_size, rank, size)),
        )
        for rank in range(size)
    )


def replicated_parts(architecture: Architecture, size: int) -> tuple[str, ...]:
    """Return, in words, the parts of which several ranks hold equal copies; KV heads too, if there are more ranks than KV heads."""
    parts = ["norms"]
    layers = architecture.layers
    kinds = {(layer.num_kv_heads, layer.recurrent is not None) for layer in layers if not layer.latent}
    for num_kv, is_recurrent in sorted(kind for kind in kinds if kind[0] < size):
        holders = [len(kv_holders(num_kv, head, size)) for head in range(num_kv)]
        each = f"{min(holders)}" if min(holders) == max(holders) else f"{min(holders)} or {max(holders)}"
        parts.append(
            f"each of {num_kv} {'key heads of recurrent layers' if is_recurrent else 'KV heads'} (on {each} ranks)"
        )
    if any(layer.latent for layer in layers):
        parts.append("the latent KV cache (one row a token for all heads) and its projections")
    if any(layer.compression is not None for layer in layers):
        parts.append("compressed entries, compressors and indexers")
    if architecture.deepseek_v4 is not None:
        parts.append("residual streams")
    if architecture.mixture is not None:
        parts.append("routers")
        if architecture.mixture.latent_size:
            parts.append("projections to the experts' latent width and back")
    if architecture.layer_embedding_size:
        parts.append("projections of the layers' own embeddings")
    return tuple(parts)


def rank_lines(shares: Sequence[RankShare]) -> list[str]:
    """Return one line of text per rank."""
    return [_line(share, shares[-1]) for share in shares]


def _line(share: RankShare, last: RankShare) -> str:
    several = len(share.heads) > 1
    heads = [
        (f"channels {_range(part.channels)}" if part.channels else _heads_text(part))
        + (f" in {part.num_layers} layers" if several else "")
        for part in share.heads
    ]
    columns = [f"{what} {_range(span)} of {last.columns[what][1]:,}" for what, span in share.columns.items()]
    vocabulary = f"vocabulary {_range(share.vocabulary)} of {last.vocabulary[1]:,}"
    return f"rank {share.rank} of {last.rank + 1}: {'; '.join((*heads, *columns, vocabulary))}"


def _heads_text(part: LayerHeads) -> str:
    if part.has_states:
        return f"heads with states {_range(part.query_heads)} of {part.of_query_heads}"
    kv = "latent KV" if part.kv_heads is None else f"KV heads {_range(part.kv_heads)} of {part.of_kv_heads}"
    return f"query heads {_range(part.query_heads)} of {part.of_query_heads}, {kv}"


def _range(span: Span) -> str:
    start, end = span
    return f"{start:,}" if end == start + 1 else f"{start:,}-{end - 1:,}"


def _heads(architecture: Architecture, rank: int, size: int) -> tuple[LayerHeads, ...]:
    """Return a rank's heads by kind of layer, in the order in which the kinds first occur."""
    count: dict[tuple[int, int, bool, Span, Span, Span | None, bool], int] = {}
    for index, layer in enumerate(architecture.layers):
        share = head_share(architecture, index, rank, size)
        source = layer if layer.reads_cache_of is None else architecture.layers[layer.reads_cache_of]
        queries, width = _span(share.queries), layer.head_size
        channels = None if layer.convolution is None else (queries[0] * width, queries[1] * width)
        has_states = layer.recurrent is not None
        kind = (layer.num_heads, source.num_kv_heads, layer.latent, queries, _span(share.kv), channels, has_states)
        count[kind] = count.get(kind, 0) + 1
    return tuple(
        LayerHeads(
            num_layers=num_layers,
            query_heads=queries,
            of_query_heads=num_queries,
            kv_heads=None if latent else kv,
            of_kv_heads=num_kv,
            channels=channels,
            has_states=has_states,
        )
        for (num_queries, num_kv, latent, queries, kv, channels, has_states), num_layers in count.items()
    )


def _span(part: slice) -> Span:
    return (int(part.start), int(part.stop))


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
