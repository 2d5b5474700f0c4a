"""From a model's config to its KV cache: groups, blocks, pages, and how many requests fit. Integers only."""
