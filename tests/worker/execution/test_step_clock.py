"""A step's seconds by part: the host's clock alone, and with a device that lags the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from transom_worker.execution.step_clock import Mark, StepClock
from transom_worker.scheduling.step import StepTimings


@dataclass
class World:
    """A host's clock, and a device that is done with what was launched at `device_s`."""

    host_s: float = 100.0
    device_s: float = 0.0
    events: list[FakeEvent] = field(default_factory=list)

    def launch(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]


@dataclass
class FakeEvent:
    world: World
    at_s: float = -1.0

    def record(self) -> None:
        self.at_s = max(self.world.device_s, self.world.host_s)

    def query(self) -> bool:
        return self.at_s <= self.world.host_s

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query(), "an event that has not come was read"
        assert end_event.query(), "an event that has not come was read"
        return 1e3 * (end_event.at_s - self.at_s)


def step(clock: StepClock, world: World, *, samples: bool = True) -> StepTimings:
    clock.begin()
    world.host_s += 1.0
    clock.mark(Mark.APPLIED)
    world.launch(0.5, 1.0)
    clock.mark(Mark.COPIED)
    world.host_s += 2.0
    clock.mark(Mark.PREPARED)
    world.launch(0.25, 7.0)
    clock.mark(Mark.FORWARDED)
    world.launch(0.25, 1.0)
    clock.mark(Mark.SAMPLED)
    if samples:
        world.wait()
    return clock.timings()


def parts(timings: StepTimings) -> tuple[float, ...]:
    return timings.prepare_s, timings.copy_s, timings.forward_s, timings.sample_s


def test_a_host_alone_times_what_it_does() -> None:
    world = World()
    clock = StepClock(now_s=lambda: world.host_s)
    timings = step(clock, world)
    assert parts(timings) == (3.0, 0.5, 0.25, 0.25)
    assert timings.begin_s == 100.0


def test_a_device_is_timed_by_its_events() -> None:
    world = World()
    clock = StepClock(world.event, now_s=lambda: world.host_s)
    for _ in range(2):  # events are used again
        assert parts(step(clock, world)) == pytest.approx((2.0, 1.5, 7.25, 1.0))
    assert len(world.events) == 5


def test_nothing_waits_for_a_step_that_samples_nothing() -> None:
    world = World()
    clock = StepClock(world.event, now_s=lambda: world.host_s)
    assert step(clock, world, samples=False).forward_s == 0.25
    assert world.host_s < world.device_s
