"""A benchmark case: how to run it, the expected result, the bytes and operations it needs, and what the project promised of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], object]


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
class Promise:
    """What the project promised of some cases: the least share of a ceiling, or the least time of a rival over ours.

    `of` is "bandwidth", "matrix rate", a rival's name, or "short context" (the time of the case `flat_with` over ours).
    """

    name: str
    of: str
    least: float


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
    # Each input read once, each output written once.
    num_bytes: int
    flops: int = 0
    # What is timed, where `run` does more than the work, to show what it did.
    timed: Run | None = None
    # Pairs that batch-invariance makes equal: a sequence's result in its batch, and alone.
    alone: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]] | None = None
    # Other implementations on equal inputs, by name; each is made when it is its turn.
    rivals: dict[str, Callable[[], Run]] = field(default_factory=dict)
    reset: Run | None = None
    # Poisons what must not be read; what it returns undoes that.
    traps: Callable[[], Run] | None = None
    # False: each run copies numbers from the host, which a CUDA graph would read where they no longer are.
    captured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A name whose words can be chosen by, and how to make it."""

    name: str
    prepare: Callable[[torch.device], Prepared]
    # Of the bytes or operations, for the reader.
    formula: str
    promises: tuple[Promise, ...] = ()
    # The names of the rivals that `prepare` has.
    rivals: tuple[str, ...] = ()
    # Whether the operator promises not to depend on the rest of the batch.
    is_invariant: bool = True
    # The case whose time is "short context" for this one.
    flat_with: str | None = None
