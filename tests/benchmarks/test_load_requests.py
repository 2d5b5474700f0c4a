from __future__ import annotations

from itertools import islice
from typing import Any

from load_requests import Workload


def workload(**changes):
    values: dict[str, Any] = {
        "api": "completions",
        "model": "m",
        "prompt_tokens": (32, 64),
        "output_tokens": (4, 8),
        "shared_prefix_tokens": 0,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": 7,
    }
    return Workload(**(values | changes))


def test_lengths_stay_in_their_ranges_and_both_ends_occur():
    bodies = list(islice(workload(prompt_tokens=(2, 4), output_tokens=(4, 6)).bodies("a"), 200))
    assert {len(body["prompt"]) for body in bodies} == {2, 3, 4}
    assert {body["max_tokens"] for body in bodies} == {4, 5, 6}


def test_a_seed_repeats_and_a_label_or_seed_changes_everything():
    first = list(islice(workload().bodies("a"), 5))
    assert first == list(islice(workload().bodies("a"), 5))
    for other in (workload().bodies("b"), workload(seed=8).bodies("a")):
        assert all(one["prompt"][0:8] != two["prompt"][0:8] for one, two in zip(first, other, strict=False))


def test_shared_prefix_is_shared_across_labels_and_counts_towards_the_length():
    shared = workload(shared_prefix_tokens=16)
    prompts = [next(shared.bodies(label))["prompt"] for label in "abc"]
    assert all(prompt[:16] == prompts[0][:16] for prompt in prompts)
    assert len({tuple(prompt[16:24]) for prompt in prompts}) == 3
    assert all(32 <= len(prompt) <= 64 for prompt in prompts)


def test_chat_bodies_have_a_message_of_words():
    body = next(workload(api="chat", ignore_eos=False).bodies("a"))
    assert "prompt" not in body
    assert "ignore_eos" not in body
    assert 32 <= len(body["messages"][0]["content"].split()) <= 64
