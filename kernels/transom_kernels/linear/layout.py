"""The memory layout of a packed weight [N outputs, K inputs], which the CPU kernels read: panels of 16 outputs.

A panel is a sequence of 64-byte lines. A line holds one *word* of 32 bits for each of the 16 outputs: one float32, or a pair of
16-bit numbers (k, k + 1). A weight of 40 outputs and 100 inputs in bfloat16 has 3 panels of 64 lines: K is padded to 128 and N
to 48, with zeros. In a gated weight panels of gate and of up alternate.

Kernels have these numbers compiled in.
"""

from typing import Literal

OUTPUTS = 16  # outputs of a panel
LINE = 64  # bytes of a line
WORD = 4  # bytes of a word

# Numbers in a word.
NUMBERS_PER_WORD = {"f32": 1, "bf16": 2, "f16": 2}
# K is padded to a multiple of this: whole tiles of AMX, and whole rounds of the vector products.
PADDED = {"f32": 4, "bf16": 32, "f16": 32}


# The instructions that multiply rows by panels:
#   tiles  bfloat16, by the tile registers of AMX
#   pairs  bfloat16, by AVX512-BF16
#   wide   any dtype, widened to float32
Method = Literal["tiles", "pairs", "wide"]

TILE_ROWS = 16  # rows of an AMX tile
# Groups of two panels by which a chunk of rows is multiplied before the next chunk.
GROUPS_OF_CHUNK = 4
# Bytes of a panel that one step multiplies.
STEP_BYTES = {"tiles": 1024, "pairs": LINE, "wide": LINE}
# (16-lane vectors that fit into the registers, the weight's dtype) -> (rows, panels) of the tile that multiplies many rows, and
# (rows, panels) of the one for few rows. The sums of a tile, the weights and a number of x must fit into the registers.
VECTOR_TILES = {
    (32, "f32"): ((8, 2), (4, 2)),
    (32, "bf16"): ((8, 2), (4, 2)),
    (32, "f16"): ((8, 2), (4, 2)),
    (8, "f32"): ((6, 1), (2, 1)),
    (8, "bf16"): ((4, 1), (2, 1)),
    (8, "f16"): ((4, 1), (2, 1)),
    (4, "f32"): ((2, 1), (2, 1)),
    (4, "bf16"): ((2, 1), (2, 1)),
    (4, "f16"): ((2, 1), (2, 1)),
}


def padded_width(width: int, dtype: str) -> int:
    """Return K with padding."""
    return -(-width // PADDED[dtype]) * PADDED[dtype]


def panel_bytes(width: int, dtype: str) -> int:
    """Return the bytes of a panel of a weight with K = `width`."""
    return padded_width(width, dtype) // NUMBERS_PER_WORD[dtype] * LINE


def num_panels(num_outputs: int) -> int:
    """Return the number of panels of a weight with N = `num_outputs`."""
    return -(-num_outputs // OUTPUTS)
