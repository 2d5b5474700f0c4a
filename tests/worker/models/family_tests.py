"""The tests that every family runs: the engine computes what transformers computes, by every path through scheduler and cache.

A test module makes checkpoints, gives them as the fixture `family`, and inherits `FamilyTests`. Pools that keep all keys
and values are tested on several ranks (`test_sharded_families`), small pools in `end_to_end/test_combinations`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoints import LENGTHS, NUM_TOKENS, Answer, greedy, load_oracle, prompt, step_logprobs
from tests.engine_driver import Whole, embeddings, make_engine, make_request, run, whole_warm_up
from tests.lost_windows import lose_windows
from tests.matrices import some_daily
from transom_core.contract import MAX_LOGPROBS, Request
from transom_kernels.launch import has_cpu_kernels
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import RankUsage

TOLERANCE = 1e-3
MAX_MODEL_LEN = 256
BLOCK = 8


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """A family's config, and mistakes (changes to the config) that must show in what transformers computes."""

    config: dict[str, Any] = field(default_factory=dict)
    mistakes: tuple[dict[str, Any], ...] = ()
    family: str = ""
    records: bool = True  # whether its decode steps are recorded


def each(**settings: Any) -> tuple[dict[str, Any], ...]:
    """Mistakes of one setting each."""
    return tuple({name: value} for name, value in settings.items())


def by_name(cases: dict[str, FamilyCase]) -> dict[str, FamilyCase]:
    """The cases by their names. The first word of a name is the family, where the case has none."""
    return {name: replace(case, family=case.family or name.split()[0]) for name, case in cases.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A case, its checkpoint, and the right answers."""

    case: FamilyCase
    folder: Path
    oracle_folder: Path  # the same checkpoint, not quantised
    oracle: PreTrainedModel
    answers: list[Answer]
    alone: list[Whole]  # the answers of an engine without a prefix cache, to one prompt after the other
    alone_usage: RankUsage  # of that engine

    @staticmethod
    def of(oracle_folder: Path, case: FamilyCase, quantised: Path | None = None) -> Family:
        """Of a checkpoint that is there."""
        folder = quantised or oracle_folder
        oracle, prompts = load_oracle(oracle_folder), [prompt(length) for length in LENGTHS]
        with whole_warm_up():
            engine = make_roomy_engine(folder, enable_prefix_caching=False)
        alone = [whole for i, ids in enumerate(prompts) for whole in run(engine, [asked(f"{i}", ids)])]
        return Family(
            case=case,
            folder=folder,
            oracle_folder=oracle_folder,
            oracle=oracle,
            answers=[greedy(oracle, ids, guess=whole.token_ids) for ids, whole in zip(prompts, alone, strict=True)],
            alone=alone,
            alone_usage=engine.executor.rank_reports()[0].usage,
        )

    def engine(self, **settings: Any) -> Engine:
        """An engine over it; a roomy one unless `settings` say otherwise."""
        return make_roomy_engine(self.folder, **settings)

    def ask(self, engine: Engine, name: str, which: list[int] | None = None) -> list[Whole]:
        """Put the prompts to the engine, all at once, and compare tokens and log-probabilities."""
        chosen = range(len(self.answers)) if which is None else which
        wholes = run(engine, [asked(f"{name}{at}", self.answers[i].prompt) for at, i in enumerate(chosen)])
        self.check(name, wholes, chosen)
        return wholes

    def check(self, name: str, wholes: list[Whole], which: Iterable[int]) -> None:
        """Compare tokens and log-probabilities with the answers `which`."""
        for i, whole in zip(which, wholes, strict=True):
            length = len(self.answers[i].prompt)
            assert whole.token_ids == self.answers[i].token_ids, f"{name}, prompt of {length}"
            assert worst_difference(whole, self.answers[i]) < TOLERANCE, f"{name}, prompt of {length}"


def asked(name: str, ids: list[int]) -> Request:
    return make_request(name, ids, max_tokens=NUM_TOKENS, logprobs=MAX_LOGPROBS)


def make_roomy_engine(folder: Path, **settings: Any) -> Engine:
    sizes = {"block_size": BLOCK, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 1024, "max_num_seqs": 8}
    return make_engine(str(folder), **(sizes | {"dtype": "float32"} | settings))


class FamilyTests:
    """What every family is asked every day. Inherit, and give the fixture `family`."""

    def test_margins_are_clear_and_text_is_not_degenerate(self, family: Family) -> None:
        assert all(answer.is_clear for answer in family.answers), [
            (f"prompt of {len(answer.prompt)}", answer.margin, answer.choice_margin) for answer in family.answers
        ]
        assert min(len(set(answer.token_ids)) for answer in family.answers) >= 8

    @pytest.mark.exhaustive  # it asks transformers alone: whether the cases would show a mistake of ours
    def test_mistakes_would_show(self, family: Family) -> None:
        assert family.case.mistakes
        for mistake in family.case.mistakes:
            wrong = load_oracle(family.oracle_folder, **mistake)
            moved = [
                (step_logprobs(wrong, answer.prompt, answer.token_ids) - answer.logprobs).abs().max()
                for answer in family.answers[2:]
            ]
            assert max(moved) > 50 * TOLERANCE, mistake

    def test_alone_and_in_one_chunk(self, family: Family) -> None:
        family.check("alone", family.alone, range(len(LENGTHS)))

    @pytest.mark.skipif(not has_cpu_kernels(), reason="this processor has no kernels")
    def test_its_decode_steps_are_recorded_and_replayed(self, family: Family) -> None:
        """Fails if a layer of the family reads a tensor's value in Python: all decode steps would run eagerly."""
        use = family.alone_usage
        num_decodes = len(LENGTHS) * (NUM_TOKENS - 1) + LENGTHS.count(1)  # a prompt of one token is one, too
        expected = (0, num_decodes) if family.case.records else (num_decodes, 0)
        assert (use.num_eager_decodes, use.num_graph_decodes) == expected

    @pytest.mark.parametrize("steps_in_flight", some_daily([1, 2], daily=[2]))
    def test_together_in_small_chunks_then_from_the_cache_then_with_lost_windows(
        self, family: Family, steps_in_flight: int
    ) -> None:
        engine = family.engine(max_num_batched_tokens=45, steps_in_flight=steps_in_flight)
        family.ask(engine, "cold")
        hits = family.ask(engine, "hit")
        assert [whole.num_cached_tokens for whole in hits] == [(n - 1) // BLOCK * BLOCK for n in LENGTHS]
        lose_windows(engine.scheduler.cache)
        family.ask(engine, "repaired")
        kept = [retention.keeps_everything for retention in engine.scheduler.cache.retentions]
        can_repair = any(kept) and not all(kept) and engine.scheduler.cache.state_group is None
        assert (engine.scheduler.stats().outcome_tokens.get("repaired", 0) > 0) == can_repair
        if family.oracle_folder == family.folder:  # not quantised
            check_embeddings(engine, family.oracle, [answer.prompt for answer in family.answers])


@torch.inference_mode()
def check_embeddings(engine: Engine, oracle: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Compare embeddings with the last hidden states of transformers' model. Those of last tokens read the prefix cache."""
    hidden = [oracle.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double() for ids in prompts]
    for pooling in ("last", "mean"):
        for event, states, ids in zip(embeddings(engine, prompts, pooling), hidden, prompts, strict=True):
            expected = states[-1] if pooling == "last" else states.mean(dim=0)
            got = torch.tensor(event.embedding, dtype=torch.float64)
            assert (got - expected).abs().max() < TOLERANCE * expected.abs().max(), f"{pooling}, prompt of {len(ids)}"
            assert event.usage is not None
            assert event.usage.num_cached_tokens == ((len(ids) - 1) // BLOCK * BLOCK if pooling == "last" else 0)


def worst_difference(whole: Whole, answer: Answer) -> float:
    """Largest difference of any reported log-probability, over all steps."""
    worst = 0.0
    for step, reported in enumerate(whole.logprobs):
        given = (reported.chosen, *reported.top)
        theirs = answer.logprobs[step, [logprob.token_id for logprob in given]]
        worst = max(worst, float((torch.tensor([logprob.logprob for logprob in given]) - theirs).abs().max()))
    return worst
