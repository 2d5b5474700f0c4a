"""Recorded programs: a replay does what the function does, over what the inputs hold now."""

import pytest
import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch
from transom_kernels.cpu.program import ReplayMemory, record_program
from transom_kernels.cpu.recording import NotRecordable, current_recorder, host_call, refuse_recording
from transom_kernels.rms_norm import rms_norm

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def memory():
    return ReplayMemory()


def norm(x, weight):
    return rms_norm(x, weight, 1e-5)[0]


def triple(x):
    x.mul_(3.0)


def test_a_replay_reads_the_inputs_anew(memory):
    x, weight, rows = torch.randn(4, 50), torch.randn(50), torch.tensor([3, 1])

    def function():
        y = norm(norm(x, weight), weight) * 2  # torch's product is a call between kernels
        y = norm(y, weight)
        y.add_(1.0)
        host_call(lambda: triple(y))
        return norm(y[rows].view(2, 50), weight)

    program, result = record_program(function, memory)
    assert (program.num_instructions, program.num_calls) == (4, 4)
    for shift in range(3):
        x.normal_()
        rows.copy_(torch.tensor([shift, 3 - shift]))
        expected = function()
        result.fill_(float("nan"))
        program.replay()
        assert torch.equal(result, expected)


def test_results_that_were_dropped_share_memory(memory):
    x, weight = torch.randn(1000, 1000), torch.randn(1000)

    def function():
        y = x
        for _ in range(20):
            y = norm(y, weight)
        return y

    record_program(function, memory)
    assert sum(map(len, memory.chunks)) <= 3 * x.nbytes + (1 << 24)


def test_two_programs_share_the_memory_of_results(memory):
    x, weight = torch.randn(3, 40), torch.randn(40)
    programs = [record_program(lambda: norm(norm(x, weight), weight), memory) for _ in range(5)]
    assert len(memory.chunks) == 1
    expected = norm(norm(x, weight), weight)
    for program, result in programs:
        program.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("read", [lambda x: int(x.sum()), lambda x: x.nonzero(), lambda x: bool((x > 0).all())])
def test_a_function_that_reads_values_cannot_be_recorded(memory, read):
    with pytest.raises(NotRecordable):
        record_program(lambda: read(torch.ones(3)), memory)
    assert current_recorder() is None


def test_an_operator_can_refuse(memory):
    refuse_recording("outside of a recording this does nothing")
    with pytest.raises(NotRecordable, match="reads a list"):
        record_program(lambda: refuse_recording("reads a list"), memory)


def test_the_number_of_items_may_be_read_at_replay(memory):
    x, count, out = torch.randn(96), torch.tensor([2]), torch.zeros(96)
    kernel = cpu_kernel("tests.kernels.double_kernel", "make_double")
    program, _ = record_program(lambda: launch(kernel, count, [x, out, 96]), memory)
    assert torch.equal(out[:32], 2 * x[:32])
    assert not out[32:].any()
    count.fill_(5)
    program.replay()
    assert torch.equal(out[:80], 2 * x[:80])
    assert not out[80:].any()
