"""Hyper-connections: a residual of several streams, mixed into a sublayer's input and from its output."""

from transom_kernels.hyper_connections.op import collapse_streams, expand_streams, merge_streams, normalise_streams

__all__ = ["collapse_streams", "expand_streams", "merge_streams", "normalise_streams"]
