"""Tensor parallelism: a rank's place among the ranks of a worker, how ranks connect, and their collectives.

A *rank* is one process with one device. All ranks of a worker run the same collectives in the same order.
"""
