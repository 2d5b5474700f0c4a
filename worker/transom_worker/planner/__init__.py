"""Plans a model's KV cache from its config: groups, blocks, pages, and how many requests fit. Plans are integers, without tensors.

A *group* is a set of layers that keep the same tokens for the same time; the KV memory is divided into *pages*, each leased to one
group at a time. `plan_from_config` makes a plan from a `config.json`; the engine calls the same `cache_groups` and `plan_cache` for
the model that it loaded.
"""
