"""A cache that clients share: a client's entries go before anybody else's once it has more than its part."""

from hypothesis import given, strategies as st

from transom_core.fair_cache import FairCache


def test_a_client_pushes_out_its_own_entries() -> None:
    cache: FairCache[str, int] = FairCache(400)
    cache.put("mine", 1, num_bytes=50, client="victim")
    for i in range(1000):
        cache.put(f"theirs {i}", i, num_bytes=10, client="attacker")
    assert cache.bytes_of("attacker") == 100
    assert cache.get("mine") == 1
    assert cache.get("theirs 999") == 999


def test_many_clients_leave_the_one_with_little_alone() -> None:
    cache: FairCache[str, int] = FairCache(400)
    cache.put("mine", 1, num_bytes=10, client="victim")
    for i in range(1000):
        cache.put(f"theirs {i}", i, num_bytes=20, client=f"attacker {i % 6}")
    assert cache.num_bytes <= 400
    assert cache.get("mine") == 1


def test_what_was_used_last_stays_and_time_ends_the_rest() -> None:
    now_s = 0.0
    cache: FairCache[str, int] = FairCache(40, clock=lambda: now_s)
    cache.put("a", 1, num_bytes=5)
    cache.put("b", 2, num_bytes=5, keep_s=60)
    assert cache.get("a") == 1
    cache.put("c", 3, num_bytes=5)  # the share of one client is 10 bytes
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    cache.put("b", 2, num_bytes=5, keep_s=60)
    now_s = 60.0
    assert cache.get("b") is None
    assert cache.num_bytes == 5
    cache.put("large", 4, num_bytes=11)
    assert cache.get("large") is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.sampled_from("abcdefg"))))
def test_bytes_add_up(puts: list[tuple[int, int, str]]) -> None:
    cache: FairCache[int, int] = FairCache(100)
    for key, num_bytes, client in puts:
        cache.put(key, num_bytes, num_bytes=num_bytes, client=client)
        kept = [found for key in range(10) if (found := cache.get(key)) is not None]
        assert cache.num_bytes == sum(kept) == sum(cache.bytes_of(client) for client in "abcdefg")
        assert cache.num_bytes <= 100
        assert all(cache.bytes_of(client) <= 25 for client in "abcdefg")
