"""Copies a LoRA adapter in PEFT's format into a slot: this rank's rows of each B, and its columns of each A.

A *module* is a projection as transformers has it. The rows of B belong to the rows of the module's weight, so B is read by the
views by which the model reads weights: these give a projection its checkpoint's name, take the rows of queries out of a module
that has queries, keys and values, and multiply rows by constant factors. A belongs to the module's input, which all its rows
share.

Legend: r rank of the adapter, K input width, N output width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from transom_core.errors import ModelError, RequestError
from transom_core.model_files.adapter_files import resolve_adapter
from transom_worker.models.layers.adapters import AdaptedLinear, AdaptedPart, Adapters
from transom_worker.models.loading import Loader
from transom_worker.models.weights.adapter_matrices import AdapterMatrices, NoSuchModule
from transom_worker.models.weights.checkpoint import Weights


def load_adapter(adapters: Adapters, view: Callable[[Weights], Weights], slot: int, path: str) -> None:
    """Copy the adapter at `path`, a folder or a Hugging Face id, into a slot, instead of the one that the slot had.

    `view` gives the weights of a checkpoint the names by which the model reads them.

    Raises:
        RequestError: the adapter cannot be read, or does not fit the model; `param` is "lora_path". The slot then has no whole
            adapter.
    """
    files = resolve_adapter(path, max_rank=adapters.config.max_lora_rank)
    try:
        stored = AdapterMatrices(files.weights)
        load = Loader(weights=view(stored), dtype=adapters.dtype, device=adapters.device)
        for layer in adapters.layers:
            for part in layer.parts:
                found = _matrices(load, stored, part, checks=True)  # before anything is written
                if found is not None and len(found[0]) != files.rank(stored.module):
                    raise ModelError(
                        f"A of {stored.module!r} has {len(found[0])} rows, and {files.rank(stored.module)} by the config"
                    )
        if unknown := stored.unread:
            targets = sorted({module.rpartition(".")[2] for module in stored.asked})
            raise ModelError(
                f"it changes {unknown[0].removesuffix('.weight')!r}; of this model, adapters may change {', '.join(targets)}"
            )
        for layer in adapters.layers:
            _write(layer, load, stored, slot, files.scale)
    except ModelError as error:
        raise RequestError(f"lora_path: {path} cannot be loaded: {error}.", param="lora_path") from None


def _write(
    layer: AdaptedLinear, load: Loader, stored: AdapterMatrices, slot: int, scale: Callable[[str], float]
) -> None:
    """Write a layer's matrices, padded with zeros to the largest rank. A part that the adapter does not change has zeros alone."""
    weights = layer.weights
    for tensor in (weights.a, weights.b, weights.scales):
        tensor[slot].zero_()
    for index, part in enumerate(layer.parts):
        found = _matrices(load, stored, part)
        if found is not None:
            a, b = found
            weights.a[slot, index * weights.rank :][: len(a)].copy_(a)
            weights.b[slot, : len(a), weights.starts[index] : weights.starts[index + 1]].copy_(b.T)
            weights.scales[slot, index] = scale(stored.module)


def _matrices(
    load: Loader, stored: AdapterMatrices, part: AdaptedPart, *, checks: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the part's columns of A [r, K] and rows of B [N, r]; None if the adapter does not change it. With `checks` no rows are
    read, and names and shapes are checked alone."""
    rows, num_heads = (slice(0, 0), None) if checks else (part.rows, part.num_heads)
    try:
        b = load.rows(f"{part.name}.weight", part.shape, rows, num_heads)
    except NoSuchModule:
        return None
    return stored.a[stored.module][:, part.columns], b
