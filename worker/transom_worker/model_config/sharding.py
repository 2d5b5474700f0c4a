"""Who holds what where several ranks share a model. Integers only, no torch.

Units stay whole: a KV head with the query heads that read it, an output group of DeepSeek V4, a column of an inner layer, a row
of the vocabulary. Shares are contiguous and cover everything once, and the first ranks take more where it is uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transom_worker.errors import ConfigError
from transom_worker.model_config.architecture import Architecture
from transom_worker.model_config.layer_attention import LayerAttention

FRIENDLY_WIDTH = 32  # columns: whole vectors of any device, and whole groups of MXFP4
LEAST_UNITS = (
    8  # friendly widths a rank, so that uneven ones cost an eighth at most; below it columns are dealt one by one
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """One rank's query heads of a layer, and the KV heads that they read."""

    queries: slice
    kv: slice

    @property
    def num_queries(self) -> int:
        """How many query heads."""
        return int(self.queries.stop - self.queries.start)

    @property
    def num_kv(self) -> int:
        """How many KV heads."""
        return int(self.kv.stop - self.kv.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most ranks that can share a model, and what there is no more of."""

    size: int
    what: str


def cut(total: int, rank: int, size: int) -> slice:
    """A rank's part of `total` columns or rows, in multiples of a friendly width where every rank gets several."""
    unit = FRIENDLY_WIDTH if total >= LEAST_UNITS * FRIENDLY_WIDTH * size else 1
    share = _share(-(-total // unit), rank, size)
    return slice(share.start * unit, min(share.stop * unit, total))


def head_share(architecture: Architecture, index: int, rank: int, size: int) -> HeadShare:
    """A rank's heads of layer `index`.

    KV heads are dealt to ranks, or where there are fewer of them ranks to KV heads; a KV head's query heads go with it. Which KV
    heads a rank holds depends on their number alone, so a layer that reads another's cache finds there what its queries read.
    """
    layer = architecture.layers[index]
    if layer.latent:
        return HeadShare(
            queries=_whole_units(layer.num_heads, _latent_units(architecture, layer), rank, size), kv=_all(1)
        )
    source = layer if layer.reads_cache_of is None else architecture.layers[layer.reads_cache_of]
    num_kv = source.num_kv_heads
    if size <= num_kv:
        return HeadShare(queries=_whole_units(layer.num_heads, num_kv, rank, size), kv=_share(num_kv, rank, size))
    head, ranks = next((head, ranks) for head, ranks in enumerate(_holders(num_kv, size)) if rank in ranks)
    readers = layer.num_heads // num_kv
    own = _share(readers, rank - ranks.start, len(ranks))
    first = head * readers
    return HeadShare(queries=slice(first + own.start, first + own.stop), kv=slice(head, head + 1))


def kv_holders(num_kv_heads: int, head: int, size: int) -> range:
    """The ranks that hold a KV head."""
    if size > num_kv_heads:
        return list(_holders(num_kv_heads, size))[head]
    holds = (rank for rank in range(size) if _share(num_kv_heads, rank, size).stop > head)
    return range(first := next(holds), first + 1)


def largest_size(architecture: Architecture) -> Limit:
    """The most ranks: each must get a whole unit of everything that is cut."""
    fewest = min(architecture.layers, key=lambda layer: _query_units(architecture, layer))
    what = "query heads" if architecture.deepseek_v4 is None else "output groups of heads"
    limits = [
        Limit(size=_query_units(architecture, fewest), what=what),
        *(Limit(size=width, what=what) for what, width in inner_sizes(architecture).items()),
        Limit(size=architecture.vocab_size, what="tokens in its vocabulary"),
    ]
    return min(limits, key=lambda limit: limit.size)


def check_size(architecture: Architecture, size: int) -> None:
    """Whether so many ranks can share the model.

    Raises:
        ConfigError: they cannot; names the most that can.
    """
    limit = largest_size(architecture)
    if size > limit.size:
        raise ConfigError(
            f"--tensor-parallel-size is {size}; this {architecture.family} model has {limit.size} {limit.what}, which stay "
            f"whole. Give at most {limit.size}."
        )


def inner_sizes(architecture: Architecture) -> dict[str, int]:
    """Widths of the feed-forward parts, by what they are columns of."""
    mixture = architecture.mixture
    if mixture is None:
        return {"inner columns": architecture.intermediate_size}
    sizes = {"inner columns of an expert": mixture.inner_size}
    if len(mixture.layers) < architecture.num_layers or architecture.family == "gemma4_text":
        sizes["inner columns of a dense layer"] = mixture.dense_size
    return sizes


def _query_units(architecture: Architecture, layer: LayerAttention) -> int:
    return _latent_units(architecture, layer) if layer.latent else layer.num_heads


def _latent_units(architecture: Architecture, layer: LayerAttention) -> int:
    """Every head reads the one latent row; V4's are projected by groups, which stay whole."""
    return layer.num_heads if architecture.deepseek_v4 is None else architecture.deepseek_v4.output_groups


def _holders(num_kv_heads: int, size: int) -> Iterator[range]:
    """The ranks of each KV head; the last heads get one more, so that the first ranks have more query heads."""
    base, extra = divmod(size, num_kv_heads)
    start = 0
    for head in range(num_kv_heads):
        count = base + (head >= num_kv_heads - extra)
        yield range(start, start + count)
        start += count


def _whole_units(num_heads: int, units: int, rank: int, size: int) -> slice:
    share, heads = _share(units, rank, size), num_heads // units
    return slice(share.start * heads, share.stop * heads)


def _all(count: int) -> slice:
    return slice(0, count)


def _share(units: int, rank: int, size: int) -> slice:
    base, extra = divmod(units, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))
