"""`StopStrings`: finds stop strings in text that arrives in pieces.

Example: with the stop string `abc`, the piece `xab` gives the final text `x`; `ab` is held back, since it could be the
beginning of the stop string. If the next piece is `d`, `abd` becomes final; if it is `c`, the text ends after `x`.

The search is an Aho-Corasick automaton over the stop strings, which is built only as far as the text reaches.

A **node** is a beginning (a prefix) of one or more stop strings. The node of a text is the longest one that the text ends with. Its
**fail** node is the next shorter one that the text ends with. Example with the stop strings `abcd` and `bcx`: the node of the text
`xabc` is `abc`, and its fail node is `bc`. The next character `d` leads to `abcd`, which is a stop string; the character `x` leads
over the fail node to `bcx`; `a` and `b` lead to the nodes `a` and `b`; any other character leads to the root, the empty beginning.

A character costs one move to a longer node or to the root, and each move along a fail node shortens the text's node. So n
characters make at most 2n moves, for any number and length of stop strings. A node is made when the text first reaches
its parent: a request pays for the part of its stop strings that its text repeats, and nothing when it starts. The library
`pyahocorasick` builds the whole automaton first, and does not tell how long the present node is, which is the length of the text
to hold back.
"""


class StopNode:
    """One beginning of stop strings: the first `length` characters of `stops`, all the sorted stop strings that share it.

    `match_length` is the length of the longest stop string that this beginning ends with, or 0.
    """

    __slots__ = ("children", "fail", "length", "match_length", "stops")

    def __init__(self, stops: list[str], length: int) -> None:
        self.stops = stops
        self.length = length
        self.children: dict[str, StopNode] = {}  # by the next character
        self.fail: StopNode | None = None  # None: this is the root, or no text has reached this node yet
        self.match_length = 0

    def make_children(self) -> None:
        """Make the nodes that are one character longer."""
        by_character: dict[str, list[str]] = {}
        for stop in self.stops:
            if len(stop) > self.length:
                by_character.setdefault(stop[self.length], []).append(stop)
        self.children = {character: StopNode(stops, self.length + 1) for character, stops in by_character.items()}


class StopAutomaton:
    """The nodes of one request's stop strings, none of which is empty."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.root = StopNode(sorted(set(stops)), 0)
        self.root.make_children()

    def move(self, node: StopNode, character: str) -> StopNode:
        """Return the node of a text that had `node` and is continued by `character`."""
        while True:
            child = node.children.get(character)
            if child is not None:
                return child if child.fail is not None else self._reach(node, character, child)
            if node.fail is None:
                return node  # the root
            node = node.fail

    def _reach(self, parent: StopNode, character: str, node: StopNode) -> StopNode:
        """Complete a node that a text reaches for the first time: set its fail node, and make its children.

        The search for its fail node (`move`) may complete that node as well, and so on. This recursion has at most one call for
        each stop string: a stop string's beginnings are reached from the shortest on.
        """
        node.fail = self.root if parent.fail is None else self.move(parent.fail, character)
        is_stop = len(node.stops[0]) == node.length  # sorted: a stop string stands before those that continue it
        node.match_length = node.length if is_stop else node.fail.match_length
        node.make_children()
        return node


class StopStrings:
    """Finds the first stop string in growing text, and holds back only what could be the beginning of one.

    The automaton's node stands for the text that is held back.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._automaton = StopAutomaton(stops) if stops else None
        self._node: StopNode | None = None  # None: the root
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Add `text`; return the text that is final now, and the stop string that ended it, if any.

        While `may_stop` is False, all text becomes final: a stop string counts only if it begins after `min_tokens` were reached.
        """
        if self._automaton is None:
            return text, None
        if not may_stop:
            return self.flush() + text, None
        found = self._search(self._automaton, text)
        held = self._held + text
        if found is not None:
            at, length = found
            self.flush()
            return held[: at + length if self._include else at], held[at : at + length]
        keep = 0 if self._node is None else self._node.length
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """Release the text that is held back: no more text follows, or stop strings do not count yet."""
        final, self._held, self._node = self._held, "", None
        return final

    def _search(self, automaton: StopAutomaton, text: str) -> tuple[int, int] | None:
        """Move on by `text`; return the first stop string in the held text followed by `text`, as (index, length), or None.

        Of stop strings that begin at the same index, it is the longest.
        """
        node, first = self._node or automaton.root, None
        for end, character in enumerate(text, len(self._held) + 1):
            node = automaton.move(node, character)
            length = node.match_length
            if length and (first is None or end - length <= first[0]):
                first = end - length, length
        self._node = node
        return first
