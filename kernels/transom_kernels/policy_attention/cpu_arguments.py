"""The argument words of the CPU kernels of `policy_attention`, by number, behind those that they share with `paged_attention`."""

FIRST_OWN = 48
(
    KEY_BLOCKS, NUM_COLUMNS, WINDOWS, SINKS, ROW_SEQUENCE,  # int32 tensors of the batch
    SINK_Q,  # queries for the sink tokens, strides as those of the queries; or 0
    STATISTICS,  # float32 [T, H, 2]; or 0
    MASS, MASS_UNITS,  # float32 [B, N]; items of a sequence that compute it
) = range(FIRST_OWN, FIRST_OWN + 9)  # fmt: skip
NUM_WORDS = FIRST_OWN + 9
