"""Reads a LoRA adapter's file, in PEFT's format, under the names of the weights that its matrices change.

The file has `base_model.model.M.lora_A.weight` [r, K] and `base_model.model.M.lora_B.weight` [N, r] for each *module* M that the
adapter changes, a projection as transformers names it.

Legend: r rank of the adapter, K input width, N output width.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from transom_core.errors import ModelError
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights

_MATRIX = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")


class NoSuchModule(Exception):
    """The adapter does not change the module whose weight was asked for."""


# what transformers' files call modules -> what it calls them in memory, and so in adapters: Nemotron-H, Hy3, LFM3
_NAMES_IN_MEMORY = {
    **{"backbone.": "model.", ".mlp.shared_mlp.": ".mlp.shared_experts."},
    ".self_attn.gate_proj": ".self_attn.g_proj",
}


class AdapterMatrices(Weights):
    """The matrices B of an adapter, under the names of the weights that they change.

    `module` is the module that was asked for last, and `asked` has all that were. `a` has the matrix A [r, K] of each module.

    Raises:
        ModelError: the file is broken, or has other tensors than pairs of A and B.
    """

    def __init__(self, path: Path) -> None:
        self._b: dict[str, torch.Tensor] = {}
        self.a: dict[str, torch.Tensor] = {}
        try:
            with safe_open(path, framework="pt", device="cpu") as file:  # mapped, so only what is used is read
                for name in file.keys():  # noqa: SIM118  a reader is no dict
                    match = _MATRIX.fullmatch(name)
                    if match is None:
                        raise ModelError(f"tensor {name!r} is no matrix A or B of a projection")
                    (self.a if match["kind"] == "A" else self._b)[match["module"]] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} is cut off or not safetensors ({error})") from None
        if alone := sorted(self.a.keys() ^ self._b.keys()):
            raise ModelError(f"{alone[0]!r} has only one of the matrices A and B")
        self.names = tuple(f"{module}.weight" for module in sorted(self.a))
        self.module, self.asked = "", set[str]()

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the weights that no layer asked for."""
        return tuple(name for name in self.names if name.removesuffix(".weight") not in self.asked)

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Return the rows of B that belong to these rows of a weight. `shape` is the weight's, by which A and B are checked."""
        module = name.removesuffix(".weight")
        for stored, loaded in _NAMES_IN_MEMORY.items():
            if module not in self.a:
                module = module.replace(stored, loaded, 1)
        self.module = module
        self.asked.add(module)
        if module not in self.a:
            raise NoSuchModule
        a, b = self.a[module], self._b[module]
        shapes, right = (tuple(a.shape), tuple(b.shape)), None if shape is None else (shape[1], shape[0])
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or (a.shape[1], len(b)) != right:
            raise ModelError(
                f"A and B of {module!r} have shapes {shapes[0]} and {shapes[1]}, and its weight has {shape}; the adapter "
                "belongs to another model"
            )
        return b[part[:1]]

    def close(self) -> None:
        """Do nothing; the file is closed."""
