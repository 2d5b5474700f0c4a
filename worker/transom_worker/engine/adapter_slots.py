"""`AdapterSlots`: which LoRA adapter is in which slot of the ranks' memory, and which requests wait for a slot.

- **slot**: one of `--max-loras` places for adapters in the memory of every rank.
- **user**: a request whose adapter is in a slot, until the request ends; or a trial, which only tries whether an adapter loads.
- **idle slot**: a slot without users. The adapter in it stays until another adapter needs the slot.

A user waits until its adapter's files are found and checked (on another thread), and the adapter is in a slot:

    begin    a user has come, and waits
    take     before each plan: waiting users get their slots, first come, first served; idle slots get other adapters
    remove   a user has ended, waiting or not

If every slot has users, each adapter that waits *closes* a slot, first those with the fewest users: later users of the adapter in a
closed slot wait until the earlier adapter has got a slot. So the users of a closed slot become fewer, and no adapter waits for
ever. Example with one slot: adapter A has 2 users, then B comes, then another user of A. When the 2 have ended, B gets the slot,
and when B's users have ended, A gets it back.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import NamedTuple

from transom_core.config import LoraConfig
from transom_core.contract import Adapter
from transom_core.errors import RequestError
from transom_core.model_files.adapter_files import AdapterFiles, resolve_adapter
from transom_worker.engine.running_request import RunningRequest
from transom_worker.telemetry.engine_events import AdapterStats

FIND_WAIT_S = 0.02  # the most time for which a step without anything to compute waits for an adapter's files
MAX_FINDING = 4  # adapters whose files are read at once

Trial = Future[None]
User = RunningRequest | Trial


class UserEnd(NamedTuple):
    """A user that waits no longer: it has a slot, or the error because of which it cannot have one."""

    user: User
    slot: int
    error: RequestError | None


@dataclass(slots=True)
class _Slot:
    adapter: Adapter | None = None
    num_users: int = 0
    used_at: int = 0  # a counter: when its last user came or ended


class AdapterSlots:
    """The adapters of one engine. Only the engine's thread calls the methods. `load(slot, path)` loads an adapter at all ranks."""

    def __init__(self, config: LoraConfig | None, load: Callable[[int, str], None]) -> None:
        """Without `config` there are no slots."""
        self._slots = [_Slot() for _ in range(0 if config is None else config.max_loras)]
        self._max_rank = 0 if config is None else config.max_lora_rank
        self._load_at_ranks = load
        self._waiting: dict[User, Adapter] = {}  # in the order in which they came
        self._used: dict[User, int] = {}  # user -> number of its slot
        self._finding: dict[str, Future[AdapterFiles]] = {}  # an adapter's identity -> its files
        # Those of `_finding` that have no result yet, and perhaps older ones.
        self._reading: set[Future[AdapterFiles]] = set()
        self._has_changed = False  # since the last `take`, so that a waiting user may get a slot
        self._time = 0
        self._num_loads, self._load_s = 0, 0.0

    @property
    def is_busy(self) -> bool:
        """Whether `take` may find something to do: a slot may be free for a waiting user, or an adapter's files are read."""
        if not self._waiting:
            return False
        # In this order: `_note_end` sets the second before it changes the first.
        return bool(self._reading) or self._has_changed

    def check(self, adapter: Adapter | None) -> None:
        """Raise RequestError if a request has an adapter, and this worker takes none."""
        if adapter is not None and not self._slots:
            raise RequestError("This worker takes no LoRA adapters; start it with --enable-lora.", param="model")

    def begin(self, user: User, adapter: Adapter) -> None:
        """Let a user wait for its adapter."""
        self._waiting[user] = adapter
        self._has_changed = True

    def take(self, *, may_wait: bool) -> Iterator[UserEnd]:
        """Yield the users that wait no longer. With `may_wait`, wait up to `FIND_WAIT_S` for the files of an adapter.

        Raises:
            StepFailed, RankLost: the ranks failed while an adapter was loaded.
        """
        if may_wait and self._finding and not self._has_changed:
            wait(self._finding.values(), FIND_WAIT_S, FIRST_COMPLETED)
        self._has_changed = False
        # The identities of adapters that wait for a slot, and the slots that these close.
        late, closed = set[str](), set[int]()
        numbers = self._numbers()
        for user, adapter in list(self._waiting.items()):
            number, error = numbers.get(adapter.identity), None
            if number is None:
                if adapter.identity in late or (found := self._found(adapter)) is None:
                    continue
                number = self._idle_slot()
                if number is None:
                    late.add(adapter.identity)
                    closed = self._closed(len(late))
                    continue
                error = self._load(number, adapter, found)
                numbers = self._numbers()
            elif number in closed:
                continue
            del self._waiting[user]
            if error is None:
                self._use(user, number)
            yield UserEnd(user, number, error)
        for identity in self._finding.keys() - {adapter.identity for adapter in self._waiting.values()}:
            del self._finding[identity]

    def remove(self, user: User) -> None:
        """Forget a user that has ended; one that neither waits nor has a slot is ignored."""
        if (number := self._used.pop(user, None)) is not None:
            self._time += 1
            self._slots[number].num_users -= 1
            self._slots[number].used_at = self._time
        self._waiting.pop(user, None)
        self._has_changed = True

    def reload(self) -> Iterator[UserEnd]:
        """Load the adapters that have users again, because the ranks have other weights and empty slots; yield the users for which
        that failed."""
        for number, slot in enumerate(self._slots):
            adapter, slot.adapter = slot.adapter, None
            if adapter is None or not slot.num_users:
                continue
            try:
                self._load_at_ranks(number, adapter.path)
                slot.adapter = adapter
            except RequestError as error:
                for user in [one for one, its in self._used.items() if its == number]:
                    yield UserEnd(user, number, error)

    def forget(self, error: Exception) -> None:
        """Forget all users and adapters, because the ranks are lost; trials fail with `error`."""
        for user in (*self._waiting, *self._used):
            if isinstance(user, Future) and user.set_running_or_notify_cancel():
                user.set_exception(error)
        self._slots = [_Slot() for _ in self._slots]
        self._waiting.clear()
        self._used.clear()

    def stats(self) -> AdapterStats:
        """Return how many slots there are in each state, and what loading adapters has cost since start."""
        num_used = sum(slot.num_users > 0 for slot in self._slots)
        num_free = sum(slot.adapter is None for slot in self._slots)
        num_idle = len(self._slots) - num_used - num_free
        return AdapterStats(num_used, num_idle, num_free, num_loads=self._num_loads, load_s=self._load_s)

    def _numbers(self) -> dict[str, int]:
        """Return the numbers of the slots by their adapters' identities."""
        return {slot.adapter.identity: number for number, slot in enumerate(self._slots) if slot.adapter is not None}

    def _idle_slot(self) -> int | None:
        """Return the number of the idle slot that was not used for longest, empty ones first."""
        idle = [number for number, slot in enumerate(self._slots) if not slot.num_users]
        slots = self._slots
        return min(idle, key=lambda one: (slots[one].adapter is not None, slots[one].used_at), default=None)

    def _closed(self, count: int) -> set[int]:
        """Return the numbers of the `count` slots with the fewest users."""
        return set(sorted(range(len(self._slots)), key=lambda one: (self._slots[one].num_users, one))[:count])

    def _use(self, user: User, number: int) -> None:
        self._time += 1
        self._used[user] = number
        self._slots[number].num_users += 1
        self._slots[number].used_at = self._time

    def _found(self, adapter: Adapter) -> Future[AdapterFiles] | None:
        """Return the files of an adapter, or the error of finding them; None while they are read."""
        found = self._finding.get(adapter.identity)
        if found is None and len(self._finding) < MAX_FINDING:
            found = self._finding[adapter.identity] = Future()
            self._reading.add(found)
            found.add_done_callback(self._note_end)
            # A thread of its own, since a download may take minutes, or hang.
            args = (found, adapter, self._max_rank)
            threading.Thread(target=_find, args=args, name="transom-adapter", daemon=True).start()
        return found if found is not None and found.done() else None

    def _note_end(self, found: Future[AdapterFiles]) -> None:
        self._has_changed = True
        self._reading.discard(found)

    def _load(self, number: int, adapter: Adapter, found: Future[AdapterFiles]) -> RequestError | None:
        """Load an adapter into an idle slot; return the error if that fails, which leaves the slot empty."""
        slot, begin_s = self._slots[number], time.perf_counter()
        try:
            found.result()
            slot.adapter = None
            self._load_at_ranks(number, adapter.path)
        except RequestError as error:
            failed: Future[AdapterFiles] = Future()
            failed.set_exception(error)
            self._finding[adapter.identity] = failed  # its other users need not try again
            return RequestError(f"The LoRA adapter {adapter.name!r} cannot be used: {error}", param="model")
        slot.adapter = adapter
        self._num_loads += 1
        self._load_s += time.perf_counter() - begin_s
        return None


def _find(found: Future[AdapterFiles], adapter: Adapter, max_rank: int) -> None:
    """Find an adapter's files, and check that they still have the content for which the adapter is named."""
    try:
        files = resolve_adapter(adapter.path, max_rank=max_rank)
        if files.identity() != adapter.identity:
            raise RequestError(
                f"the files in {adapter.path} have changed since it was loaded; load it again, in place."
            )
        found.set_result(files)
    except RequestError as error:
        found.set_exception(error)
    except Exception as error:  # an unexpected error ends the adapter's requests, and not the engine
        found.set_exception(RequestError(f"{adapter.path} cannot be read: {type(error).__name__}: {error}"))
