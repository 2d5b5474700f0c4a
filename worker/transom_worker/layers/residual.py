"""The sum that a decoder's sublayers read and add to.

Legend: T tokens, R rows that are kept, N hidden width.
"""

from __future__ import annotations

from typing import ParamSpec, Protocol

import torch

from transom_kernels.launch import uses_triton
from transom_kernels.rms_norm import rms_norm
from transom_worker.layers.norm import Norm, RmsNorm

P = ParamSpec("P")


class Sublayer(Protocol[P]):
    """A layer whose output is added to what came in."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        """[T, N]."""
        ...

    def add_to(self, residual_TN: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        """`residual + self(...)`, [T, N]."""
        ...


class Residual:
    """A sum [T, N] whose last addend waits for the next read, which adds, normalises and writes both in one pass over the rows."""

    def __init__(self, x_TN: torch.Tensor) -> None:
        """It begins with `x`, which stays as it is."""
        self._sum_TN = x_TN
        self._addend_TN: torch.Tensor | None = None
        self._addend_norm: RmsNorm | None = None
        self._factor = 1.0

    def read(self, norm: Norm | None = None) -> torch.Tensor:
        """The sum, normalised if there is a norm, [T, N]; nobody may write to it."""
        if self._addend_TN is None:
            return self._sum_TN if norm is None else norm(self._sum_TN)
        inner, outer = self._addend_norm, norm if isinstance(norm, RmsNorm) else None
        with_eps = outer or inner
        out_TN, self._sum_TN = rms_norm(
            self._addend_TN,
            None if outer is None else outer.weight_N,
            0.0 if with_eps is None else with_eps.eps,
            self._sum_TN,
            inner=None if inner is None else inner.weight_N,
            factor=self._factor,
        )
        self._addend_TN, self._addend_norm, self._factor = None, None, 1.0
        return out_TN if norm is None or outer is not None else norm(out_TN)

    def add(self, y_TN: torch.Tensor, norm: RmsNorm | None = None) -> None:
        """Adds `y`, normalised if there is a norm, whose epsilon is that of the norm which reads the sum."""
        self.read()
        self._addend_TN, self._addend_norm = y_TN, norm

    def add_output(self, sublayer: Sublayer[P], norm: RmsNorm | None, *args: P.args, **kwargs: P.kwargs) -> None:
        """Adds `sublayer(...)`, normalised if there is a norm; without one, where torch computes, its product takes the sum in."""
        if norm is None and not uses_triton(self._sum_TN):
            self._sum_TN = sublayer.add_to(self.read(), *args, **kwargs)
        else:
            self.add(sublayer(*args, **kwargs), norm)

    def scale(self, factor: float) -> None:
        """Multiplies the sum, its last addend included."""
        if self._addend_TN is None:
            self._sum_TN = self._sum_TN * factor
        else:
            self._factor *= factor

    def replace(self, x_TN: torch.Tensor) -> None:
        """`x` is the sum from now on."""
        self._sum_TN, self._addend_TN = x_TN, None

    def select(self, rows_R: torch.Tensor) -> None:
        """Keeps these rows alone."""
        self._sum_TN = self.read().index_select(0, rows_R)
