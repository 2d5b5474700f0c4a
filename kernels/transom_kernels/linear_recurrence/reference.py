"""`linear_recurrence` and `gated_rms_norm` in torch: the specification, and the fallback where no kernel runs.

Legend: T tokens, H heads, Hk key heads, D key width, Dv value width, L tokens of the convolution's kernel, C channels, N row width.
"""

import torch
import torch.nn.functional as F

from transom_kernels.linear_recurrence.inputs import GatedNorm, RecurrenceInputs


def linear_recurrence_reference(inputs: RecurrenceInputs, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the heads' results [T, H * Dv] token by token, and write states and rows; sums are in the dtype `wide`."""
    projected, batch, state, rows = inputs.projected, inputs.batch, inputs.state, inputs.rows
    out = projected.new_zeros(len(projected), state.shape[1] * state.shape[3])
    offsets = batch.query_offset.tolist()
    for b, (read, write) in enumerate(zip(batch.read_block.tolist(), batch.write_block.tolist(), strict=True)):
        own = slice(offsets[b], offsets[b + 1])
        if own.start == own.stop:
            continue
        earlier = rows[read] if read >= 0 else torch.zeros_like(rows[0])
        before = (state[read] if read >= 0 else torch.zeros_like(state[0])).to(wide)
        tokens = torch.cat([earlier, projected[own]])
        results, after = _recur(inputs, own, _convolve(inputs, tokens, wide), before)
        out[own] = results.flatten(1).to(out.dtype)
        if write >= 0:
            state[write], rows[write] = after.to(state.dtype), tokens[len(tokens) - len(earlier) :]
    return out


def _convolve(inputs: RecurrenceInputs, tokens: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return silu(convolution) of the tokens from the L-th on, [count, C], rounded to the dtype of the tokens."""
    windows = tokens.to(wide).unfold(0, len(inputs.weight), 1)  # [count, C, L]
    total = (windows * inputs.weight.T.to(wide)).sum(2)
    if inputs.bias is not None:
        total += inputs.bias.to(wide)
    return F.silu(total).to(tokens.dtype)


def _recur(
    inputs: RecurrenceInputs, own: slice, mixed: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's results [count, H, Dv] and its last state [H, D, Dv]; `mixed` [count, C] comes from the convolution."""
    (heads, width, value_width), wide = state.shape, state.dtype
    sizes = [inputs.key_heads * width, inputs.key_heads * width, heads * value_width]
    query, key, value = torch.split(mixed.to(wide), sizes, dim=1)
    query, key = (x.view(len(x), -1, width).repeat_interleave(heads // inputs.key_heads, dim=1) for x in (query, key))
    value = value.view(len(value), heads, value_width)
    if inputs.is_delta_rule:
        query, key = (x * torch.rsqrt((x * x).sum(2, keepdim=True) + 1e-6) for x in (query, key))
        query = query * width**-0.5
    step = F.softplus(inputs.step_size[own].to(wide) + inputs.step_bias.to(wide)).view(len(mixed), heads, -1)
    decay = torch.exp(-torch.exp(inputs.log_rate.to(wide))[:, None] * step)
    results = torch.empty_like(value)
    for t in range(len(mixed)):
        state = state * decay[t, :, :, None]
        if inputs.strength is None:
            change = step[t] * value[t]
        else:
            known = (state * key[t, :, :, None]).sum(1)
            change = torch.sigmoid(inputs.strength[own][t].to(wide))[:, None] * (value[t] - known)
        state = state + key[t, :, :, None] * change[:, None]
        results[t] = (state * query[t, :, :, None]).sum(1)
    if inputs.skip is not None:
        results += inputs.skip.to(wide)[:, None] * value
    return results, state


def gated_rms_norm_reference(norm: GatedNorm) -> torch.Tensor:
    """Return rms_norm(x) * weight * silu(gate), or with `gates_first` rms_norm(x * silu(gate)) * weight, of groups; [T, N]."""
    x, gate, weight, eps, size, gates_first, by_sigmoid = norm
    y, factor = x.float(), (torch.sigmoid if by_sigmoid else F.silu)(gate.float())
    if weight is None:
        return (y * factor).to(x.dtype)
    y = (y * factor if gates_first else y).reshape(len(x), -1, size)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float().view(-1, size)
    y = y.flatten(1)
    return (y if gates_first else y * factor).to(x.dtype)
