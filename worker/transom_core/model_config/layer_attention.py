"""`LayerAttention`: which tokens a layer's attention or convolution reads, and what its KV cache keeps. Imports no torch.

KV cache groups, the planner's bytes and attention masks are all derived from this dataclass.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressed entries that a DeepSeek V4 layer keeps besides its window: one entry for every `ratio` tokens.

    An entry is pooled from its own `ratio` tokens and from those of the `overlap` entries before it. Example: with a ratio of 4 and
    an overlap of 1, entry 2 is made of tokens 4 to 11. `index_size` is the width of the indexer's keys, by which queries select
    entries; 0 means that a query reads every entry.
    """

    ratio: int
    overlap: int = 0
    index_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The heads of one layer, and which keys its queries read.

    full attention     all tokens up to the query         (window and chunk are None)
    sliding window     the last `window` tokens, the query included, and the first `sinks` tokens
    chunked attention  the tokens from the last multiple of `chunk` up to the query
    convolution        no attention: the gated inputs of the last `convolution` tokens, this one included (LFM2)
    recurrent          no attention: a state that each token changes, after a convolution over the last `recurrent` tokens

    A `latent` layer has one row per token that is key and value of all heads, so all ranks hold that row; `rope_size` of its
    elements are rotary. If its indexer selects the tokens that queries read, it also has a key of `index_size` numbers per token.
    A layer that `reads_cache_of` an earlier layer has no KV cache of its own; such layers come last. The
    "heads" of a convolution are `head_size` neighbouring channels each, so that channels are divided among ranks as heads are; each
    is a key head without a value. A recurrent layer has a state of `head_size` times `value_size` numbers for each of its heads; a
    KV head is a key head, which serves several neighbouring heads. With a `step_rank` it is Mamba-1's: the heads are neighbouring
    channels, which share one key, and the convolution reads values alone.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    latent: bool = False
    rope_size: int = 0
    index_size: int = 0
    compression: Compression | None = None
    convolution: int | None = None  # tokens that a short convolution reads: its kernel's length
    recurrent: int | None = None  # tokens that the convolution of a recurrent layer reads
    step_rank: int = 0  # width of what a Mamba-1 layer projects to the steps of its channels; 0 elsewhere
    reads_cache_of: int | None = None
    value_size: int | None = None  # None: as wide as a key
