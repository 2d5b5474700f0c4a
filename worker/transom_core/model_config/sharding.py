"""Computes which heads, columns and vocabulary rows each tensor-parallel rank holds. This module imports no torch.

A rank's *share* is the slice of heads, columns or rows that the rank holds. A *unit* is never divided between ranks. Units are: a
KV head with the query heads that read it, a key head with its recurrent states, neighbouring channels of a convolution, an output
group of DeepSeek V4 (heads that are projected together), a column of a feed-forward layer, a row of the vocabulary. The ranks'
shares are contiguous and cover everything once. There is one exception: with more ranks than KV heads (or key heads of Mamba-2),
several ranks hold the same KV head and divide its query heads. If the units do not divide evenly, the first ranks hold one more.

Example: 9 query heads and 3 KV heads on 2 ranks: rank 0 holds 6 and 2, rank 1 holds 3 and 1. On 4 ranks, the KV heads 0, 1 and 2
are held by 1, 1 and 2 ranks, and the ranks hold 3, 3, 2 and 1 query heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from transom_core.errors import ConfigError
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.layer_attention import LayerAttention

ALIGNED_WIDTH = 32  # columns: a multiple of any device's vector width and of an MXFP4 group
# Columns are divided in aligned widths only if each rank gets at least this number of them. Shares differ by at most one aligned
# width, which is then at most an eighth.
MIN_ALIGNED_WIDTHS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """One rank's query heads of a layer, and the KV heads that they read."""

    queries: slice
    kv: slice

    @property
    def num_queries(self) -> int:
        """Return the number of query heads."""
        return int(self.queries.stop - self.queries.start)

    @property
    def num_kv(self) -> int:
        """Return the number of KV heads."""
        return int(self.kv.stop - self.kv.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest number of ranks that can share a model, and the units that limit it."""

    size: int
    what: str  # such as "query heads"


def width_share(total: int, rank: int, size: int) -> slice:
    """Return a rank's share of `total` columns or rows, in multiples of `ALIGNED_WIDTH` if every rank gets enough of them.

    Example: 1,000 columns on 3 ranks are 32 aligned widths, the last of 8 columns: 352, 352 and 296 columns.
    """
    unit = ALIGNED_WIDTH if total >= MIN_ALIGNED_WIDTHS * ALIGNED_WIDTH * size else 1
    share = _unit_share(-(-total // unit), rank, size)
    return slice(share.start * unit, min(share.stop * unit, total))


def head_share(architecture: Architecture, index: int, rank: int, size: int) -> HeadShare:
    """Return a rank's heads of layer `index`.

    KV heads are divided among ranks; if there are more ranks than KV heads, ranks are divided among KV heads. A rank holds the
    query heads that read its KV heads. Which KV heads a rank holds depends only on how many there are, so a layer that reads
    another layer's cache finds the KV heads that its queries read on the same rank.
    """
    layer = architecture.layers[index]
    if layer.latent:  # every rank holds the one latent row, which all heads read
        units = _latent_units(architecture, layer)
        return HeadShare(queries=_query_share(layer.num_heads, units, rank, size), kv=slice(0, 1))
    source = layer if layer.reads_cache_of is None else architecture.layers[layer.reads_cache_of]
    num_kv = source.num_kv_heads
    if size <= num_kv:
        queries = _query_share(layer.num_heads, num_kv, rank, size)
        return HeadShare(queries=queries, kv=_unit_share(num_kv, rank, size))
    head, ranks = next((head, ranks) for head, ranks in enumerate(_holders(num_kv, size)) if rank in ranks)
    num_readers = layer.num_heads // num_kv  # query heads that read this KV head, which its ranks divide
    own = _unit_share(num_readers, rank - ranks.start, len(ranks))
    first = head * num_readers
    return HeadShare(queries=slice(first + own.start, first + own.stop), kv=slice(head, head + 1))


def kv_holders(num_kv_heads: int, head: int, size: int) -> range:
    """Return the ranks that hold a KV head."""
    if size > num_kv_heads:
        return list(_holders(num_kv_heads, size))[head]
    holder = next(rank for rank in range(size) if _unit_share(num_kv_heads, rank, size).stop > head)
    return range(holder, holder + 1)


def largest_size(architecture: Architecture) -> Limit:
    """Return the largest number of ranks for which each gets at least one unit of everything that is divided."""
    fewest = min(architecture.layers, key=lambda layer: _query_units(architecture, layer))
    what = "query heads" if architecture.deepseek_v4 is None else "output groups of heads"
    what = what if fewest.convolution is None and not fewest.step_rank else "units of channels"
    if fewest.recurrent is not None and not fewest.step_rank:
        what = "heads in Mamba-2 layers" if architecture.mamba is not None else "key heads in recurrent layers"
    limits = [
        Limit(size=_query_units(architecture, fewest), what=what),
        *(Limit(size=width, what=what) for what, width in inner_sizes(architecture).items()),
        Limit(size=architecture.vocab_size, what="tokens in its vocabulary"),
    ]
    return min(limits, key=lambda limit: limit.size)


def check_size(architecture: Architecture, size: int) -> None:
    """Check that `size` ranks can share the model.

    Raises:
        ConfigError: they cannot. The message says how many can.
    """
    limit = largest_size(architecture)
    if size > limit.size:
        raise ConfigError(
            f"--tensor-parallel-size is {size}; this {architecture.family} model has {limit.size} {limit.what}, which stay "
            f"whole. Give at most {limit.size}."
        )


def inner_sizes(architecture: Architecture) -> dict[str, int]:
    """Return the inner widths of the feed-forward layers, by name."""
    mixture = architecture.mixture
    if mixture is None:
        return {"inner columns": architecture.intermediate_size}
    sizes = {"inner columns of an expert": mixture.inner_size}
    has_dense_beside_experts = architecture.family == "gemma4_text"  # a dense MLP in every MoE layer
    others = set(range(architecture.num_layers)) - mixture.layers
    if any(architecture.num_feed_forwards_of(index) for index in others) or has_dense_beside_experts:
        sizes["inner columns of a dense layer"] = mixture.dense_size
    return sizes


def _query_units(architecture: Architecture, layer: LayerAttention) -> int:
    """Return the number of units that a layer's query heads form."""
    if layer.recurrent is not None and architecture.mamba is None:
        return layer.num_kv_heads  # projections of delta nets have the parts of a key head side by side
    return _latent_units(architecture, layer) if layer.latent else layer.num_heads


def _latent_units(architecture: Architecture, layer: LayerAttention) -> int:
    """Return the number of units of a layer with one latent row for all heads: DeepSeek V4's output groups, otherwise the heads."""
    return layer.num_heads if architecture.deepseek_v4 is None else architecture.deepseek_v4.output_groups


def _holders(num_kv_heads: int, size: int) -> Iterator[range]:
    """Yield the ranks that hold each KV head; call it only with more ranks than KV heads.

    If the ranks do not divide evenly, the last heads get one more rank, so that the first ranks have more query heads.
    """
    base, extra = divmod(size, num_kv_heads)
    start = 0
    for head in range(num_kv_heads):
        count = base + (head >= num_kv_heads - extra)
        yield range(start, start + count)
        start += count


def _query_share(num_heads: int, units: int, rank: int, size: int) -> slice:
    """Return a rank's share of `num_heads` query heads that form `units` units."""
    share, heads = _unit_share(units, rank, size), num_heads // units
    return slice(share.start * heads, share.stop * heads)


def _unit_share(units: int, rank: int, size: int) -> slice:
    """Return a rank's contiguous share of the units; the first ranks hold one more if units do not divide evenly."""
    base, extra = divmod(units, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))
