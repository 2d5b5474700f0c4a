"""Normalisation layers.

QK norms normalise queries and keys before attention. The QK norms of this module take one root mean square over all heads of a
token; `kv_write.Preparation` describes those that normalise each head by itself.

Legend: T tokens, N hidden width, H heads, D head width.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from transom_kernels.layer_norm import layer_norm
from transom_kernels.rms_norm import rms_norm
from transom_worker.models.parallel.communicator import Communicator


class Norm(Protocol):
    """A layer that normalises rows."""

    weight_bytes: int

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the normalised rows, [T, N]."""


class RmsNorm:
    """Root-mean-square normalisation with a learned weight."""

    def __init__(self, weight_N: torch.Tensor, eps: float) -> None:
        self.weight_N, self.eps = weight_N, eps
        self.weight_bytes = weight_N.nbytes

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the normalised rows, [T, N]."""
        return rms_norm(x_TN, self.weight_N, self.eps)[0]

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + norm(x)`, [T, N]."""
        return rms_norm(x_TN, None, self.eps, residual_TN, inner=self.weight_N)[1]


class LayerNorm:
    """Normalisation by mean and variance, with a learned weight, and a bias if the family has one."""

    def __init__(self, weight_N: torch.Tensor, eps: float, bias_N: torch.Tensor | None = None) -> None:
        self._weight_N, self._bias_N, self._eps = weight_N, bias_N, eps
        self.weight_bytes = weight_N.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the normalised rows, [T, N]."""
        return layer_norm(x_TN, self._weight_N, self._eps, self._bias_N)


class AllHeadsQkNorm:
    """Root-mean-square normalisation over all query heads together, and over all key heads together."""

    def __init__(self, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float) -> None:
        self._weights, self._eps = (query_weight, key_weight), eps
        self.weight_bytes = query_weight.nbytes + key_weight.nbytes

    def __call__(self, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the normalised queries [T, H, D] and keys [T, KVH, D]."""
        pairs = zip(heads, self._weights, strict=True)
        return tuple(rms_norm(part.flatten(1), weight, self._eps)[0].view(part.shape) for part, weight in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroups:
    """Normalises groups of neighbouring heads that several ranks divide, each group alone: an all-reduce sums their squares."""

    own: slice  # the group of which this rank has a part
    count: int  # all groups
    width: int  # numbers of a whole group
    comm: Communicator

    def scales(self, x_TN: torch.Tensor, eps: float) -> torch.Tensor:
        """Return, for each number of this rank, what it is multiplied by: 1 / root(mean of its group's squares + eps), [T, N]."""
        parts_TGP = x_TN.view(len(x_TN), self.own.stop - self.own.start, -1)
        mean_TG = x_TN.new_zeros(len(x_TN), self.count)
        mean_TG[:, self.own] = parts_TGP.square().sum(dim=2) / self.width
        scale_TG = self.comm.all_reduce_(mean_TG).add_(eps).rsqrt_()[:, self.own]
        return scale_TG.repeat_interleave(parts_TGP.shape[2], dim=1, output_size=x_TN.shape[1])


class ShardedAllHeadsQkNorm:
    """`AllHeadsQkNorm` for several ranks, each with some of the heads: an all-reduce sums the squares over the ranks."""

    def __init__(
        self,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        eps: float,
        *,
        widths: tuple[int, int],
        counts_keys: bool,
        comm: Communicator,
    ) -> None:
        """The weights are those of this rank's heads; `widths` are the total widths of all query heads and of all key heads.

        If several ranks hold the same key heads, exactly one of them must have `counts_keys`, so that their squares count once.
        """
        self._weights, self._eps, self._comm = (query_weight, key_weight), eps, comm
        # Factors that turn this rank's sums of squares into its parts of the means over all heads.
        counts = (1.0 / widths[0], (1.0 / widths[1]) if counts_keys else 0.0)
        self._shares_2 = torch.tensor(counts, dtype=torch.float32, device=query_weight.device)
        self.weight_bytes = query_weight.nbytes + key_weight.nbytes

    def __call__(self, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the normalised queries [T, H, D] and keys [T, KVH, D] of this rank."""
        wide = [part.float() for part in heads]
        squares_T2 = torch.stack([part.square().sum(dim=(1, 2)) for part in wide], dim=1)
        mean_T2 = self._comm.all_reduce_(squares_T2.mul_(self._shares_2))
        scale_T211 = mean_T2.add_(self._eps).rsqrt_()[:, :, None, None]
        return tuple(
            (part * scale_T211[:, i] * weight.view(part.shape[1:])).to(heads[i].dtype)
            for i, (part, weight) in enumerate(zip(wide, self._weights, strict=True))
        )
