"""Counts the launches of a forward pass where Triton computes: Triton's in the interpreter, torch's by dispatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.checkpoints import prompt
from tests.engine_driver import make_request, run
from tests.thread_ranks import make_sharded_engine
from tests.worker.models.interpreted import SETTINGS, kernels_of
from transom_worker.execution.setup import model_loading
from transom_worker.models.registry import build_model


class Launches(TorchDispatchMode):
    """Counts, by name, what would be launched on a GPU: not views, nor memory that is only asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)  # an operator made of others is counted as those
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if not _only_asks(func) and (func._schema.is_mutable or not _is_view(out, args)):
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return out


def _only_asks(func: Any) -> bool:
    return any(word in func._schema.name for word in ("empty", "detach"))


def _is_view(out: Any, args: Any) -> bool:
    outs = [part for part in (out if isinstance(out, tuple | list) else (out,)) if isinstance(part, torch.Tensor)]
    held = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    return all(part.untyped_storage().data_ptr() in held for part in outs)


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """What is launched within."""
    with Launches() as mode, pytest.MonkeyPatch.context() as patch:
        interpret = GridExecutor.__call__

        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = mode.counts.copy()
            made = interpret(self, *args, **kwargs)  # torch's operators within it are the interpreter's own
            mode.counts.clear()
            mode.counts.update(before)
            mode.counts[self.fn.__name__] += 1
            return made

        patch.setattr(GridExecutor, "__call__", launch)
        yield mode.counts


def decoding_step(folder: Path, **settings: Any) -> Counter[str]:
    """Launches of the last forward pass of a short request: one token."""
    steps: list[Counter[str]] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        forward = model.forward

        def counting(batch: Any) -> torch.Tensor:
            with counted_launches() as counts:
                logits: torch.Tensor = forward(batch)
            steps.append(counts)
            return logits

        model.forward = counting  # type: ignore[method-assign]
        return model

    with kernels_of("interpreted"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "build_model", build)
        engine, _ = make_sharded_engine(str(folder), 1, **(SETTINGS | settings))
        run(engine, [make_request("one", prompt(3), max_tokens=2)])
        engine.shutdown()
    return steps[-1]
