"""MXFP4 experts in the layout that the Triton kernels read, made once, when a model is loaded. They take as many bytes as before;
only scales are padded, to blocks of 16 rows by 4 groups.

    elements   [experts] [rows] [groups] [8] int16: word 2 q + b of a group holds what a thread multiplies, its elements
               2 q + b + (0, 8, 16, 24) on Hopper, 8 q + b + (0, 2, 4, 6) elsewhere
    scales     [experts] [rows / 16] [groups / 4] [8 rows] [4 groups] [rows 0-7, rows 8-15] uint8: a thread's scales lie together

Few operations make bfloat16 numbers of the four elements of a word, and of two words at a time (`widened_words`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from transom_kernels.launch import capability_of
from transom_kernels.moe.weights import ExpertTensors, MxTensor

LARGEST_SCALE = 160  # 2 ** 33; see `TWO_TO_32` of `kernel.py`


def for_gpu(tensors: ExpertTensors) -> ExpertTensors:
    """Return experts whose MXFP4 matrices have the layout above, and alternating gates and ups.

    Raises:
        ValueError: a scale is above 2 ** 33.
    """
    gate_up, down, bias, interleaved = tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.interleaved
    if isinstance(gate_up, MxTensor):
        rows = torch.arange(gate_up.shape[1], device=gate_up.blocks.device)
        if not interleaved:
            rows = rows.view(2, -1).t().flatten()
            bias = None if bias is None else bias[:, rows]
        gate_up, interleaved = _arranged(gate_up, rows), True
    if isinstance(down, MxTensor):
        down = _arranged(down, torch.arange(down.shape[1], device=down.blocks.device))
    return replace(tensors, gate_up=gate_up, down=down, gate_up_bias=bias, interleaved=interleaved)


def spreads_elements(device: torch.device) -> bool:
    """Return whether a thread holds elements 8 apart, as Hopper's tensor cores read them from registers; others read 8 in a row."""
    return capability_of(device)[0] == 9


def widened_words(words: torch.Tensor) -> list[torch.Tensor]:
    """Return the four elements of each word, their bits where they are bfloat16 numbers times 2 ** -126: sign, the two lowest bits
    of the exponent, the highest of the fraction. Those bits come from the same word, so the kernels shift two words at once.
    """
    swapped = words << 8 | words >> 8 & 0xFF
    return [word & 0x81C0 for word in (words, words << 4, swapped ^ swapped << 2, swapped ^ swapped << 6)]


def _arranged(matrix: MxTensor, rows: torch.Tensor) -> MxTensor:
    experts, num_rows, columns = matrix.shape
    if not matrix.scales.is_meta and int(matrix.scales.max()) > LARGEST_SCALE:
        raise ValueError(f"MXFP4 experts have a scale above 2 ** {LARGEST_SCALE - 127}.")
    every = torch.arange(1 << 16, device=rows.device)
    elements = [bits >> 12 & 8 | bits >> 6 & 7 for bits in widened_words(every)]
    word_of = torch.empty_like(every, dtype=torch.int16)  # four elements, the first in the lowest bits -> their word
    word_of[sum(element << 4 * e for e, element in enumerate(elements))] = every.to(torch.int16)
    words = matrix.blocks.new_empty(experts, num_rows, columns // 4, dtype=torch.int16)
    for expert in range(experts):  # one by one, since indices take much more memory than words
        blocks = matrix.blocks[expert][rows].view(-1, 4, 4).to(torch.int32)  # bytes of a group: [e, q], or [q, e]
        blocks = blocks if spreads_elements(rows.device) else blocks.transpose(1, 2)
        pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1)
        words[expert] = word_of[sum(pairs[:, e] << 4 * e for e in range(4))].view(num_rows, -1)
    scales = matrix.scales[:, rows]
    scales = F.pad(scales, (0, -scales.shape[2] % 4, 0, -num_rows % 16)).unflatten(2, (-1, 4)).unflatten(1, (-1, 2, 8))
    scales = scales.permute(0, 1, 4, 3, 5, 2).flatten(3).contiguous()
    return MxTensor(blocks=words, scales=scales, is_for_gpu=True)
