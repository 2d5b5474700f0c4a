"""A benchmark case: how to run it, the expected result, the bytes and operations it needs, and the rivals it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """Real sizes, those of a quick run, or tiny ones that Triton's interpreter gets through in seconds."""

    name: Literal["full", "quick", "tiny"]

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are for the interpreter."""
        return self.name == "tiny"

    def pick(self, full: int, tiny: int) -> int:
        """A size."""
        return tiny if self.is_tiny else full

    def some(self, full: tuple[int, ...], quick: tuple[int, ...], tiny: tuple[int, ...]) -> tuple[int, ...]:
        """A row of sizes."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The least share of a ceiling, and where there is one the goal behind it."""

    least: float
    of: Literal["bandwidth", "matrix rate"]
    goal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What the work gave at some places, and what it should: compared by the length of the difference over the length."""

    got: torch.Tensor
    wanted: torch.Tensor  # of more precision
    limit: float

    @property
    def error(self) -> float:
        """|got - wanted| / |wanted|; infinite where either holds NaN."""
        got, wanted = self.got.double(), self.wanted.double().to(self.got.device)
        found = float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
        return found if found == found else float("inf")


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A case on its device. `run` may be repeated; where it works in place, `reset` puts its inputs back (not timed)."""

    run: Callable[[], Tensors]
    check: Callable[[Tensors], list[Check]]
    num_bytes: int  # each input read once, each output written once
    flops: int = 0
    timed: Callable[[], object] | None = None  # where `run` does more than the work, to show what it did
    alone: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]] | None = (
        None  # pairs that batch-invariance makes equal
    )
    rivals: dict[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)  # made when it is their turn
    reset: Callable[[], None] | None = None
    traps: Callable[[], Callable[[], None]] | None = None  # poisons what must not be read; what it returns undoes that
    captured: bool = (
        True  # False: each run copies numbers from the host, which a graph would read where they no longer are
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A name whose words can be chosen by, and how to make it."""

    name: str
    prepare: Callable[[torch.device], Prepared]
    formula: str  # of the bytes or operations, for the reader
    target: Target | None = None
    rival_limits: Mapping[str, float] = field(default_factory=dict)  # the least that a rival's time over ours may be
    is_invariant: bool = True  # whether the operator promises not to depend on the rest of the batch
    flat_with: str | None = None  # the case whose time this one's may exceed by a tenth at most
