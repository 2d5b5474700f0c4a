"""Programs: the launches of a decode step, recorded once and replayed without running the model's Python code (like CUDA graphs).

    program, logits = record_program(step, memory)      runs step() and records it
    tokens.copy_(next_tokens)                           writes inputs into the tensors that step() has read
    program.replay()                                    does the same work on the same addresses
    logits                                              now has the new result

Between kernels a program may have Python calls: torch operators that have no kernel, and all-reduces over tensor-parallel ranks.

Memory for results comes from a `ReplayMemory`. All programs of a model share it, since one replay ends before the next begins. As
soon as the recorded function drops a result, later instructions of the same program may reuse its memory.

A program must not depend on values that Python read while it was recorded. Recording raises `NotRecordable` if a torch operator
passes values to Python; our own operators that read values call `recording.refuse_recording`.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import CpuKernel
from transom_kernels.cpu.launching import memory_of
from transom_kernels.cpu.memory import lazy_memory
from transom_kernels.cpu.pool import new_runnable, pool
from transom_kernels.cpu.recording import NotRecordable, current_recorder, record

_ALIGNMENT = 64  # a cache line
_CHUNK_BYTES = 1 << 24  # takes up space only where kernels write (`lazy_memory`)

T = TypeVar("T")

# operators that pass values to Python, and operators that a replay need not repeat
_READS_VALUES = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
_ONLY_ALLOCATES = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
}


class ReplayMemory:
    """Memory for the results of programs. It grows in chunks, which never move."""

    def __init__(self) -> None:
        self.chunks: list[mmap.mmap] = []

    def add_chunk(self, num_bytes: int) -> None:
        """Add a chunk of at least `num_bytes`, a multiple of _CHUNK_BYTES."""
        self.chunks.append(lazy_memory(max(_CHUNK_BYTES, -(-num_bytes // _CHUNK_BYTES) * _CHUNK_BYTES)))


class _Allocator:
    """Allocates pieces of a `ReplayMemory` during one recording: the first free piece that is large enough."""

    def __init__(self, memory: ReplayMemory) -> None:
        self._memory = memory
        # free pieces as (index of the chunk, first byte, bytes), sorted
        self._free = [(chunk, 0, len(memory.chunks[chunk])) for chunk in range(len(memory.chunks))]

    def allocate(self, num_bytes: int) -> Any:
        """Return a ctypes array over free memory, which becomes free again when the array is collected."""
        size = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        # first fit; a new chunk if no free piece is large enough
        index = next((index for index, piece in enumerate(self._free) if piece[2] >= size), None)
        if index is None:
            self._memory.add_chunk(size)
            self._free.append((len(self._memory.chunks) - 1, 0, len(self._memory.chunks[-1])))
            index = len(self._free) - 1
        chunk, begin, free = self._free.pop(index)
        if free > size:
            self._free.insert(index, (chunk, begin + size, free - size))
        array = (ctypes.c_char * num_bytes).from_buffer(self._memory.chunks[chunk], begin)
        weakref.finalize(array, self._release, chunk, begin, size)
        return array

    def _release(self, chunk: int, begin: int, size: int) -> None:
        """Add a piece to the free ones, and merge pieces that touch."""
        merged: list[tuple[int, int, int]] = []
        for piece in sorted([*self._free, (chunk, begin, size)]):
            if merged and merged[-1][0] == piece[0] and merged[-1][1] + merged[-1][2] == piece[1]:
                merged[-1] = (piece[0], merged[-1][1], merged[-1][2] + piece[2])
            else:
                merged.append(piece)
        self._free = merged


class Program:
    """A recorded function: a list of steps, each of which is a run of the pool or a Python call.

    While the function is recorded, launches and calls are added (this class is a `recording.Recorder`).
    """

    def __init__(self, memory: ReplayMemory) -> None:
        self._allocator = _Allocator(memory)
        self._memory = memory
        self._steps: list[Callable[[], object]] = []
        # launches since the last Python call, as (address of the kernel, number of items, argument words)
        self._pending: list[tuple[int, int | torch.Tensor, Sequence[int]]] = []
        self._ranges: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []  # tensors outside the replay memory, which instructions know by address
        self._scratch_bytes = 0
        self.num_instructions = 0
        self.num_calls = 0

    def add(
        self,
        kernel: CpuKernel,
        num_items: int | torch.Tensor,
        words: Sequence[int],
        tensors: Sequence[torch.Tensor],
        scratch_bytes: int,
    ) -> None:
        """Add an instruction."""
        self._pending.append((kernel.address, num_items, words))
        self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)
        named = [*tensors, num_items] if isinstance(num_items, torch.Tensor) else tensors
        self._kept.extend(tensor for tensor in named if not self._is_own(tensor))
        if CHECKED:
            self._ranges.extend(memory_of(tensor) for tensor in named)
        self.num_instructions += 1

    def add_call(self, call: Callable[[], object]) -> None:
        """Add a Python call."""
        self.end_run()
        self._steps.append(call)
        self.num_calls += 1

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a result; other results may use it once the tensor is garbage-collected."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._allocator.allocate(num_bytes), dtype=dtype).view(shape)

    def replay(self) -> None:
        """Do what was recorded, with the present contents of the inputs.

        Raises:
            IndexError: a checked kernel touched memory outside its tensors.
        """
        for step in self._steps:
            step()

    def _is_own(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        for chunk in self._memory.chunks:
            begin = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            if begin <= address < begin + len(chunk):
                return True
        return False

    def end_run(self) -> None:
        """Make the launches since the last Python call one step, which the pool executes in one run."""
        if not self._pending:
            return
        pending, ranges = self._pending, self._ranges
        self._pending, self._ranges = [], []
        runnable = new_runnable(len(pending))
        for index, (address, num_items, words) in enumerate(pending):
            if isinstance(num_items, torch.Tensor):
                runnable.kept.append(num_items)
                runnable.write(index, address, 0, words, items_address=num_items.data_ptr())
            else:
                runnable.write(index, address, num_items, words)
        scratch_bytes = self._scratch_bytes
        self._steps.append(lambda: pool().run(runnable, scratch_bytes, ranges))


def record_program(function: Callable[[], T], memory: ReplayMemory) -> tuple[Program, T]:
    """Run a function; return a program that does the same again, and the function's result.

    Raises:
        NotRecordable: the function reads computed values in Python.
    """
    program = Program(memory)
    with record(program), _TorchCalls(program):
        result = function()
    program.end_run()
    return program, result


class _TorchCalls(TorchDispatchMode):
    """A torch dispatch mode that adds to a program, as a Python call, every torch operator that computes something."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's compiler may trace this mode.

        Otherwise torch would import the compiler when the mode is first used, which takes more than a second.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if current_recorder() is None or schema.name in _ONLY_ALLOCATES:
            return result
        if schema.name in _READS_VALUES:
            raise NotRecordable(f"{schema.name} reads a computed value")
        # a replay writes to the same tensors: in place, or by copying a new result into the first one; views need nothing
        if schema.is_mutable:
            self._program.add_call(lambda: func(*args, **kwargs))
        elif not _is_view(result, (*args, *kwargs.values())):
            self._program.add_call(lambda: _copy_into(result, func(*args, **kwargs)))
        return result


def _is_view(result: Any, arguments: Sequence[Any]) -> bool:
    """Return whether the result shares memory with an argument, so that a replay has nothing to do.

    An operator's schema does not say so: `to`, `reshape` and `contiguous` may return views or copies.
    """
    tensors = (
        [result] if isinstance(result, torch.Tensor) else [part for part in result if isinstance(part, torch.Tensor)]
    )
    given = {part.untyped_storage().data_ptr() for part in arguments if isinstance(part, torch.Tensor)}
    return all(tensor.untyped_storage().data_ptr() in given for tensor in tensors)


def _copy_into(targets: Any, sources: Any) -> None:
    if isinstance(targets, torch.Tensor):
        targets.copy_(sources)
    elif isinstance(targets, list | tuple):
        for target, source in zip(targets, sources, strict=True):
            _copy_into(target, source)
