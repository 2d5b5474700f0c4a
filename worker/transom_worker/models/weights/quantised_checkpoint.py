"""Reads a safetensors checkpoint whose larger tensors are quantised, as `quantisation_scheme` says, under unquantised names.

Stored tensors `X.qweight`, `X.scales` and so on appear as `X.weight`, [out, in]. Stacks of experts in MXFP4, `X_blocks` and
`X_scales`, each expert [out, in], appear as `X`, [experts, in, out], which is how transformers stores them unquantised. Stacks in
fp8, `experts.gate_up_proj` and `experts.down_proj` with `_scale_inv` beside them (Mistral 4, Qwen3-VL), appear as one matrix for
each expert and projection, `experts.0.gate_proj.weight`, whichever axis comes first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from transom_core.errors import ModelError
from transom_kernels.quantised_linear import GROUP, StoredRows
from transom_worker.models.weights.checkpoint import ALL, WHOLE, Mxfp4Tensors, Part, WeightsView, check_shape
from transom_worker.models.weights.quantisation_scheme import Scheme, read_scheme
from transom_worker.models.weights.quantised_tensor import Packed, QuantisedTensor
from transom_worker.models.weights.safetensors_files import SafetensorsWeights

Device = Literal["cpu", "gpu"]  # whose kernels hold matrices as stored
Form = Literal["stack", "qweight", "packed", "scaled", "expert"]

# The form in which a weight is stored, and the suffixes of the stored tensors that show it.
_SHOWN_BY: dict[Form, tuple[str, ...]] = {
    "stack": ("_blocks", "_scales"),
    "qweight": (".qweight", ".qzeros", ".scales"),
    "packed": (".weight_packed",),
    "scaled": (".weight_scale_inv", ".weight_scale", ".scale"),
}
_STACKS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
# Tensors beside a quantised weight that may stay unread: some are not always needed, and others are scales of activations and of
# KV caches.
_BESIDE = (
    *(".g_idx", ".weight_g_idx", ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_scale_2"),
    *(".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".input_scale_ub"),
    *(".k_scale", ".v_scale", ".q_scale", ".output_scale"),
    *("_proj_activation_scale", "_proj_input_scale"),
)


def open_quantised(plain: SafetensorsWeights, config: Any, *, held_on: Device | None = None) -> QuantisedWeights:
    """Return the weights of `plain`, quantised as the config.json's `quantization_config` (`config`) says.

    Raises:
        ModelError: the quantisation method, or one of its settings, is not supported.
    """
    return QuantisedWeights(plain, read_scheme(config), held_on=held_on)


class QuantisedWeights(WeightsView):
    """Weights that dequantise the quantised tensors, or give them as stored, and give all others unchanged."""

    def __init__(self, plain: SafetensorsWeights, scheme: Scheme, *, held_on: Device | None) -> None:
        super().__init__(plain)
        self._plain, self._scheme, self._held_on = plain, scheme, held_on
        self._stored = frozenset(plain.names)
        self._forms: dict[str, Form] = {}
        for name in plain.names:
            for form, suffixes in _SHOWN_BY.items():
                suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
                if suffix is not None and (form != "scaled" or f"{name.removesuffix(suffix)}.weight" in self._stored):
                    self._forms.setdefault(name.removesuffix(suffix) + ("" if form == "stack" else ".weight"), form)
        inner = {f"{_stem(name)}.weight_scale" for name, form in self._forms.items() if form == "packed"}
        inner |= {
            stem + suffix for name, form in self._forms.items() for stem in [_stem(name)] for suffix in _SHOWN_BY[form]
        }
        self._in_stacks: dict[str, tuple[str, int, int]] = {}  # expert's matrix -> stack, expert, and place in its rows
        for name in plain.names:
            for stack, projections in _STACKS.items():
                if name.endswith(stack) and f"{name}_scale_inv" in self._stored:
                    inner |= {name, f"{name}_scale_inv"}
                    self._add_stack(name, projections)
        self.names = tuple(sorted({name for name in self._stored - inner if not _is_beside(name)} | self._forms.keys()))

    @property
    def keeps_groups(self) -> bool:
        """See `Weights.keeps_groups`."""
        return self._held_on is not None

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the stored tensors that were not read, without those beside weights, which may stay unread."""
        return tuple(name for name in self._plain.unread if not _is_beside(name))

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor; see `Weights.__call__`."""
        if name not in self._forms:
            return super().__call__(name, shape=shape, part=part)
        tensor, part = self._find(name, shape, part)
        elements = tensor.dequantised(part)
        return elements.transpose(-1, -2) if self._forms[name] == "stack" else elements

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """Return one tensor as stored, if it is stored in MXFP4; see `Weights.mxfp4`."""
        if name not in self._forms:
            return None
        tensor, part = self._find(name, shape, part)
        found = tensor.mxfp4(part)
        return None if found is None else (self._plain.own(found[0]), self._plain.own(found[1]))

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """Return a matrix as the kernels of CPUs or GPUs hold it, if they have its format; see `Weights.groups`."""
        if name not in self._forms:
            return None
        tensor, part = self._find(name, shape, part)
        return tensor.gpu_rows(part) if self._held_on == "gpu" else tensor.rows(part)

    def _find(self, name: str, shape: tuple[int, ...] | None, part: Part) -> tuple[QuantisedTensor, Part]:
        """Return the description of a tensor of this unquantised `shape`, and the part of it in its stored order of axes."""
        stem, form = _stem(name), self._forms[name]
        if form == "stack":
            experts, columns, rows = (*part, *[ALL] * (3 - len(part)))
            return self._stack(name, shape), (experts, rows, columns)
        if form == "scaled":
            return self._scaled(stem, shape), part
        if form == "expert":
            return self._expert(name, shape, part)
        if shape is None:
            raise ValueError(f"{name} was requested without its shape, which its packed form does not tell.")
        return (self._qweight if form == "qweight" else self._packed)(stem, shape), part

    def _stack(self, name: str, shape: tuple[int, ...] | None) -> QuantisedTensor:
        """Describe experts in MXFP4: bytes [E, out, in / 32, 16] of two numbers, and exponents [E, out, in / 32]."""
        blocks, scales = self._plain.mapped(f"{name}_blocks"), self._plain.mapped(f"{name}_scales")
        if shape is not None:
            experts, width, rows = shape
            stored = (experts, rows, width // GROUP, GROUP // 2)
            check_shape(blocks, stored, name=f"{name}_blocks", file=self._file(f"{name}_blocks"))
            check_shape(scales, stored[:-1], name=f"{name}_scales", file=self._file(f"{name}_scales"))
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            dtypes = f"blocks are {blocks.dtype} and scales {scales.dtype}"
            raise self._error(f"{name}_blocks", f"{dtypes}; both must be uint8", tensor=name)
        if blocks.shape != (*scales.shape, GROUP // 2):
            raise self._error(
                f"{name}_blocks", f"blocks {list(blocks.shape)} do not fit scales {list(scales.shape)}", tensor=name
            )
        return QuantisedTensor(
            shape=(*scales.shape[:-1], GROUP * scales.shape[-1]),
            kind="fp4",
            numbers=Packed(words=blocks.flatten(-2), bits=4),
            scales=scales,
            group=(1, GROUP),
        )

    def _scaled(self, stem: str, shape: tuple[int, ...] | None) -> QuantisedTensor:
        """Describe a matrix of fp8, of int8, or of bytes of two fp4 numbers."""
        name = f"{stem}.weight"
        values = self._plain.mapped(name)
        is_fp4 = values.dtype == torch.uint8 or (values.dtype == torch.int8 and self._scheme.integers_are_fp4)
        if values.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            raise self._error(name, f"a weight with scales holds {_dtype(values)}; fp8, int8 or uint8 is needed")
        stored = None if shape is None else (*shape[:-1], shape[-1] // 2) if is_fp4 else shape
        check_shape(values, stored, name=name, file=self._file(name))
        if values.dim() != 2:
            raise self._error(name, f"it has shape {list(values.shape)}; a matrix is needed")
        whole = (len(values), (2 if is_fp4 else 1) * values.shape[1])
        scale_name = next(f"{stem}{suffix}" for suffix in _SHOWN_BY["scaled"] if f"{stem}{suffix}" in self._stored)
        groups = ((1, GROUP),) if values.dtype == torch.int8 and is_fp4 else self._scheme.groups
        scales, group = self._scales(scale_name, whole, groups)
        if is_fp4:
            return self._fp4(stem, whole, values, scales, group)
        if values.dtype != torch.int8:
            return QuantisedTensor(
                shape=whole, kind="fp8", numbers=values, scales=scales, group=group, input_scale=self._input_scale(stem)
            )
        zeros: Packed | int = 128
        if f"{stem}.weight_zero_point" in self._stored and not self._scheme.is_symmetric:
            stored_zeros, _ = self._scales(f"{stem}.weight_zero_point", whole, (group,))
            zeros = Packed(words=stored_zeros.to(torch.int8), bits=8, flips=0x80)
        numbers = Packed(words=values, bits=8, flips=0x80)
        return QuantisedTensor(shape=whole, kind="integer", numbers=numbers, scales=scales, group=group, zeros=zeros)

    def _add_stack(self, name: str, projections: tuple[str, ...]) -> None:
        """Give the matrices of a stack of experts in fp8 names of their own."""
        experts = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        for expert in range(len(self._plain.mapped(name))):
            for place, projection in enumerate(projections):
                own = f"{experts}{expert}.{projection}.weight"
                self._in_stacks[own], self._forms[own] = (name, expert, place), "expert"

    def _expert(self, name: str, shape: tuple[int, ...] | None, part: Part) -> tuple[QuantisedTensor, Part]:
        """Describe the rows of an expert in a stack of fp8, gates before ups; and return the wanted part in them."""
        stack, expert, place = self._in_stacks[name]
        if shape is None:
            raise ValueError(
                f"{name} was requested without its shape, which does not tell the order of the stack's axes."
            )
        numbers, scales = self._plain.mapped(stack), self._plain.mapped(f"{stack}_scale_inv")
        is_down = stack.endswith("down_proj")
        inner, width = shape[::-1] if is_down else shape
        stored = (width, inner) if is_down else (2 * inner, width)
        # One of both stacks may be square, so the other one tells.
        other = stack.replace("down_proj", "gate_up_proj") if is_down else stack.replace("gate_up_proj", "down_proj")
        pair = [tuple(self._plain.mapped(one).shape[1:]) for one in (stack, other)]
        if pair == [stored[::-1], (width, 2 * inner) if is_down else (inner, width)]:
            numbers, scales = numbers.mT, scales.mT if scales.dim() == 3 else scales
        check_shape(numbers[0], stored, name=stack, file=self._file(stack))
        if numbers.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise self._error(stack, f"a stack with scales holds {_dtype(numbers)}; fp8 is needed")
        found, group = self._fitting(scales[expert], f"{stack}_scale_inv", stored, self._scheme.groups)
        start, stop, _ = (part[0] if part else ALL).indices(shape[0])
        rows = slice(place * inner + start, place * inner + stop)
        tensor = QuantisedTensor(
            shape=stored,
            kind="fp8",
            numbers=numbers[expert],
            scales=found,
            group=group,
            input_scale=self._input_scale(stack),
        )
        return tensor, (rows, *part[1:])

    def _input_scale(self, stem: str) -> torch.Tensor | None:
        """Return the scale by which a layer's inputs are rounded to fp8, [1], 0 if rows have their own; None if they stay."""
        if not self._scheme.rounds_inputs:
            return None
        for name in (f"{stem}.input_scale", f"{stem}.activation_scale"):  # transformers writes the latter
            if name in self._stored:
                return self._plain.mapped(name).float().reshape(-1)[:1]
        return torch.zeros(1)

    def _packed(self, stem: str, shape: tuple[int, ...]) -> QuantisedTensor:
        """Describe compressed-tensors' packed matrices: words of integers, or bytes of two fp4 numbers."""
        name = f"{stem}.weight_packed"
        words = self._plain.mapped(name)
        scales, group = self._scales(f"{stem}.weight_scale", shape, self._scheme.groups)
        if words.dtype == torch.uint8:
            check_shape(words, (shape[0], shape[1] // 2), name=name, file=self._file(name))
            return self._fp4(stem, shape, words, scales, group)
        bits = self._bits(name, words, lambda bits: (shape[0], -(-shape[1] * bits // 32)))
        zero_name, zeros = f"{stem}.weight_zero_point", None
        if zero_name in self._stored and not self._scheme.is_symmetric:
            zeros = self._plain.mapped(zero_name)
            stored = (-(-scales.shape[0] * bits // 32), scales.shape[1])
            check_shape(zeros, stored, name=zero_name, file=self._file(zero_name))
        return self._integers(
            shape, Packed(words=words, bits=bits), zeros, scales, group, order_name=f"{stem}.weight_g_idx"
        )

    def _qweight(self, stem: str, shape: tuple[int, ...]) -> QuantisedTensor:
        """Describe a matrix of AWQ or GPTQ, whose tensors are transposed."""
        (num_rows, width), scheme, name = shape, self._scheme, f"{stem}.qweight"
        words = self._plain.mapped(name)
        bits = self._bits(
            name,
            words,
            lambda bits: (
                (width, -(-num_rows * bits // 32)) if scheme.packs_rows else (-(-width * bits // 32), num_rows)
            ),
        )
        scales, group = self._scales(f"{stem}.scales", shape, scheme.groups, is_transposed=True)
        zeros = self._plain.mapped(f"{stem}.qzeros")
        stored = (scales.shape[1], -(-num_rows * bits // 32))
        check_shape(zeros, stored, name=f"{stem}.qzeros", file=self._file(f"{stem}.qzeros"))
        if scheme.zeros_less_one:
            # ones were subtracted, and are added, in whole words, so that a carry undoes a borrow
            zeros = zeros + sum(1 << place for place in range(0, 32, bits))
        numbers = Packed(words=words.T, bits=bits, axis=-2 if scheme.packs_rows else -1, order=scheme.order)
        return self._integers(shape, numbers, zeros.T, scales, group, order_name=f"{stem}.g_idx")

    def _integers(
        self,
        shape: tuple[int, ...],
        numbers: Packed,
        zero_words: torch.Tensor | None,
        scales: torch.Tensor,
        group: tuple[int, int],
        *,
        order_name: str,
    ) -> QuantisedTensor:
        """Return the description of packed integers. It leaves out zero points that are all the middle one, and an order of groups
        that is the plain one. For tensors without data (`meta`) the config says whether they are."""
        scheme, middle = self._scheme, 1 << (numbers.bits - 1)
        found: Packed | int = middle
        if zero_words is not None:
            zeros = Packed(words=zero_words, bits=numbers.bits, axis=-2, order=scheme.order)
            is_middle = zeros.words.is_meta or bool((zeros.take(slice(0, shape[0])) == middle).all())
            found = middle if scheme.is_symmetric and is_middle else zeros
        of_column = None
        if group[1] < shape[1] and (scheme.has_order or order_name in self._stored):
            order = check_shape(self._plain.mapped(order_name), shape[1:], name=order_name, file=self._file(order_name))
            plain = torch.arange(shape[1]).to(order) // group[1]
            # compressed-tensors writes -1 for a matrix without activation order
            is_plain = not scheme.has_order if order.is_meta else order.equal(plain) or bool((order == -1).all())
            of_column = None if is_plain else order.long()
        return QuantisedTensor(
            shape=shape,
            kind="integer",
            numbers=numbers,
            scales=scales,
            group=group,
            zeros=found,
            group_of_column=of_column,
        )

    def _fp4(
        self, stem: str, shape: tuple[int, ...], words: torch.Tensor, scales: torch.Tensor, group: tuple[int, int]
    ) -> QuantisedTensor:
        """Describe fp4 numbers. NVFP4 has a factor of the whole tensor, which compressed-tensors stores inverted."""
        factor = None
        if f"{stem}.weight_scale_2" in self._stored:
            factor = self._plain.mapped(f"{stem}.weight_scale_2").float()
        elif f"{stem}.weight_global_scale" in self._stored:
            factor = 1 / self._plain.mapped(f"{stem}.weight_global_scale").float()
        numbers = Packed(words=words.view(torch.uint8), bits=4)
        return QuantisedTensor(shape=shape, kind="fp4", numbers=numbers, scales=scales, group=group, factor=factor)

    def _scales(
        self,
        name: str,
        shape: tuple[int, ...],
        groups: tuple[tuple[int | None, int | None], ...],
        *,
        is_transposed: bool = False,
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return a matrix's scales [groups of rows, groups of columns], and its groups: those of `groups` that fit the scales."""
        return self._fitting(self._plain.mapped(name), name, shape, groups, is_transposed=is_transposed)

    def _fitting(
        self,
        scales: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        groups: tuple[tuple[int | None, int | None], ...],
        *,
        is_transposed: bool = False,
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return what `_scales` does, of these scales."""
        found = list(scales.shape)
        wanted = []
        for rows, columns in groups:
            group = (rows or shape[0], columns or shape[1])
            each = (-(-shape[0] // group[0]), -(-shape[1] // group[1]))
            if found == list(each[::-1] if is_transposed else each):
                return (scales.T if is_transposed else scales), group
            if scales.dim() < 2 and scales.numel() == each[0] * each[1] and 1 in each:
                return scales.reshape(each), group
            wanted.append(f"{list(each[::-1] if is_transposed else each)} (groups of {list(group)})")
        if len(groups) == 1:
            check_shape(scales, each[::-1] if is_transposed else each, name=name, file=self._file(name))
        raise self._error(name, f"values {list(shape)} need scales {' or '.join(wanted)}, not {found}")

    def _bits(self, name: str, words: torch.Tensor, shape_of: Any) -> int:
        """Return the bits of the integers in `words`: those of the scheme whose shape the words have."""
        if words.dtype != torch.int32:
            raise self._error(name, f"packed integers are {_dtype(words)}; int32 is needed")
        fitting = [bits for bits in self._scheme.bits if tuple(words.shape) == shape_of(bits)]
        check_shape(words, None if fitting else shape_of(self._scheme.bits[0]), name=name, file=self._file(name))
        return fitting[0]

    def _file(self, name: str) -> Path:
        return self._plain.file_of(name)

    def _error(self, name: str, problem: str, *, tensor: str | None = None) -> ModelError:
        return ModelError(f"{self._file(name)}: tensor {tensor or name!r} cannot be dequantised: {problem}.")


def _is_beside(name: str) -> bool:
    return name.endswith(_BESIDE)


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
