"""`repair_start` against a dependency count over positions and layers, and against the known lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kv_cache.window_repair_model import FULL, RULES, Layout, chunk, inexact_live, make_groups, state, window
from tests.how_many import num_examples
from transom_core.kv_cache.groups import GroupKind
from transom_core.kv_cache.window_repair import repair_start

LAYOUTS: dict[str, Layout] = {
    "window": [[window(6)]],
    "windows and full": [[window(6)], [FULL], [window(6)], [FULL]],
    "windows of two sizes": [[window(3)], [window(9)], [FULL], [window(5)]],
    "chunked": [[chunk(12)], [chunk(12)], [FULL], [chunk(12)]],
    "window of one": [[window(1)], [FULL], [window(8)], [window(1)]],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_one_token_fewer_is_wrong(layout: Layout) -> None:
    specs = make_groups(layout, block_size=4)
    for n in (40, 44, 64, 72):
        s = repair_start(specs, n)
        assert s == n or inexact_live(specs, n, s + 1), n


@settings(max_examples=num_examples(40, 100), deadline=None)
@given(st.lists(st.lists(RULES, min_size=1, max_size=2), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_any_layout_is_exact_and_grows_with_n(layout: Layout, block_size: int) -> None:
    specs = make_groups(layout, block_size=block_size)
    starts = [repair_start(specs, n) for n in range(60)]
    assert starts == sorted(starts)
    assert all(0 <= s <= n for n, s in enumerate(starts))
    for n in (3 * block_size, 24, 48):
        assert not inexact_live(specs, n, starts[n])


def test_repair_lengths_of_known_models() -> None:
    """k * (W - 1) without rounding; chunked-local: n mod C whatever the depth."""
    n = 20_000
    gpt_oss_20b = make_groups([[window(128)], [FULL]] * 12, block_size=1)
    gpt_oss_120b = make_groups([[window(128)], [FULL]] * 18, block_size=1)
    gemma_3_27b = make_groups([[window(1024)] * 1 if i % 6 != 5 else [FULL] for i in range(62)], block_size=1)
    compressed = [dict(kind=GroupKind.COMPRESSED, ratio=4), state(4, 1)], [dict(kind=GroupKind.LATENT), state(128, 0)]
    deepseek_v4_flash = make_groups(
        [[window(128), *(compressed[i % 2] if i > 1 else ())] for i in range(43)], block_size=1
    )
    llama_4_scout = make_groups([[chunk(8192)] if i % 4 != 3 else [FULL] for i in range(48)], block_size=1)
    assert n - repair_start(gpt_oss_20b, n) == 1_524
    assert n - repair_start(gpt_oss_120b, n) == 2_286
    assert n - repair_start(deepseek_v4_flash, n) == 5_461
    assert repair_start(gemma_3_27b, n) == 0
    assert 60_000 - repair_start(gemma_3_27b, 60_000) == 53_196
    assert repair_start(llama_4_scout, n) == 16_384
    assert repair_start(llama_4_scout, 16_384) == 16_384


def test_blocks_round_the_top_window_down_alone() -> None:
    specs = make_groups([[window(128)], [FULL]] * 12, block_size=16)
    assert repair_start(specs, 20_000) == (20_000 - 127) // 16 * 16 - 11 * 127
