"""The contract: ranges, errors across processes, pickling. `LogprobTable`: the objects that it was made of, in a tenth of their
memory."""

import math
import pickle
import tracemalloc

import pytest

from transom_core import errors
from transom_core.contract import ErrorInfo, Logprob, LogprobTable, SamplingParams, TokenLogprobs

NUM_TOP = 20


WRONG = {
    "n": (0,),
    "max_tokens": (0, 1.5),
    "min_tokens": (17,),
    "temperature": (float("nan"), None, 10**400, "hot"),
    "top_p": (0.0,),
    "top_k": (-2, 0.5),
    "repetition_penalty": (0.0,),
    "frequency_penalty": (-3.0,),
    "stop": (("",), tuple("abcdefghijklmnopq"), (5,), 5),
    "stop_token_ids": (("5",),),
    "logprobs": (21,),
    "logit_bias": ({1: 101.0}, {"hello": 1.0}, [7], {3: 10**400}),
    "seed": (2**64, -(2**63) - 1),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_wrong_parameters_name_themselves(field: str, value: object) -> None:
    with pytest.raises(errors.RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_equal_values_in_several_forms_are_read_alike() -> None:
    one = SamplingParams(stop="end", stop_token_ids=[7], logit_bias={"3": 1})  # type: ignore[arg-type, dict-item]
    assert one == SamplingParams(stop=("end",), stop_token_ids=(7,), logit_bias={3: 1.0})
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(seed=-(2**63)).seed == -(2**63)
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(top_k=-1) != SamplingParams(top_k=0)


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestError("wrong", param="top_p"),
        errors.PromptTooLong("long", param="prompt"),
        errors.RequestTooLarge("large"),
        errors.Overloaded("full", retry_after_s=3.0),
        errors.RequestTimeout("late"),
        errors.EngineDead("dead"),
    ],
)
def test_errors_keep_their_class_and_details_between_processes(error: errors.TransomError) -> None:
    back = pickle.loads(pickle.dumps(ErrorInfo.of(error))).error()
    for one in (back, pickle.loads(pickle.dumps(error))):
        assert type(one) is type(error)
        assert str(one) == str(error)
        assert getattr(one, "param", None) == getattr(error, "param", None)
        assert getattr(one, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_foreign_errors_become_step_failed() -> None:
    info = ErrorInfo.of(ZeroDivisionError("oops"))
    assert info.kind == "StepFailed"
    assert isinstance(info.error(), errors.StepFailed)


def position(at: int, num_top: int = NUM_TOP) -> TokenLogprobs:
    top = tuple(Logprob(at + k, -0.5 * k, k + 1) for k in range(num_top))
    return TokenLogprobs(Logprob(at, -math.inf if at == 3 else -0.25 * at, at + 1), top)


def test_a_table_gives_back_its_positions() -> None:
    positions = [position(at) for at in range(9)]
    table = LogprobTable.of(positions)
    assert list(table) == positions
    assert (table[-1], len(table)) == (positions[8], 9)
    assert (list(table[2:5]), list(table[::4])) == (positions[2:5], positions[::4])
    assert pickle.loads(pickle.dumps(table)) == table != table[:8]
    whole = LogprobTable.of(positions[:4])
    whole.extend(table[4:])
    whole.extend(LogprobTable(1))
    assert whole == table
    assert LogprobTable(1) == LogprobTable(5)
    with pytest.raises(IndexError):
        table[9]


def test_positions_have_equally_many_entries() -> None:
    table = LogprobTable.of([position(0, 2)])
    with pytest.raises(ValueError, match="4 entries; those before it have 3"):
        table.append(position(1, 3))
    with pytest.raises(ValueError, match="21 entries"):
        table.extend(LogprobTable.of([position(1)]))


def test_an_entry_takes_twelve_bytes() -> None:
    [position(at) for at in range(2000)]  # so that Python's own list of unused tuples is full
    tracemalloc.start()
    try:
        table = LogprobTable.of(position(at) for at in range(2000))
        size = tracemalloc.get_traced_memory()[0]
        objects = [position(at) for at in range(2000)]
        objects_size = tracemalloc.get_traced_memory()[0] - size
    finally:
        tracemalloc.stop()
    assert len(objects) == len(table)
    assert size < 1.3 * 12 * 2000 * (1 + NUM_TOP)
    assert size < objects_size / 8
