"""Record the trace that the live block map's page replays with `?demo`: a tiny model with full and window groups, a small pool.

    python scripts/record_block_map.py [FILE]

Runs a real engine on random weights, slowly enough to be watched, through what the map is there to show: requests that share a
prefix, windows that slide, evictions, repairs, preemptions. Fails if one of them did not happen, or the file is too large.
"""

from __future__ import annotations

import gzip
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine
from transom_worker.telemetry.blockmap.encoder import Encoder, WorkerIdentity
from transom_worker.telemetry.blockmap.snapshot import SnapshotTaker

TRACE = Path(__file__).parent.parent / "cluster" / "transom_cluster" / "blockmap" / "static" / "demo.bin.gz"
MAX_BYTES = 400_000
STEP_S = 0.025  # besides what it takes, so that eyes can follow
FRAME_S = 0.2
GROUPS = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3}
SETTINGS = {
    "kv_cache_memory_bytes": "1536KiB",
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "max_model_len": 1024,
    "num_threads": 1,
}


class Recording:
    """An engine whose blocks are looked at while it runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        log = engine.block_map_log
        self._snapshots = SnapshotTaker(engine.scheduler, log)
        self._encoder = Encoder(WorkerIdentity("demo", "tiny"), engine.scheduler.cache.layout, log.history)
        self._snapshots.begin()
        for group in range(len(engine.scheduler.cache.shape.groups)):
            self._encoder.start(group, self._snapshots.cache.copy(group))
        self._frames: list[bytes] = []
        self._frame_at_s = 0.0
        self._requests = 0
        self.events: Counter[str] = Counter()

    def add(self, prompt: list[int], max_tokens: int, *, turns: tuple[int, ...] = ()) -> None:
        """One request."""
        self._requests += 1
        self._engine.add(
            Request(
                request_id=f"chat-{self._requests}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                seed=self._requests,
                turn_boundaries=turns,
            )
        )

    def run(self, num_steps: int | None = None) -> None:
        """Steps until nothing is left to do, or up to `num_steps` steps."""
        while self._engine.has_work and num_steps != 0:
            self._engine.step()
            time.sleep(STEP_S)
            self.look()
            num_steps = None if num_steps is None else num_steps - 1

    def rest(self, rest_s: float) -> None:
        """Take frames of an idle engine for `rest_s` seconds."""
        end_s = time.monotonic() + rest_s
        while time.monotonic() < end_s:
            time.sleep(FRAME_S)
            self.look()

    def look(self) -> None:
        """Take a frame if it is time for one, or a window is being repaired, which is soon over."""
        is_due = time.monotonic() - self._frame_at_s >= FRAME_S
        blocks = [sequence.blocks for sequence in self._engine.scheduler.sequences_with_blocks()]
        if not is_due and not any(one is not None and one.processed < one.repair.end for one in blocks):
            return
        self._frame_at_s = time.monotonic()
        snapshot = self._snapshots.take()
        self.events.update(event.kind for event in snapshot.events)
        frame = self._encoder.update(snapshot)
        if not self._frames:
            frame = self._encoder.whole(snapshot.time_s)
        self._frames.append(frame.numbered(len(self._frames)))

    def trace(self) -> bytes:
        """All frames, each after its length."""
        return b"".join(len(frame).to_bytes(4, "little") + frame for frame in self._frames)

    @property
    def num_frames(self) -> int:
        """Frames taken so far."""
        return len(self._frames)


def play(recording: Recording) -> None:
    """The scenes."""
    rng = random.Random(7)

    def words(count: int) -> list[int]:
        return [rng.randrange(5, 500) for _ in range(count)]

    system = words(192)
    recording.look()
    recording.add([*system, *words(40)], 24, turns=(192,))
    recording.run()
    chats = [[*system, *words(30 + 16 * number)] for number in range(2)]
    for chat in chats:  # two that share a prefix, whose windows slide
        recording.add(chat, 60, turns=(192,))
    recording.run()
    recording.rest(1.0)
    document = words(700)
    recording.add(document, 30)
    recording.run()
    for _ in range(5):  # others fill the pool, and windows that were left behind go first
        for _ in range(2):
            recording.add(words(rng.randrange(120, 200)), 20)
        recording.run()
    recording.add([*document[:320], *words(20)], 30)  # the middle of it, whose windows are gone
    recording.run()
    recording.rest(1.0)
    for chat in chats:  # the first ones come back
        recording.add([*chat, *words(24)], 16, turns=(192, len(chat)))
    recording.run()
    for _ in range(12):  # more at once than there is memory for
        recording.add(words(rng.randrange(140, 260)), 170)
    recording.run()
    recording.rest(1.5)


def main(target: Path) -> None:
    """Record, check, write."""
    sys.path.insert(0, str(Path(__file__).parent.parent))  # for the package `tests`
    from tests.checkpoints import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"sliding_window": 96, "max_position_embeddings": 1024, **GROUPS}
        model = make_checkpoint(Path(folder), "gemma3_text", **sizes)
        engine = build_engine(Settings.parse(model=str(model), **SETTINGS).engine_config(), model_name="tiny")
    recording = Recording(engine)
    play(recording)
    engine.shutdown()
    trace = recording.trace()
    totals = {group.name: sum(group.evicted_blocks.values()) for group in engine.scheduler.stats().groups}
    print(f"{recording.num_frames} frames, {len(trace):,} bytes, events {dict(recording.events)}, evicted {totals}")
    missing = {"hit", "repair", "preempted", "admitted", "finished"} - recording.events.keys()
    if missing or not all(totals.values()) or len(trace) > MAX_BYTES:
        sys.exit(f"not written: {missing or 'no event'} missing, or evictions, or more than {MAX_BYTES:,} bytes")
    target.write_bytes(gzip.compress(trace, 6, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)
