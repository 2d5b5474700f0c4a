from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from transom_core.kv_cache.hashing import chain_root, extend_chain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain(token_ids: list[int], block_size: int = 4, **extra: Any) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, chain_root(block_size, **extra), token_ids, block_size)
    return digests


@given(TOKENS, st.integers(0, 40), st.integers(1, 9))
def test_a_chain_grows_the_same_in_one_go_or_in_two(token_ids: list[int], cut: int, block_size: int) -> None:
    root = chain_root(block_size)
    grown: list[bytes] = []
    extend_chain(grown, root, token_ids[:cut], block_size)
    extend_chain(grown, root, token_ids, block_size)
    assert grown == chain(token_ids, block_size)
    assert len(grown) == len(token_ids) // block_size
    assert all(len(digest) == len(root) for digest in grown)


@given(TOKENS, TOKENS, TOKENS)
def test_digests_agree_exactly_on_common_prefixes(shared: list[int], a: list[int], b: list[int]) -> None:
    a, b = shared + a, shared + b  # lists that are drawn apart hardly ever begin alike
    for i, (x, y) in enumerate(zip(chain(a), chain(b), strict=False)):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


def test_identity_salt_policy_adapter_and_block_size_give_different_chains() -> None:
    tokens = list(range(8))
    chains = [
        chain(tokens),
        chain(tokens, identity="a"),
        chain(tokens, cache_salt="a"),
        chain(tokens, kv_policy="a"),
        chain(tokens, adapter="a"),
        chain(tokens, kv_policy="a", adapter="a"),
        chain(tokens, cache_salt=""),
        chain(tokens, cache_salt="ab", kv_policy="c"),
        chain(tokens, cache_salt="a", kv_policy="bc"),
        chain(tokens, block_size=8),
    ]
    assert len({digests[-1] for digests in chains}) == len(chains)


def test_digests_never_change() -> None:
    """Routers and workers of different versions must agree: a change here needs a new format name."""
    assert chain([1, 2, 3, 4])[0].hex()[:16] == "92394b46c2c9ee8b"
