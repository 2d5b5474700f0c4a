"""The argument words of the CPU kernel of `latent_attention`, by number, behind those that it shares with `paged_attention`.

Strides are in bytes. Rows are read from two places: 0, the window, and 1, the entries.
"""

FIRST_OWN = 34  # the words of scales are not shared: latent rows are never quantised
(
    QUERIES, QUERY_ROW, QUERY_HEAD,
    CACHE, SLOTS, NUM_SLOTS, SLOT_ROW, BLOCK_ROWS, BLOCK_STRIDE, ROW_STRIDE,  # of the window; the same of the entries follow
) = range(FIRST_OWN, FIRST_OWN + 10)  # fmt: skip
PLACE_WORDS = 7
NUM_WORDS = CACHE + 2 * PLACE_WORDS
