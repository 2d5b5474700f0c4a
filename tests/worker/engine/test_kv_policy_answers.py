"""Requests with KV policies through a whole engine: long streams, quality, defaults and metrics.

That their answers are exact under preemption, migration and every other feature is in `end_to_end/test_policy_combinations`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, prompt
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, Request, WindowPolicy
from transom_worker import LLM, SamplingParams

BLOCK = 4
WINDOW = WindowPolicy(sinks=5, window=21)
HISTORIES = (AdaptivePolicy(sinks=4, min_window=8, max_window=64, threshold=0.05), HeavyPolicy(sinks=4, budget=40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policies"), "llama")


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[LLM]:
    values: dict[str, Any] = (
        dict(dtype="float32", kv_cache_memory_bytes="2MiB", num_threads=1, block_size=BLOCK, seed=3) | settings
    )
    with LLM(str(folder), **values) as llm:
        yield llm


def answers(
    llm: LLM, prompts: list[list[int]], policy: KvPolicy | None, num_tokens: int = 24, **more: Any
) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], params, kv_policy=policy or "full", use_tqdm=False, **more
    )


@pytest.mark.parametrize("policy", [WINDOW, *HISTORIES], ids=lambda policy: policy.text)
def test_a_policy_that_drops_much_is_measured_so(folder: Path, policy: KvPolicy) -> None:
    with engine(folder) as llm:
        plain = answers(llm, [prompt(90)], policy, 60)[0].outputs[0]
        (out,) = answers(llm, [prompt(90)], policy, 60, kv_quality=True)
    quality = out.outputs[0].kv_quality
    assert quality is not None
    assert out.outputs[0].token_ids == plain.token_ids
    assert plain.kv_quality is None
    assert quality.num_tokens == 5
    assert 0 < quality.kl / 5 <= quality.max_kl
    assert 0.01 < quality.dropped_mass / 5 < 1


def test_the_setting_is_the_default(folder: Path) -> None:
    text = '{"type": "window", "sinks": 5, "window": 21}'
    with engine(folder, kv_policy=text) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        ids = {"prompt_token_ids": prompt(90)}
        (default,) = llm.generate(ids, params, use_tqdm=False)
        windowed, full = answers(llm, [prompt(90)], WINDOW)[0], answers(llm, [prompt(90)], None)[0]
    assert default.outputs[0].token_ids == windowed.outputs[0].token_ids != full.outputs[0].token_ids


def test_metrics_and_timelines_tell_what_policies_keep(folder: Path) -> None:
    with engine(folder) as llm:
        answers(llm, [prompt(90), prompt(60)], WINDOW, 20)
        answers(llm, [prompt(90)], HISTORIES[1], 20, kv_quality=True)
        request = Request(
            request_id="x-0-0",
            prompt_token_ids=tuple(prompt(90)),
            params=SamplingParams(max_tokens=20, ignore_eos=True),
            seed=0,
            kv_policy=WINDOW,
        )

        def run_a_little() -> tuple[str, list[dict[str, Any]]]:
            llm.engine.add(request)
            for _ in range(4):
                llm.engine.step()
            llm.engine.publish()
            seen = llm.engine.metrics.text().decode(), llm.engine.timelines.events_of("x")
            llm.engine.abort("x-0-0")
            return seen

        page, (queued, *_, phase) = llm._thread.call(run_a_little).result()

    def value(name: str, policy: str) -> float:
        lines = [line for line in page.splitlines() if line.startswith(f"transom_kv_policy_{name}{{")]
        (line,) = (line for line in lines if f'"{policy}"' in line)
        return float(line.split()[-1])

    assert [value("requests_total", policy) for policy in ("window", "adaptive", "heavy")] == [3, 0, 1]
    assert value("running_requests", "window") == 1
    assert value("seen_tokens", "window") == 93
    assert value("kept_tokens", "window") == 8 + value("window_tokens", "window")
    assert 21 <= value("window_tokens", "window") <= 28
    assert value("dropped_blocks_total", "heavy") == (108 - 40) // BLOCK + 1
    assert value("compared_tokens_total", "heavy") == 2  # at 91 and 104
    assert 0 <= value("agreeing_tokens_total", "heavy") <= 2
    assert value("kl_nats_total", "heavy") > 0
    assert 0 < value("dropped_attention_total", "heavy") < 2
    assert queued["kv_policy"] == WINDOW.text
    assert phase["kept_blocks"] * BLOCK == value("kept_tokens", "window")
    assert phase["window_tokens"] == value("window_tokens", "window")
    assert phase["dropped_blocks"] >= 1  # it began at a hit
