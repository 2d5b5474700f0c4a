"""Loads go to the ranks in pieces, by turns of clients; a step's result is told in whole loads."""

from collections import Counter

import pytest

from transom_core.client_queue import Sharer
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.tiers import DEVICE, DISK, HOST
from transom_worker.kvcache.blocks.block_copies import PIECE_S, WINDOW_S, BlockCopy, CopyQueue

BLOCK_BYTES = 1000
PIECE_BLOCKS = 10  # by these rates, a piece has this many blocks
BLOCK_NS = int(PIECE_S * 1e9) // PIECE_BLOCKS
WINDOW_PIECES = int(WINDOW_S / PIECE_S) + 1


@pytest.fixture
def copies() -> CopyQueue:
    return CopyQueue([BLOCK_BYTES], lambda: LoadRates(1000, (BLOCK_NS,), (BLOCK_NS,)))


def load(copies: CopyQueue, client: str, num_pieces: int, *, weight: float = 1.0, tier: int = HOST) -> int:
    target = {HOST: DEVICE, DISK: HOST}[tier]
    blocks = range(num_pieces * PIECE_BLOCKS)
    return copies.add_load([BlockCopy(0, block, block, tier, target) for block in blocks], Sharer(client, weight))


def pieces(copies: CopyQueue) -> list[int]:
    """The tickets of the pieces that the next plan carries."""
    return list(dict.fromkeys(copy.ticket for copy in copies.take()))


def test_a_load_has_ended_when_all_its_pieces_have(copies: CopyQueue) -> None:
    ticket = load(copies, "a", 3)
    sent = pieces(copies)
    assert (len(sent), sent[0]) == (3, ticket)
    assert copies.ended([sent[1], sent[0]], [0.25, 0.5], []) == ([], [], [])
    assert copies.ended([99], [1.0], [98]) == ([], [], [])  # tickets of no load
    assert copies.ended([sent[2]], [1.0], []) == ([ticket], [1.75], [])


def test_a_client_alone_fills_the_window_and_beside_another_gets_half_of_the_bytes(copies: CopyQueue) -> None:
    load(copies, "a", 500)
    in_flight = pieces(copies)
    assert len(in_flight) == WINDOW_PIECES
    load(copies, "a", 1, tier=DISK)
    assert len(pieces(copies)) == 1  # the two kinds of loads do not delay each other
    short = load(copies, "b", 2)
    owner: Counter[str] = Counter()
    ended: list[int] = []
    load(copies, "c", 500, weight=3.0)
    while owner.total() < 200:
        done = in_flight.pop(0)
        ended += copies.ended([done], [PIECE_S], [])[0]
        for copy_ticket in pieces(copies):
            in_flight.append(copy_ticket)
            client = next(iter(copies.loads._in_flight[copy_ticket].load.sharer.client))
            owner[client] += 1
            if client == "b":
                assert owner.total() <= 12  # its share, after what was in flight
    assert short in ended
    assert owner["b"] == 2
    assert owner["c"] / owner["a"] == pytest.approx(3.0, rel=0.1)


def test_what_is_in_flight_lasts_for_two_long_steps(copies: CopyQueue) -> None:
    """Pieces are sent with plans only, so the ranks would idle for most of a long step."""
    load(copies, "a", 500)
    num_in_flight = len(pieces(copies))
    copies.ended([], [], [], step_s=3.0)
    assert num_in_flight + len(pieces(copies)) == pytest.approx(6.0 / PIECE_S, abs=1)
    for _ in range(50):
        copies.ended([], [], [], step_s=0.01)
    assert copies.loads.window_s == copies.reads.window_s == WINDOW_S


def test_a_piece_that_fails_ends_its_load_without_the_other_pieces(copies: CopyQueue) -> None:
    ticket = load(copies, "a", 100, tier=DISK)
    after = load(copies, "a", 1, tier=DISK)
    sent = pieces(copies)
    assert copies.ended([], [], [sent[0]]) == ([], [], [])  # others are still read
    assert copies.ended(sent[1:], [0.1] * len(sent[1:]), []) == ([], [], [ticket])
    assert pieces(copies) == [after]


def test_what_is_cut_is_not_sent_and_ends_with_what_was(copies: CopyQueue) -> None:
    first, second = load(copies, "a", 100, tier=DISK), load(copies, "a", 1, tier=DISK)
    sent = pieces(copies)
    assert (copies.reads.progress(first), copies.reads.progress(second)) == (0, None)
    assert copies.reads.num_waiting(first) == (100 - len(sent)) * PIECE_BLOCKS
    assert copies.reads.num_waiting(second) == PIECE_BLOCKS
    assert not copies.reads.cut(second)
    assert copies.reads.cut(first)
    assert copies.ended(sent, [0.1] * len(sent), [])[0] == [first]
    assert not copies.reads._waiting
    assert not copies.reads._loads


def test_a_load_whose_plan_was_lost_is_withdrawn_whole(copies: CopyQueue) -> None:
    first, second = load(copies, "a", 100), load(copies, "b", 1)
    sent = pieces(copies)
    assert copies.loads.withdraw([0, sent[2], sent[3]]) == [first]
    assert copies.ended(sent, [0.1] * len(sent), []) == ([], [], [])  # what is reported nevertheless
    assert pieces(copies) == [second]
    copies.clear()
    assert not copies.loads._in_flight
    assert len([load(copies, "a", 100) for _ in range(2)]) == 2
    assert len(pieces(copies)) == WINDOW_PIECES  # a whole window again
