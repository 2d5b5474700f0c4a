"""Sums over the GPUs of one host for small tensors: every rank reads every rank's tensor over peer memory, in one launch."""

from transom_kernels.all_reduce.gpu import PeerMemory, fits, one_shot_all_reduce_, region_bytes

__all__ = ["PeerMemory", "fits", "one_shot_all_reduce_", "region_bytes"]
