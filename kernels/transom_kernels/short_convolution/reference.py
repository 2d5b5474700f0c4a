"""The arguments of `short_convolution`, and the operator in torch: the specification, and the fallback where no kernel runs.

Legend: T tokens, L tokens of the convolution's kernel, C channels, U units of D neighbouring channels, P block size in tokens.
"""

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.inputs import PagedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionInputs:
    """The arguments of `short_convolution`. The cache keeps a row of C = U * D channels per token, by units of channels."""

    projected: torch.Tensor  # [T, 3 C]: the gate of the input, the gate of the output, and x
    weight: torch.Tensor  # [L, C]; the last row belongs to the token itself
    bias: torch.Tensor | None  # [C]
    cache: torch.Tensor  # [ids, P, U, D]
    batch: PagedBatch  # block tables and positions

    @property
    def channels(self) -> int:
        """Return C."""
        return self.weight.shape[1]

    def check(self) -> None:
        """Raise ValueError unless shapes and dtypes fit together."""
        tensors = [tensor for tensor in (self.projected, self.weight, self.bias, self.cache) if tensor is not None]
        units, width = self.cache.shape[2:]
        if self.projected.shape[1] != 3 * self.channels or units * width != self.channels:
            raise ValueError(
                f"projected {tuple(self.projected.shape)}, weight {tuple(self.weight.shape)} and cache "
                f"{tuple(self.cache.shape)} do not fit: give three times the weight's channels, and a cached row of all channels."
            )
        if len({tensor.dtype for tensor in tensors}) > 1 or self.cache.shape[1] != self.batch.block_size:
            raise ValueError(f"give tensors of one dtype, and a cache with blocks of {self.batch.block_size} tokens.")


def short_convolution_reference(inputs: ConvolutionInputs) -> torch.Tensor:
    """Write the tokens' rows to the cache and return gate_out * (bias + sum_d weight[L - 1 - d] * row[p - d]), [T, C]."""
    batch, cache, length = inputs.batch, inputs.cache, len(inputs.weight)
    gate_in, gate_out, x = inputs.projected.float().chunk(3, dim=1)
    rows = (gate_in * x).to(cache.dtype)
    # The rows before the step are read before any row is written.
    before = [_rows_before(inputs, b, length - 1) for b in range(len(batch.start))]
    written = batch.slots >= 0
    slots = batch.slots[written]
    cache[slots // batch.block_size, slots % batch.block_size] = rows[written].view(-1, *cache.shape[2:])
    out = torch.zeros_like(rows)
    for b, earlier in enumerate(before):
        begin, end = batch.query_offset[b : b + 2].tolist()
        window = torch.cat([earlier, rows[begin:end]]).float().unfold(0, length, 1)  # [count, C, L]
        total = torch.zeros_like(gate_out[begin:end])
        if inputs.bias is not None:
            total += inputs.bias.float()
        for tap in range(length):
            total += inputs.weight[tap].float() * window[..., tap]
        out[begin:end] = (gate_out[begin:end] * total).to(out.dtype)
    return out


def _rows_before(inputs: ConvolutionInputs, b: int, count: int) -> torch.Tensor:
    """Return the cached rows of the `count` tokens before sequence `b`'s first one in this step, [count, C]."""
    batch, start = inputs.batch, int(inputs.batch.start[b])
    rows = inputs.cache.new_zeros(count, inputs.channels)
    for position in range(max(0, start - count, int(batch.attend_from[b])), start):
        column = position // batch.block_size - int(batch.first_block[b])
        block = int(batch.block_table[b, column])
        rows[count - start + position] = inputs.cache[block, position % batch.block_size].flatten()
    return rows
