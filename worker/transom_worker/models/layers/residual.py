"""The residual stream of a decoder, which its sublayers read and add to.

An addition is deferred until the next read, so that one kernel adds, normalises and writes both the sum and the normalised rows:

    residual.add(y)               # y is kept as the pending addend
    x = residual.read(norm)       # one pass: sum += y; x = norm(sum)

Legend: T tokens, R rows that are kept, N hidden width.
"""

from typing import ParamSpec, Protocol

import torch

from transom_kernels.rms_norm import rms_norm
from transom_worker.models.layers.norm import Norm, RmsNorm

P = ParamSpec("P")


class Sublayer(Protocol[P]):
    """A layer whose output is added to the residual stream."""

    @property
    def adds_in_product(self) -> bool:
        """Return whether `add_to` adds the residual within the layer's last matrix product, without another pass over memory."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        """Return the layer's output, [T, N]."""

    def add_to(self, residual_TN: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        """Return `residual + self(...)`, [T, N]."""


class Residual:
    """A sum [T, N], and its pending addend: the last output added, which the next read adds to the sum."""

    def __init__(self, x_TN: torch.Tensor) -> None:
        """Start with `x`, which is not changed."""
        self._sum_TN = x_TN
        self.shared_TN: torch.Tensor | None = None  # what a layer read, for the layer beside it
        self._addend_TN: torch.Tensor | None = None
        self._addend_norm: RmsNorm | None = None
        self._factor = 1.0

    def read(self, norm: Norm | None = None) -> torch.Tensor:
        """Return the sum, normalised if there is a norm, [T, N]. The caller must not write to it."""
        if self._addend_TN is None:
            return self._sum_TN if norm is None else norm(self._sum_TN)
        inner, outer = self._addend_norm, norm if isinstance(norm, RmsNorm) else None
        with_eps = outer or inner  # both have the same epsilon (`add`); without a norm the kernel only adds
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
        """Add `y`, normalised if `norm` is given.

        One kernel computes this norm and the one of the next `read`, with one epsilon, so both must have the same.
        """
        self.read()
        self._addend_TN, self._addend_norm = y_TN, norm

    def add_output(self, sublayer: Sublayer[P], norm: RmsNorm | None, *args: P.args, **kwargs: P.kwargs) -> None:
        """Add `sublayer(...)`, normalised if `norm` is given.

        Without a norm, the sublayer itself adds its output to the sum if it can (`adds_in_product`).
        """
        if norm is None and sublayer.adds_in_product:
            self._sum_TN = sublayer.add_to(self.read(), *args, **kwargs)
        else:
            self.add(sublayer(*args, **kwargs), norm)

    def scale(self, factor: float) -> None:
        """Multiply the sum, including its pending addend."""
        if self._addend_TN is None:
            self._sum_TN = self._sum_TN * factor
        else:
            self._factor *= factor

    def replace(self, x_TN: torch.Tensor) -> None:
        """Replace the sum by `x`, and drop the pending addend."""
        self._sum_TN, self._addend_TN = x_TN, None

    def select(self, rows_R: torch.Tensor) -> None:
        """Keep only these rows."""
        self._sum_TN = select_rows(self.read(), rows_R)


def select_rows(x_TN: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """Return these rows of `x`, which must ascend; without a copy if they are all of its rows."""
    return x_TN if len(rows_R) == len(x_TN) else x_TN.index_select(0, rows_R)
