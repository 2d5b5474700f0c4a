"""Reads the safetensors files of one folder: a single file, or shards with an index."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from transom_core.errors import ModelError
from transom_core.model_files.text_files import INDEX_FILE, read_weight_index, weight_files
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights, check_shape


class SafetensorsWeights(Weights):
    """Weights that map tensors from the files of one folder, so that the operating system reads pages on first use.

    If something later overwrites a file, a mapped tensor changes too. So a model that computes on the CPU with these very tensors
    opens them `in_memory`: then they are copies. `without_data` gives tensors of more than one number on torch's device `meta`.

    Raises:
        ModelError: a file is missing, cut off or not safetensors; the message names it.
    """

    def __init__(self, folder: Path, *, in_memory: bool = False, without_data: bool = False) -> None:
        self._folder, self._in_memory, self._without_data = folder, in_memory, without_data
        self._open: dict[Path, Any] = {}
        self._file_of = _files_by_tensor(folder, self._reader)
        self.names = tuple(sorted(self._file_of))
        self._read: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}  # by safetensors' names, of tensors that were mapped

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the names of the tensors that were not read yet."""
        return tuple(name for name in self.names if name not in self._read)

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor, or a part of it; see `Weights.__call__`."""
        tensor = self._find(name)
        if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
            raise ModelError(
                f"{self.file_of(name)}: tensor {name!r} holds {str(tensor.dtype).removeprefix('torch.')}, which cannot "
                "be read by what config.json (quantization_config) and the scales beside it say; give the unquantised checkpoint."
            )
        tensor = check_shape(tensor, shape, name=name, file=self.file_of(name))[part]
        return tensor.to("meta") if self._without_data and tensor.numel() > 1 else self.own(tensor)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a mapped tensor, or a part of one, as a copy if this checkpoint was opened with `in_memory`."""
        return tensor.clone() if self._in_memory else tensor

    def mapped(self, name: str) -> torch.Tensor:
        """Return one tensor as stored, in any number format, mapped from its file.

        Raises:
            ModelError: the tensor is missing or cut off.
        """
        return self._find(name).to("meta") if self._without_data else self._find(name)

    def _find(self, name: str) -> torch.Tensor:
        path = self.file_of(name)
        self._read.add(name)
        try:
            if self._without_data:
                return self._shaped(name, self._reader(path))
            tensor: torch.Tensor = self._reader(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name!r} cannot be read: {error}.") from None
        return tensor

    def _shaped(self, name: str, reader: Any) -> torch.Tensor:
        """Return a tensor without data; one number with its value. Mapping each of a model's 100,000 tensors would take minutes."""
        stored = reader.get_slice(name)
        shape, kind = stored.get_shape(), stored.get_dtype()
        if math.prod(shape) <= 1 or kind not in self._dtypes:
            tensor: torch.Tensor = reader.get_tensor(name)
            self._dtypes[kind] = tensor.dtype
            return tensor
        return torch.empty(shape, dtype=self._dtypes[kind], device="meta")

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor.

        Raises:
            ModelError: no file holds it.
        """
        path = self._file_of.get(name)
        if path is None:
            files = sorted({path.name for path in self._file_of.values()})
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise ModelError(
                f"{self._folder} has no tensor {name!r} in {files[0]}{more}; the checkpoint is incomplete or of another family."
            )
        return path

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._open.clear()

    def _reader(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise ModelError(f"{path} is missing; the checkpoint is incomplete, download it again.") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is cut off or not safetensors ({error}); download it again.") from None
            except RuntimeError as error:  # torch maps files writable, so Linux counts one against memory and swap
                if "Cannot allocate memory" not in str(error):
                    raise
                raise ModelError(
                    f"{path} cannot be mapped ({error}); set vm.overcommit_memory to 1, or split the file into shards."
                ) from None
        return self._open[path]


def _files_by_tensor(folder: Path, reader: Any) -> dict[str, Path]:
    """Return tensor name -> file, from the index if there is one, otherwise from the files' own headers."""
    index = folder / INDEX_FILE
    if index.exists():
        return _read_index(index)
    if not (files := weight_files(folder)):
        raise ModelError(f"{folder} has no .safetensors file; pickled weights are never loaded, convert them.")
    return {name: path for path in files for name in reader(path).keys()}  # noqa: SIM118  a reader is no dict


def _read_index(index: Path) -> dict[str, Path]:
    entries = read_weight_index(index)
    missing = sorted({file for file in entries.values() if not (index.parent / file).exists()})
    if missing:
        raise ModelError(f"{index.parent} lacks {', '.join(missing[:3])}, which {index.name} names; download it again.")
    return {name: index.parent / file for name, file in entries.items()}
