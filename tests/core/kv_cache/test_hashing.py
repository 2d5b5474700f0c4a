from hypothesis import given, strategies as st

from tests.prefix_chains import chain_of
from transom_core.kv_cache.hashing import chain_root, extend_chain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, st.integers(0, 40), st.integers(1, 9))
def test_a_chain_grows_the_same_in_one_go_or_in_two(token_ids: list[int], cut: int, block_size: int) -> None:
    root = chain_root(block_size)
    grown: list[bytes] = []
    extend_chain(grown, root, token_ids[:cut], block_size)
    extend_chain(grown, root, token_ids, block_size)
    assert grown == chain_of(token_ids, block_size)
    assert len(grown) == len(token_ids) // block_size
    assert all(len(digest) == len(root) for digest in grown)


@given(TOKENS, TOKENS, TOKENS)
def test_digests_agree_exactly_on_common_prefixes(shared: list[int], a: list[int], b: list[int]) -> None:
    a, b = shared + a, shared + b  # lists that are drawn apart hardly ever begin alike
    for i, (x, y) in enumerate(zip(chain_of(a, 4), chain_of(b, 4), strict=False)):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


def test_identity_salt_policy_adapter_and_block_size_give_different_chains() -> None:
    tokens = list(range(8))
    kinds: list[dict[str, str]] = [
        *({}, {"identity": "a"}, {"cache_salt": "a"}, {"kv_policy": "a"}, {"adapter": "a"}, {"cache_salt": ""}),
        *({"kv_policy": "a", "adapter": "a"}, {"cache_salt": "ab", "kv_policy": "c"}),
        {"cache_salt": "a", "kv_policy": "bc"},
    ]
    chains = [*(chain_of(tokens, 4, **kind) for kind in kinds), chain_of(tokens, 8)]
    assert len({digests[-1] for digests in chains}) == len(chains)


def test_digests_never_change() -> None:
    """Routers and workers of different versions must agree: a change here needs a new format name."""
    assert chain_of([1, 2, 3, 4], 4)[0].hex()[:16] == "92394b46c2c9ee8b"
