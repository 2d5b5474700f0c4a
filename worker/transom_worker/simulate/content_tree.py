"""Builds the prefix tree of a workload: which requests share which runs of tokens.

A *run* is consecutive tokens that requests share as a whole, such as one message of a chat. A *node* is a run after a given prefix.
A *path* is the sequence of nodes of one request. Example: two requests with the messages A, B and A, C have paths of two nodes, and
share node A.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transom_worker.simulate.workload import SimulatedRequest


class Node:
    """A run of tokens after a given prefix. Its first `kept` tokens are in the cache that `bounds` simulates."""

    __slots__ = ("depth", "kept", "readers")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # number of runs before this one
        self.kept = 0
        self.readers: list[int] = []  # indices of the requests that have this node on their paths, ascending

    def next_reader(self, index: int) -> int | None:
        """Return the index of the next request after request `index` that reads the node; None if there is none."""
        at = bisect_right(self.readers, index)
        return self.readers[at] if at < len(self.readers) else None


class PathStep(NamedTuple):
    """One node of a request's path, and how many of the node's tokens the request has, since it may have only the first ones."""

    node: Node
    num_tokens: int


class ContentPath(NamedTuple):
    """One request's nodes in the order of their tokens, prompt and answer; `num_tokens` of the tokens get keys and values."""

    steps: tuple[PathStep, ...]
    num_prompt_tokens: int
    num_tokens: int

    def kept_prefix(self) -> int:
        """Return how many leading prompt tokens are kept in the simulated cache."""
        num_tokens = 0
        for node, num_read in self.steps:
            num_tokens += min(node.kept, num_read)
            if node.kept < num_read:
                break
        return min(num_tokens, self.num_prompt_tokens)


def content_paths(requests: Sequence[SimulatedRequest]) -> list[ContentPath]:
    """Return one path per request, in the order of the requests; equal prefixes share nodes."""
    nodes: dict[tuple[Node | None, int], Node] = {}
    paths = []
    for index, request in enumerate(requests):
        steps = tuple(_path_steps(nodes, request, index))
        num_tokens = request.num_prompt_tokens + request.answer.num_tokens - 1  # the last token is only sampled
        paths.append(ContentPath(steps, request.num_prompt_tokens, num_tokens))
    return paths


def _path_steps(
    nodes: dict[tuple[Node | None, int], Node], request: SimulatedRequest, index: int
) -> Iterator[PathStep]:
    """Yield the steps of one request's path, and add new nodes to `nodes`: (parent, first token of the run) -> node."""
    parent: Node | None = None
    answer = request.answer.cut(request.answer.num_tokens - 1)
    for depth, (first_token, num_tokens) in enumerate((*request.prompt, answer)):
        if not num_tokens:
            continue
        node = nodes.get((parent, first_token))
        if node is None:
            node = nodes[parent, first_token] = Node(depth)
        node.readers.append(index)
        yield PathStep(node, num_tokens)
        parent = node
