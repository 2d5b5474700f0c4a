"""Which requests share which contents: the prefix tree of a workload, by runs of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transom_worker.simulate.workload import SimulatedRequest


class Node:
    """A run behind a given prefix. `kept` of its first tokens are in the cache that a bound imagines."""

    __slots__ = ("depth", "kept", "users")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # runs before it
        self.kept = 0
        self.users: list[int] = []  # places in the order of service, ascending

    def next_user(self, place: int) -> int | None:
        """Who reads it next after the request at `place`."""
        at = bisect_right(self.users, place)
        return self.users[at] if at < len(self.users) else None


class PathStep(NamedTuple):
    """A request's part of a node."""

    node: Node
    num_tokens: int


class ContentPath(NamedTuple):
    """One request: its nodes from the root, prompt first; `num_tokens` are those whose KV is computed in the end."""

    steps: tuple[PathStep, ...]
    num_prompt_tokens: int
    num_tokens: int

    def kept_prefix(self) -> int:
        """Leading prompt tokens whose nodes are kept."""
        num_tokens = 0
        for node, wanted in self.steps:
            num_tokens += min(node.kept, wanted)
            if node.kept < wanted:
                break
        return min(num_tokens, self.num_prompt_tokens)


def content_paths(requests: Sequence[SimulatedRequest]) -> list[ContentPath]:
    """The tree of all requests, as one path each in the order of service."""
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
