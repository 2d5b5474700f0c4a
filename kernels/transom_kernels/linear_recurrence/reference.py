"""`linear_recurrence`, `causal_convolution` and `gated_rms_norm` in torch: the specification, and where no kernel runs.

Legend: T tokens, H heads, Hk key heads, D key width, Dv value width, L tokens of the convolution's kernel, C channels, N row width.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from transom_kernels.linear_recurrence.inputs import Convolution, GatedNorm, RecurrenceInputs, StateBatch


def linear_recurrence_reference(inputs: RecurrenceInputs, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the heads' results [T, H * Dv] token by token, and write states and rows; sums are in the dtype `wide`."""
    mixed, state, batch = inputs.projected, inputs.state, inputs.batch
    if inputs.convolution is not None:
        mixed = causal_convolution_reference(mixed, inputs.convolution, batch, wide)
    out = mixed.new_zeros(len(mixed), state.shape[1] * state.shape[3])
    for own, read, write in _sequences(batch):
        before = (state[read] if read >= 0 else torch.zeros_like(state[0])).to(wide)
        results, after = _recur(inputs, own, mixed, before)
        out[own] = results.flatten(1).to(out.dtype)
        if write >= 0:
            state[write] = after.to(state.dtype)
    return out


def causal_convolution_reference(
    projected: torch.Tensor, convolution: Convolution, batch: StateBatch, wide: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return silu(convolution) [T, C], rounded to the dtype of `projected`, and write the rows; sums are in the dtype `wide`."""
    out, rows = torch.zeros_like(projected), convolution.rows
    for own, read, write in _sequences(batch):
        earlier = rows[read] if read >= 0 else torch.zeros_like(rows[0])
        tokens = torch.cat([earlier, projected[own]])
        windows = tokens.to(wide).unfold(0, len(convolution.weight), 1)  # [count, C, L]
        total = (windows * convolution.weight.T.to(wide)).sum(2)
        if convolution.bias is not None:
            total += convolution.bias.to(wide)
        out[own] = F.silu(total).to(out.dtype)
        if write >= 0:
            rows[write] = tokens[len(tokens) - len(earlier) :]
    return out


def _sequences(batch: StateBatch) -> Iterator[tuple[slice, int, int]]:
    """Yield the tokens of each sequence that has any, with the blocks that it reads and writes."""
    offsets = batch.query_offset.tolist()
    for b, (read, write) in enumerate(zip(batch.read_block.tolist(), batch.write_block.tolist(), strict=True)):
        if offsets[b] < offsets[b + 1]:
            yield slice(offsets[b], offsets[b + 1]), read, write


def _recur(
    inputs: RecurrenceInputs, own: slice, mixed: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's results [count, H, Dv] and its last state [H, D, Dv]; `mixed` [T, C] comes from the convolution."""
    (heads, width, value_width), wide = state.shape, state.dtype
    query, key, value = (part[own].to(wide) for part in inputs.parts(mixed))
    query, key = (x.view(len(x), -1, width).repeat_interleave(heads // inputs.key_heads, dim=1) for x in (query, key))
    value = value.view(len(value), heads, value_width)
    if inputs.is_delta_rule:
        query, key = (x * torch.rsqrt((x * x).sum(2, keepdim=True) + 1e-6) for x in (query, key))
        query = query * width**-0.5
    size = (inputs.step_size[own].to(wide) + inputs.step_bias.to(wide)).view(len(query), heads, -1)
    step = F.softplus(size)
    # [count, H, D or 1, Dv or 1]
    steps = step[:, :, None] if inputs.decays_by == "column" else step[..., None]
    rate = inputs.rate.to(wide).view(heads, *(inputs.rate.shape[1:] or (1, 1)))
    decay = torch.exp(-rate * steps)
    if inputs.most_decay:
        decay = torch.exp(-inputs.most_decay * torch.sigmoid(rate * size[..., None]))
    results = torch.empty_like(value)
    for t in range(len(query)):
        state = state * decay[t]
        if inputs.strength is None:
            change = step[t] * value[t]
        else:
            known = (state * key[t, :, :, None]).sum(1)
            beta = inputs.most_strength * torch.sigmoid(inputs.strength[own][t].to(wide))
            change = beta[:, None] * (value[t] - known)
        state = state + key[t, :, :, None] * change[:, None]
        results[t] = (state * query[t, :, :, None]).sum(1)
    if inputs.skip is not None:
        results += inputs.skip.to(wide).view(heads, -1) * value
    return results, state


def gated_rms_norm_reference(norm: GatedNorm) -> torch.Tensor:
    """Return rms_norm(x) * weight * silu(gate), or with `gates_first` rms_norm(x * silu(gate)) * weight, of groups; [T, N]."""
    x, gate, weight, eps, size, gates_first, by_sigmoid = norm
    y, factor = x.float(), (torch.sigmoid if by_sigmoid else F.silu)(gate.float())
    if weight is None:
        return (y.view(len(y), factor.shape[1], -1) * factor[:, :, None]).flatten(1).to(x.dtype)
    y = (y * factor if gates_first else y).reshape(len(x), -1, size)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float().view(-1, size)
    y = y.flatten(1)
    return (y if gates_first else y * factor).to(x.dtype)
