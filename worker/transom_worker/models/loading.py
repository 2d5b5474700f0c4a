"""Reads this rank's part of a checkpoint's tensors and makes layers of them, on the model's device and in its dtype.

    layer = load.under("model.layers.0.")                   names are relative to this prefix
    layer.norm("input_layernorm", eps)                      reads model.layers.0.input_layernorm.weight

Legend: N output rows, K input width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from transom_core.model_config.scales import NO_SCALES, Scales
from transom_core.model_config.sharding import width_share
from transom_kernels.gated_mlp import Activation, Limits
from transom_kernels.quantised_linear import GpuRows, StoredRows, concatenated
from transom_worker.models.layers.adapters import AdaptedPart, Adapters
from transom_worker.models.layers.embedding import Embedding, LmHead
from transom_worker.models.layers.linear import GatedMlp, GateUp, Linear, gate_and_up, make_linear, row_parallel
from transom_worker.models.layers.norm import RmsNorm
from transom_worker.models.layers.quantisation import QUANTISED_DTYPES, Quantization, Weight, check_quantization
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator, Parallel
from transom_worker.models.weights.checkpoint import ALL, WHOLE, Part, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Reads tensors whose names begin with `prefix`. A `shape` is that of the whole tensor, before its division among ranks."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = "none"
    parallel: Parallel = field(default_factory=Parallel)
    prefix: str = ""
    sums_over_ranks: bool = True  # layers sum their partial outputs over the ranks
    adapters: Adapters | None = None  # with them, every projection that is loaded takes LoRA adapters

    @property
    def comm(self) -> Communicator:
        """Return the communicator that layers sum with; it does nothing if there is one rank or the caller sums."""
        return self.parallel.comm if self.sums_over_ranks else SINGLE_RANK

    def under(self, prefix: str) -> Loader:
        """Return a loader for names that begin with this loader's prefix followed by `prefix`."""
        return replace(self, prefix=self.prefix + prefix)

    def partial(self) -> Loader:
        """Return a loader for layers whose partial outputs the caller sums over the ranks."""
        return replace(self, sums_over_ranks=False)

    def share(self, total: int) -> slice:
        """Return this rank's share of `total` columns or rows."""
        return width_share(total, self.parallel.rank, self.parallel.size)

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE
    ) -> torch.Tensor:
        """Return a tensor, or a part of it, in `dtype` (default: the model's).

        Raises:
            ModelError: the tensor is missing, or does not have the `shape` given. The message names file and tensor.
        """
        tensor = self.weights(self.prefix + name, shape=shape, part=part)
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def norm(
        self, name: str, eps: float, *, size: int | None = None, plus_one: bool = False, wide: bool = False
    ) -> RmsNorm:
        """Load an RMS norm over rows.

        `plus_one` says that the checkpoint holds the weight minus 1, and `wide` that the weight stays in float32.
        """
        shape = None if size is None else (size,)
        if plus_one:
            return RmsNorm(self.tensor(f"{name}.weight", torch.float32, shape=shape) + 1.0, eps)
        return RmsNorm(self.tensor(f"{name}.weight", torch.float32 if wide else None, shape=shape), eps)

    def embedding(self, name: str, shape: tuple[int, int], *, scale: float = 1.0) -> Embedding:
        """Load this rank's rows of a token embedding."""
        rows = self.share(shape[0])
        table = self.tensor(f"{name}.weight", shape=shape, part=(rows,))
        return Embedding(table, first_id=rows.start, comm=self.parallel.comm, scale=scale)

    def head(
        self, name: str, shape: tuple[int, int], *, tied_to: Embedding | None, scales: Scales = NO_SCALES
    ) -> LmHead:
        """Load this rank's rows of the output head; `name` is the embedding's if the head is tied to it.

        A tied head is read again if it is stored quantised, because the embedding holds it in the model's dtype.
        """
        part = (self.share(shape[0]),)
        stored = self.stored(f"{name}.weight", shape, part)
        rows_VN: Weight | None = stored
        if stored is not None:
            tied_to = None
        elif tied_to is None:
            rows_VN = self.tensor(f"{name}.weight", shape=shape, part=part)
        return LmHead(
            rows_VN, quantization=self.quantization, tied_to=tied_to, scale=scales.logit, soft_cap=scales.logit_cap
        )

    def linear(
        self,
        *names: str,
        shapes: Sequence[tuple[int, int]],
        rows: Sequence[slice] = (),
        bias: bool = False,
        pairs_of: Sequence[int | None] = (),
    ) -> Linear:
        """Load several projections of one input as one fused projection: this rank's `rows` of each, or all rows.

        `pairs_of` has an entry per projection: the number of heads in its rows if its rotary pairs are interleaved, else None.
        Interleaved rows are reordered so that the two rows of a pair lie half a head apart.
        """
        kept = tuple(rows) or (ALL,) * len(names)
        parts = list(zip(names, shapes, kept, tuple(pairs_of) or (None,) * len(names), strict=True))
        alike = alike_rows(
            [_reordered(self.stored(f"{name}.weight", shape, (own,)), heads) for name, shape, own, heads in parts]
        )
        weight = (
            concatenated(alike)
            if alike
            else torch.cat([self.rows(f"{name}.weight", shape, own, heads) for name, shape, own, heads in parts])
        )
        biases = [self.rows(f"{name}.bias", shape[:1], own, heads) for name, shape, own, heads in parts if bias]
        layer = make_linear(weight, torch.cat(biases) if bias else None, quantization=self.quantization)
        return self._adapted(layer, *((name, shape, own, ALL, heads) for name, shape, own, heads in parts))

    def row_parallel(self, name: str, *, shape: tuple[int, int], columns: slice, bias: bool = False) -> Linear:
        """Load this rank's `columns` of a projection back to the hidden width; its output is summed over the ranks."""
        weight = self._matrix(f"{name}.weight", shape, (ALL, columns))
        own_bias = self.first_alone(f"{name}.bias", shape=shape[:1]) if bias else None
        layer = make_linear(weight, own_bias, quantization=self.quantization)
        return row_parallel(self._adapted(layer, (name, shape, ALL, columns, None)), self.comm)

    def _adapted(self, layer: Linear, *parts: tuple[str, tuple[int, int], slice, slice, int | None]) -> Linear:
        """Return a layer that takes adapters, if the model has any; `parts` are the fields of each `AdaptedPart`."""
        if self.adapters is None:
            return layer
        adapted = [
            AdaptedPart(name=self.prefix + name, shape=shape, rows=rows, columns=columns, num_heads=heads)
            for name, shape, rows, columns, heads in parts
        ]
        return self.adapters.adapt(layer, adapted)

    def mlp(
        self,
        activation: Activation,
        sizes: tuple[int, int],
        *,
        bias: bool = False,
        prefix: str = "mlp.",
        limits: Limits | None = None,
    ) -> GatedMlp:
        """Load this rank's part of an MLP, with a gate unless the activation is `relu2`; `sizes` are its (hidden, inner) widths.
        `limits` clamp gates and ups."""
        hidden, inner = sizes
        load, own = self.under(prefix), self.share(inner)
        parts = ("up_proj",) if activation == "relu2" else ("gate_proj", "up_proj")
        gate_up: GateUp
        # Adapters change what the activation reads, and limits clamp it: the activation is apart.
        if self.adapters is not None or limits is not None or len(parts) == 1:
            shapes, rows = [(inner, hidden)] * len(parts), [own] * len(parts)
            gate_up = load.linear(*parts, shapes=shapes, rows=rows, bias=bias)
        else:
            names = [f"{part}.weight" for part in parts]
            alike = alike_rows([load.stored(name, (inner, hidden), (own,)) for name in names])
            weights: Sequence[Weight] = alike or [
                load.tensor(name, shape=(inner, hidden), part=(own,)) for name in names
            ]
            biases = [load.tensor(f"{part}.bias", shape=(inner,), part=(own,)) for part in parts] if bias else None
            gate_up = gate_and_up(weights, biases, self.quantization)
        down = load.row_parallel("down_proj", shape=(hidden, inner), columns=own, bias=bias)
        return GatedMlp(gate_up, down, activation, limits)

    def first_alone(self, name: str, *, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Load a bias that must be added once to a sum over the ranks: the tensor on rank 0, None on the others.

        All ranks read the tensor, so that none of them reports it as unused.
        """
        tensor = self.tensor(name, shape=shape)
        return tensor if self.parallel.is_first else None

    def _matrix(self, name: str, shape: tuple[int, int], part: Part) -> Weight:
        """Return a part of a matrix: as stored if `stored` gives it, otherwise in the model's dtype."""
        stored = self.stored(name, shape, part)
        return self.tensor(name, shape=shape, part=part) if stored is None else stored

    def stored(self, name: str, shape: tuple[int, int], part: Part) -> StoredRows | None:
        """Return a part of a matrix in groups, as its file stores it; None if it is not stored so, or layers do not take it so.

        Layers take a GGUF file's groups if the quantisation is "gguf", and other checkpoints' if it is "none", on GPUs in bfloat16.
        """
        if self.quantization == "gguf":
            check_quantization(self.quantization, self.device, self.dtype)
        elif self.quantization != "none" or not self.weights.keeps_groups or self.dtype not in QUANTISED_DTYPES:
            return None
        found = self.weights.groups(self.prefix + name, shape=shape, part=part)
        if not isinstance(found, GpuRows):
            return found
        return found.to(self.device) if self.dtype == torch.bfloat16 else None

    def rows(self, name: str, shape: tuple[int, ...], rows: slice, num_heads: int | None) -> torch.Tensor:
        """Return these rows of a tensor; with `num_heads`, reordered from interleaved rotary pairs to pairs half a head apart."""
        tensor = self.tensor(name, shape=shape, part=(rows,))
        return tensor if num_heads is None else _half_split(tensor, num_heads)


def alike_rows(parts: Sequence[StoredRows | None]) -> list[StoredRows] | None:
    """Return the parts if all are stored in one format, otherwise None."""
    found = [part for part in parts if part is not None]
    return found if found and len(found) == len(parts) and len({part.format for part in found}) == 1 else None


def _reordered(rows: StoredRows | None, num_heads: int | None) -> StoredRows | None:
    """Return rows in groups; with `num_heads`, reordered as `_half_split` does."""
    if rows is None or num_heads is None:
        return rows
    return rows.map_rows(lambda tensor: _half_split(tensor, num_heads))


def _half_split(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder each head's rows from pairs (2i, 2i + 1) to pairs (i, i + D/2).

    Attention scores do not change, because queries and keys are reordered alike.
    """
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
