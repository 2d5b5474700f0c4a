"""A worker with very many blocks, of which some change with every frame, as under load."""

import random

from tests.browser.block_frames import ACTIVE, EVICTABLE, EVICTED, FREE, PINNED, REPAIR, FakeWorker

STATES = [FREE, ACTIVE, ACTIVE, ACTIVE, EVICTABLE, EVICTABLE, PINNED]


class BusyWorker:
    """100,000 blocks by default, in full and sliding pages; `diff` moves 1 % of them."""

    def __init__(self, num_pages: int = 1000, blocks_per_page: int = 100, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.fake = FakeWorker(
            num_pages=num_pages, page_bytes=256 * blocks_per_page, strides={"full": 256, "window(128)": 256}
        )
        middle = num_pages // 2
        self.fake.lease(0, *range(middle))
        self.fake.lease(1, *range(middle, num_pages))
        for group, block in list(self.fake.records):
            self._turn(group, block, self.rng.choice(STATES))
        self.fake.running = 64
        for number in range(64):
            self.fake.sequence(
                number, f"cmpl-{number:04d}", [[[0, 40 * number, 40]], [[0, middle * blocks_per_page + 8 * number, 8]]]
            )
        self._flashing: list[tuple[int, int]] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that the frames are about."""
        return len(self.fake.records)

    def whole(self) -> bytes:
        """A whole frame."""
        return self.fake.frame(whole=True)

    def diff(self, share: float = 0.01, after_s: float = 0.25) -> bytes:
        """A frame in which that share of the blocks changed."""
        for group, block in self._flashing:
            self._turn(group, block, FREE)
        moved = self.rng.sample(list(self.fake.records), int(share * self.num_blocks))
        for group, block in moved:
            self._turn(group, block, self.rng.choice([*STATES, REPAIR, EVICTED]))
        self._flashing = [key for key in moved if self.fake.records[key][0] == EVICTED]
        for number in range(64):
            self.fake.sequence(
                number, f"cmpl-{number:04d}", self.fake.sequences[number]["runs"], processed=self.fake.number
            )
        self.fake.event("evicted", group=0, count=len(self._flashing))
        return self.fake.frame(after_s=after_s)

    def _turn(self, group: int, block: int, state: int) -> None:
        references = self.rng.choice([1, 1, 1, 2]) if state in (ACTIVE, REPAIR) else 0
        age = self.rng.choice([5, 100, 900, 5000]) if state in (EVICTABLE, PINNED) else 0
        self.fake.put(group, block, state, references=references, logical=block % 500, hash_prefix=block + 1, age=age)
