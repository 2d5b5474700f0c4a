"""A prompt's digests are the worker's, in whatever pieces the router computes them."""

from hypothesis import given
from hypothesis import strategies as st

from transom_cluster.routing.prompt_hashes import PromptChain
from transom_core.kv_cache.hashing import chain_root, extend_chain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300).map(tuple)


@given(
    TOKENS,
    # around whole steps of the hash, which are 24 and 56 tokens
    st.sampled_from([1, 2, 3, 7, 8, 16, 23, 24, 25, 32, 57, 64]),
    st.lists(st.integers(0, 300), max_size=3),
)
def test_digests_are_the_workers_in_whatever_pieces(
    token_ids: tuple[int, ...], block_size: int, pieces: list[int]
) -> None:
    root = chain_root(block_size, cache_salt="tenant")
    expected: list[bytes] = []
    extend_chain(expected, root, token_ids, block_size)
    chain = PromptChain(token_ids, root, block_size)
    assert chain.num_blocks == len(expected)
    for num_blocks in pieces:
        known = chain.hashed(num_blocks)[: min(num_blocks, len(expected))]
        assert known.tobytes() == b"".join(expected[:num_blocks])
    assert [chain.digest(block) for block in range(len(expected))] == expected
