"""Builds the prefix tree of a workload: which requests share which runs of tokens. A run is, for example, one message of a chat."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transom_worker.simulate.workload import SimulatedRequest


class Node:
    """A run of tokens behind a given prefix. `kept` of its first tokens are in the cache of the bound that is computed."""

    __slots__ = ("depth", "kept", "users")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # runs before it
        self.kept = 0
        self.users: list[int] = []  # indices of the requests that read it, ascending

    def next_user(self, place: int) -> int | None:
        """Return the index of the next request after `place` that reads the node; None if there is none."""
        at = bisect_right(self.users, place)
        return self.users[at] if at < len(self.users) else None


class PathStep(NamedTuple):
    """One node of a request's path, and how many of the node's tokens the request has."""

    node: Node
    num_tokens: int


class ContentPath(NamedTuple):
    """One request's nodes from the root on, prompt and answer; `num_tokens` get keys and values in the end."""

    steps: tuple[PathStep, ...]
    num_prompt_tokens: int
    num_tokens: int

    def kept_prefix(self) -> int:
        """Return how many leading prompt tokens are kept."""
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
    for place, request in enumerate(requests):
        steps = tuple(_walk(nodes, request, place))
        num_tokens = request.num_prompt_tokens + request.answer.num_tokens - 1  # the last token is never computed
        paths.append(ContentPath(steps, request.num_prompt_tokens, num_tokens))
    return paths


def _walk(nodes: dict[tuple[Node | None, int], Node], request: SimulatedRequest, place: int) -> Iterator[PathStep]:
    parent: Node | None = None
    answer = request.answer.cut(request.answer.num_tokens - 1)
    for depth, (first_token, num_tokens) in enumerate((*request.prompt, answer)):
        if not num_tokens:
            continue
        node = nodes.get((parent, first_token))
        if node is None:
            node = nodes[parent, first_token] = Node(depth)
        node.users.append(place)
        yield PathStep(node, num_tokens)
        parent = node
