"""The pipeline stages of the attention kernel, by device."""

from __future__ import annotations

import pytest

from transom_kernels.paged_attention.triton.tuning import kernel_config, stages_on


@pytest.mark.parametrize(("rows", "element_bytes"), [(8, 2), (32, 2), (8, 4), (64, 4)])
def test_a_few_tokens_and_float32_are_alike_on_all_devices(rows: int, element_bytes: int) -> None:
    config = kernel_config(rows=rows, key_size=128, value_size=128, element_bytes=element_bytes, cache_bytes=2)
    assert {stages_on(config, capability) for capability in ((8, 0), (9, 0))} == {config.num_stages}


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_prompts_keys_are_fetched_a_round_ahead_on_hopper(width: int) -> None:
    """Of n stages a look-up and what it names take (n - 1) // 2 each; one is for the round that is computed."""
    config = kernel_config(rows=64, key_size=width, value_size=width, element_bytes=2, cache_bytes=2)
    assert (stages_on(config, (9, 0)) - 1) // 2 == 2
    assert {stages_on(config, capability) for capability in ((8, 0), (8, 9), (9, 4), (12, 0))} == {config.num_stages}


def test_larger_rounds_are_not_fetched_ahead_as_shared_memory_would_not_hold_them() -> None:
    """Wide heads with many queries each."""
    config = kernel_config(rows=64, key_size=512, value_size=512, element_bytes=2, cache_bytes=2)
    assert stages_on(config, (9, 0)) == config.num_stages
