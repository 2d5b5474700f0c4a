"""Pages hold the blocks that lie wholly inside them; the dump block lies after all pages."""

from hypothesis import given
from hypothesis import strategies as st

from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout


@given(st.integers(1, 40), st.integers(3, 20), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_ids_lie_inside_their_page_and_apart(num_pages: int, page_units: int, stride_units: list[int]) -> None:
    spec = GroupSpec(name="g", kind=GroupKind.FULL, layers=(), block_size=16)
    groups = tuple(GroupLayout(spec=spec, block_bytes=u * 256, stride_bytes=u * 256, layers=()) for u in stride_units)
    layout = ArenaLayout(page_bytes=page_units * 256, num_pages=num_pages, groups=groups)
    for g, group in enumerate(groups):
        ids = [b for p in range(num_pages) for b in range(layout.first_block(p, g), layout.end_block(p, g))]
        assert ids == sorted(set(ids))
        for page in range(num_pages):
            for block in range(layout.first_block(page, g), layout.end_block(page, g)):
                begin = block * group.stride_bytes
                assert page * layout.page_bytes <= begin
                assert begin + group.stride_bytes <= (page + 1) * layout.page_bytes
        dump = layout.dump_block(g) * group.stride_bytes
        assert layout.pool_bytes <= dump
        assert dump + group.stride_bytes <= layout.slab_bytes
        assert layout.num_block_ids(g) == layout.dump_block(g) + 1
