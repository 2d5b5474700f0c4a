"""Launches the Triton kernels of `paged_attention`. A step is planned once for all layers (`launches.py`).

A *tiling* cuts sequences into *tiles*, a few query tokens each, and splits tiles along their keys; a *work item* is a tile or one
of its splits (`work_items.py`). In each layer every launch of the plan runs the kernel `attend` over the work items of one tiling;
if tiles were split, the kernel `combine` merges their partial results. The arguments that depend on a layer's shapes and options
are prepared at the first step (`LayerKernels`).

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, M rows of a tile, P block size in tokens.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from transom_kernels.launch import (
    INTERPRETED,
    capability_of,
    multiprocessors_of,
    next_power_of_two,
    shared_bytes,
    split_width,
)
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.triton.attend import attend
from transom_kernels.paged_attention.triton.launches import AttentionLaunch, LaunchKey, launches_of
from transom_kernels.paged_attention.triton.steps import combine
from transom_kernels.paged_attention.triton.tuning import COMBINED_AT_ONCE, kernel_config
from transom_kernels.prepared_launch import PreparedLaunch, kept
from transom_kernels.quantised_kv import is_packed, refuse_old_device


@dataclass(slots=True)
class TileKernels:
    """The prepared kernels for tiles with up to `rows` rows."""

    attend: PreparedLaunch
    combine: PreparedLaunch
    rows: int


class LayerKernels:
    """The kernels of all layers with equal shapes, strides and options."""

    def __init__(self, inputs: PagedInputs) -> None:
        """Raises ValueError if `inputs` do not fit together or the device does not support the cache's dtype."""
        inputs.check()
        refuse_old_device(inputs.k_cache)
        q, batch, rule = inputs.q, inputs.batch, inputs.rule
        self.kv_heads, self.value_width = inputs.kv_heads, inputs.value_width
        self.key = LaunchKey(
            rule=rule,
            group=inputs.group,
            kv_heads=max(inputs.kv_heads, inputs.most_kv_heads),
            key_size=q.shape[2],
            value_size=inputs.value_width,
            element_bytes=q.element_size(),
            cache_bytes=inputs.k_cache.element_size(),
            multiprocessors=multiprocessors_of(q.device),
        )
        self._device, self._capability = q.device, capability_of(q.device)
        has_sinks = inputs.sink_logits is not None
        self._of_combine = {"GROUP": inputs.group, "E": self.value_width, "HAS_SINK_LOGITS": has_sinks}
        (d1, d2), (e1, e2) = split_width(q.shape[2]), split_width(self.value_width)
        self._of_attend: dict[str, Any] = {
            **self._of_combine,
            **_strides("q", ("t", "h"), q),
            **_strides("k", ("b", "p", "h"), inputs.k_cache),
            **_strides("v", ("b", "p", "h"), inputs.v_cache),
            **_strides("ks", ("b", "p", "h"), inputs.k_scale),
            **_strides("vs", ("b", "p", "h"), inputs.v_scale),
            **{"scale": inputs.scale, "soft_cap": inputs.soft_cap or 0.0, "num_kv_heads": self.kv_heads},
            **{"num_sink_blocks": batch.num_sink_blocks, "BLOCK_SIZE": batch.block_size},
            **{"D": q.shape[2], "D1": d1, "D2": d2, "E1": e1, "E2": e2},
            **{"WINDOW": rule.window or 0, "SINKS": rule.num_sink_tokens, "CHUNK": rule.chunk or 0},
            **{"HAS_SOFT_CAP": inputs.soft_cap is not None, "HAS_SCALES": inputs.k_scale is not None},
            **{"PACKED": is_packed(inputs.k_cache), "UPCAST": INTERPRETED},
        }
        self._by_tile_tokens: dict[int, TileKernels] = {}

    def of_tiles(self, tile_tokens: int) -> TileKernels:
        """Return the kernels for tiles with up to `tile_tokens` query tokens."""
        if tile_tokens not in self._by_tile_tokens:
            key, rows = self.key, tile_tokens * self.key.group
            config = kernel_config(
                rows=rows,
                key_size=key.key_size,
                value_size=self.value_width,
                element_bytes=key.element_bytes,
                cache_bytes=key.cache_bytes,
                capability=self._capability,
            )
            if key.element_bytes > 2:  # queries beside an iteration's keys and values; 16-bit tiles fit everywhere
                numbers = (config.block_m + config.block_n) * key.key_size + config.block_n * self.value_width
                if 0 < (most := shared_bytes(self._device)) < 4 * numbers:
                    raise ValueError(
                        f"Attention in float32 over keys of {key.key_size} numbers with {key.group} query heads each takes "
                        f"{4 * numbers} bytes of shared memory; a program has {most} on this GPU. Choose bfloat16."
                    )
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
            tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
            blocks = {"BLOCK_E": next_power_of_two(self.value_width), "BLOCK_S": COMBINED_AT_ONCE}
            combined = {**self._of_combine, **blocks, "num_kv_heads": self.kv_heads}
            self._by_tile_tokens[tile_tokens] = TileKernels(
                PreparedLaunch(attend, self._of_attend | tile, **options), PreparedLaunch(combine, combined), rows
            )
        return self._by_tile_tokens[tile_tokens]


def paged_attention_triton(inputs: PagedInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `q` [T, H, D]: softmax(scale q k^T) v over the cached keys that `rule` lets each query see.

    Caches are [ids, P, KVH, D] and [ids, P, KVH, Dv]; `batch` has block tables and positions.

    Raises:
        ValueError: `inputs` do not fit together.
    """
    q = inputs.q
    own = (inputs.rule, inputs.scale, inputs.sink_logits is None, q.shape[1], q.dtype, inputs.batch.num_sink_blocks)
    layer = kept(inputs.launches, own, _layer_kernels, inputs)
    out = q.new_empty(*q.shape[:2], layer.value_width)
    sinks = None if inputs.sink_logits is None else inputs.sink_logits.float()
    for launch in launches_of(inputs.batch, layer.key, q.device):
        _attend(launch, layer, inputs, sinks, out)
    return out


_layers: dict[tuple[Any, ...], LayerKernels] = {}


def _layer_kernels(inputs: PagedInputs) -> LayerKernels:
    """Return the kernels for inputs of these shapes and options. The cache's key is all that `LayerKernels` reads or checks."""
    q, batch = inputs.q, inputs.batch
    tensors = (inputs.k_cache, inputs.v_cache, inputs.sink_logits, inputs.k_scale, inputs.v_scale)
    # without the number of blocks, since prompts whose latent rows are expanded have their own
    caches = [None if tensor is None else (tensor.shape[1:], tensor.stride(), tensor.dtype) for tensor in tensors]
    key = (
        *(q.shape[1:], q.stride(), q.dtype, q.device, *caches, inputs.scale, inputs.soft_cap),
        *(inputs.rule, inputs.most_kv_heads, batch.block_size, batch.num_sink_blocks),
    )
    if key not in _layers:
        _layers[key] = LayerKernels(inputs)
    return _layers[key]


def _strides(name: str, axes: tuple[str, ...], tensor: torch.Tensor | None) -> dict[str, int]:
    """Return the kernel's parameters for the strides of a tensor's first axes; zeros if the tensor is None."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, strides, strict=False)}


@cache
def _unused(device: torch.device) -> torch.Tensor:
    """Return a tensor that stands in for float32 tensors that a launch neither reads nor writes."""
    return torch.empty(4, dtype=torch.float32, device=device)


def _attend(
    launch: AttentionLaunch, layer: LayerKernels, inputs: PagedInputs, sinks: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Run `attend` over the work items of a launch, and `combine` over its split tiles."""
    q, batch, work, kernels = inputs.q, inputs.batch, launch.work, layer.of_tiles(launch.max_tile_tokens)
    unused = partial_out = partial_stats = _unused(q.device)
    if work.num_partials:
        shape = (work.num_partials, q.shape[1])
        partial_out = q.new_empty((*shape, layer.value_width), dtype=torch.float32)
        partial_stats = q.new_empty((*shape, 2), dtype=torch.float32)
    sink_logits = unused if sinks is None else sinks
    caches = (q, inputs.k_cache, inputs.v_cache)
    k_scale = unused if inputs.k_scale is None else inputs.k_scale
    v_scale = unused if inputs.v_scale is None else inputs.v_scale
    kernels.attend(
        (launch.num_items, layer.kv_heads, 1),
        (
            *(*caches, out, partial_out, partial_stats, work.items, batch.block_table, batch.first_block),
            *(batch.attend_from, sink_logits, k_scale, v_scale),
        ),
        batch.block_table.stride(0),
    )
    if launch.num_combine_items:
        pointers = (partial_out, partial_stats, out, work.combine_items, sink_logits)
        kernels.combine((launch.num_combine_items, kernels.rows, layer.kv_heads), pointers)
