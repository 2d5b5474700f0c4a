"""The argument words of the CPU kernels of `paged_attention`, by number. Strides are in bytes."""

(
    Q, K_CACHE, V_CACHE, OUT, PARTIALS, SINK_LOGITS,
    BLOCK_TABLE, FIRST_BLOCK, ATTEND_FROM, START, QUERY_OFFSET,  # int32 tensors of the batch
    TILES, NUM_TILE_ITEMS,  # int32 [tiles, 2]: sequence and first token of a prompt's tiles; items that compute them
    DECODING, NUM_SLOTS, MAX_UNITS,  # int32 numbers of decoding sequences, or 0: all; items of a head; partial results of a row
    COLUMNS, BLOCK_SIZE, NUM_SINK_BLOCKS,  # of the block table
    WINDOW, NUM_SINK_TOKENS, CHUNK,  # the mask rule; 0: none
    Q_ROW, Q_HEAD, K_BLOCK, K_TOKEN, K_HEAD, V_BLOCK, V_TOKEN, V_HEAD, SINK_STRIDE,
    KV_HEADS, SCALE, SOFT_CAP,
    K_SCALE, KS_BLOCK, KS_TOKEN, KS_HEAD, V_SCALE, VS_BLOCK, VS_TOKEN, VS_HEAD,  # scales of quantised caches; 0: none
) = range(42)  # fmt: skip
