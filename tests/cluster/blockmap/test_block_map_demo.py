"""The recorded trace that the page replays shows what it is there to show."""

from __future__ import annotations

import gzip

from starlette.requests import Request

from tests.block_map_decoder import ACTIVE, EVICTED, HELD, LOOSE, REPAIR, Map
from transom_cluster.blockmap.static_files import DEMO, STATIC, file_response

MAX_BYTES = 400_000


def test_the_demo_shows_sharing_sliding_evictions_repairs_and_preemptions() -> None:
    trace = gzip.decompress((STATIC / DEMO).read_bytes())
    assert len(trace) <= MAX_BYTES
    seen, states, slides, times_s, at = Map(), set(), set(), [], 0
    most_references = 0
    while at < len(trace):
        length = int.from_bytes(trace[at : at + 4], "little")
        before = dict(seen.sequences)
        frame = seen.take(trace[at + 4 : at + 4 + length])
        at += 4 + length
        assert frame.header["whole"] == (len(times_s) == 0)
        times_s.append(frame.header["time_s"])
        states |= {block.state for block in frame.blocks.values()}
        most_references = max([most_references, *(block.refs for block in frame.blocks.values())])
        for seq_id in before.keys() & seen.sequences.keys():
            for group, runs in enumerate(before[seq_id]["runs"]):
                now = seen.sequences[seq_id]["runs"][group]
                if runs and now and runs[0][0] < now[0][0]:
                    slides.add(seen.header["groups"][group]["kind"])
    assert at == len(trace)
    assert states >= {ACTIVE, LOOSE, HELD, REPAIR, EVICTED}
    assert most_references >= 2
    assert slides == {"window"}
    kinds = {event["kind"] for event in seen.events}
    assert kinds == {"admitted", "finished", "hit", "repair", "evicted", "preempted"}
    assert times_s == sorted(times_s)
    assert 10 < times_s[-1] - times_s[0] < 120


def test_browsers_are_told_to_unpack_it() -> None:
    response = file_response(DEMO, Request({"type": "http", "headers": []}))
    assert response is not None
    assert response.headers["content-encoding"] == "gzip"
