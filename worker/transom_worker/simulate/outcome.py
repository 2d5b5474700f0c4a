"""`Report`: the figures of one simulation, such as hit, repaired and missed prompt tokens, evictions and duration.

A token is *repaired* if full-attention layers had it cached, but it was computed again because its sliding windows were evicted.
"""

from collections import Counter
from dataclasses import dataclass, field

from transom_worker.kvcache.prefix.prefix_outcome import HIT, REPAIRED
from transom_worker.kvcache.stats import CacheStats

MISSED = "missed_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replay's counts; `cache` has the prompt tokens by outcome. A simulation adds its settings and the size of its KV pool."""

    requests: int
    refused: dict[str, int]  # error class -> number of requests
    output_tokens: int
    host_tokens: int  # hit tokens that came from the host tier
    steps: int
    preemptions: int
    fragmentation: float  # mean fraction of the leased pages' memory that is in free blocks
    cache: CacheStats
    seconds: float  # of real time
    virtual_seconds: float  # on the virtual clock of the simulation
    setup: dict[str, object] = field(default_factory=dict)
    memory_bytes: int = 0

    @property
    def outcome(self) -> dict[str, int]:
        """Return outcome -> number of prompt tokens."""
        return self.cache.outcome_tokens

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests that were served."""
        return sum(self.outcome.values())

    @property
    def hit_tokens(self) -> int:
        """Return the prompt tokens found in the cache."""
        return self.outcome.get(HIT, 0)

    @property
    def repaired_tokens(self) -> int:
        """Return the prompt tokens that were computed again to restore a window."""
        return self.outcome.get(REPAIRED, 0)

    @property
    def missed_tokens(self) -> dict[str, int]:
        """Return reason -> number of prompt tokens that were not cached and so were computed."""
        return {name.removeprefix(MISSED): n for name, n in sorted(self.outcome.items()) if name.startswith(MISSED)}

    @property
    def evictions(self) -> dict[str, int]:
        """Return reason -> number of evicted blocks of all groups."""
        total: Counter[str] = Counter()
        for group in self.cache.groups:
            total.update(group.evicted_blocks)
        return dict(sorted(total.items()))

    def share(self, num_tokens: int) -> float:
        """Return a number of tokens as a fraction of the prompt tokens."""
        return num_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, object]:
        """Return the report as JSON values, in one object."""
        num_tokens = self.prompt_tokens + self.output_tokens
        return {
            **self.setup,
            "memory_bytes": self.memory_bytes,
            "requests": self.requests,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "host_tokens": self.host_tokens,
            "repaired_tokens": self.repaired_tokens,
            "missed_tokens": self.missed_tokens,
            "hit_share": self.share(self.hit_tokens),
            "repaired_share": self.share(self.repaired_tokens),
            "output_tokens": self.output_tokens,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "evictions": self.evictions,
            "fragmentation": self.fragmentation,
            "virtual_seconds": self.virtual_seconds,
            "seconds": self.seconds,
            "tokens_per_s": num_tokens / self.seconds if self.seconds else 0.0,
        }
