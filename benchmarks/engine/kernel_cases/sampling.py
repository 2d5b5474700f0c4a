"""`sample`: logits to token ids, with and without filters.

Legend: S rows, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.engine.kernel_cases.case import Case, Check, Prepared, Promise, Scale
from transom_kernels.sample.gpu import sample_triton
from transom_kernels.sample.reference import SampleParams, sample_reference

SAMPLING = Promise(name="sampling", of="bandwidth", least=0.80)
CHECKED_ROWS = 2  # the reference goes id by id
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "top_k top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}
WITHOUT_PROMISE = ("top_p",)  # an exponential of every logit, and more of a row is looked at again


def cases(scale: Scale) -> Iterator[Case]:
    """Rows of a full step and of small ones, which wait for the second launch: a program a row, however few there are."""
    vocabulary = scale.pick(128_256, 300)
    for rows in scale.some((1, 64, 256), (256,), (3,)):
        for name, filters in FILTERS.items():
            yield Case(
                name=f"sample {name} rows {rows}",
                prepare=partial(_prepare, rows, vocabulary, filters),
                formula="the logits, once",
                promises=(SAMPLING,) if rows == 256 and name not in WITHOUT_PROMISE else (),
            )


def _params(rows: int, filters: dict[str, float], device: torch.device) -> SampleParams:
    def each(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), filters.get(name, default), dtype=dtype, device=device)

    return SampleParams(
        temperature=each("temperature", 1.0, torch.float32),
        top_k=each("top_k", 0, torch.int32),
        top_p=each("top_p", 1.0, torch.float32),
        min_p=each("min_p", 0.0, torch.float32),
        keys=torch.arange(7, 7 + rows, device=device) * 0x123456789ABCDEF,
    )


def _prepare(rows: int, vocabulary: int, filters: dict[str, float], device: torch.device) -> Prepared:
    logits, params = torch.randn(rows, vocabulary, device=device) * 3, _params(rows, filters, device)

    def check(out: tuple[torch.Tensor, ...]) -> list[Check]:
        few = min(rows, CHECKED_ROWS)
        wanted = sample_reference(logits[:few].cpu(), _params(few, filters, torch.device("cpu")))
        return [Check(got=out[0][:few].cpu(), wanted=wanted, limit=0.0)]

    def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(sample_triton(logits, params)[:1], sample_triton(logits[:1], _params(1, filters, device)))]

    return Prepared(
        run=lambda: (sample_triton(logits, params),), check=check, num_bytes=logits.nbytes + 8 * rows, alone=alone
    )
