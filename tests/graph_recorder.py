"""A capture device for CPUs with the semantics of a CUDA graph: a replay does again exactly what was done while it was recorded.

Torch's operators are noted by dispatch and Triton's launches by the interpreter, with their very tensors and numbers; a replay runs
them again into the same memory, which holds poison before. A number that the host worked out for one step is what it was, so that a
pass that depends on one shows as a wrong result. What a CUDA graph cannot capture is an error: reading tensors on the host, results
whose shape depends on numbers, tensors made from the host's memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from transom_worker.execution.replay.graph_capture import CudaCapture

HOST_READS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "__array__")
UNCAPTURED = (
    "_local_scalar_dense", "item", "nonzero", "nonzero_static", "masked_select", "bincount", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave.Tensor", "lift_fresh", "is_nonzero", "equal",
)  # fmt: skip


class NotCapturable(Exception):
    pass


class Recording(TorchDispatchMode):
    """The operations since recording began; `refuses` says whether one that a graph cannot hold is an error."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self._refuses = refuses
        self.steps: list[Callable[[], None]] = []
        self.names: Counter[str] = Counter()
        self.made: list[torch.Tensor] = []  # memory that belongs to the recording
        self.inside_launch = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        needs_host = name in UNCAPTURED or f"{name}.{func._overloadname}" in UNCAPTURED or _picks_by_mask(name, args)
        if needs_host and self._refuses:
            raise NotCapturable(f"{func} needs the host")
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

    def note_launch(self, name: str, launch: Callable[[], None]) -> None:
        self.steps.append(launch)
        self.names[name] += 1

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        held = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and _memory(leaf) not in held]
        self.made += made
        name = func._schema.name.removeprefix("aten::")
        if "empty" in name or not (made or func._schema.is_mutable):
            return

        def again() -> None:
            now = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            then = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            for new, old in zip(now, then, strict=True):
                if _memory(old) not in held:
                    old.copy_(new)

        self.steps.append(again)
        self.names[name] += 1


class RecordedGraph:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.num_replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        for tensor in self._recording.made:
            _poison(tensor)
        for step in self._recording.steps:
            step()
        self.num_replays += 1


class RecorderDevice(CudaCapture):
    """Records without a GPU. Its buffers detect a write to a buffer that an upload still reads."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.num_uploads = 0
        self._reading: tuple[torch.Tensor, torch.Tensor] | None = None

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        assert self._reading is None, "a buffer is used again before it was waited for"
        device.copy_(host)
        self._reading = (host, host.clone())
        self.num_uploads += 1

    def wait_uploaded(self) -> None:
        if self._reading is not None:
            assert torch.equal(*self._reading), "written to while it was being read"
        self._reading = None

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        with recorded() as recording:
            run()
        self.graphs.append(RecordedGraph(recording))
        return self.graphs[-1]


@contextmanager
def recorded(*, refuses: bool = True) -> Iterator[Recording]:
    """Records the operations inside the context; if it refuses, raises NotCapturable for an operation that a graph cannot hold."""
    from triton.runtime.interpreter import GridExecutor

    recording, interpret = Recording(refuses=refuses), GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            interpret(self, *args, **kwargs)

        recording.inside_launch = True
        with _disable_current_modes():
            again()
        recording.inside_launch = False
        recording.note_launch(self.fn.__name__, again)

    def refused(name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if recording.inside_launch or not refuses:
                return plain(*args, **kwargs)
            raise NotCapturable(f"{name} needs the host")

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, refused(name, getattr(torch.Tensor, name)))
        for name in ("from_numpy", "tensor", "as_tensor", "frombuffer"):
            patch.setattr(torch, name, refused(name, getattr(torch, name)))
        with recording:
            yield recording


def _picks_by_mask(name: str, args: Any) -> bool:
    """Whether tensors are indexed by booleans, whose number the host would have to know."""
    if not name.startswith(("index", "_index", "_unsafe_index")):
        return False
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1:2])
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
