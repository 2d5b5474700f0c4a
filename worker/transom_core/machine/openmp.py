"""Sets how OpenMP threads, which run torch's CPU operators, wait in the processes of workers and ranks.

Between two operators an OpenMP thread waits for its next piece of work. It *spins* (looks again and again) for a number of rounds,
and then sleeps. Waking a sleeping thread takes 35 to 100 microseconds, as long as a small operator; a thread that spins takes a
core from the router and the proxy. So the threads of a server spin for about as long as waking one takes, and sleep after that.

GNU's OpenMP library (libgomp, which comes with torch) reads its variables once, when it is loaded, so they are set for a new
process. Two facts decide whether they have an effect:

- Every thread that runs operators has OpenMP threads of its own until it ends. If there are more of these than cores, libgomp spins
  100 rounds at most, even if the variables say more. `call_on_thread` loads a model on a thread that then ends, so that only the
  thread which runs the steps has OpenMP threads.
- `GOMP_SPINCOUNT` takes precedence over `OMP_WAIT_POLICY`.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SPIN_ROUNDS = 2000  # 20 to 100 microseconds, by processor
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

T = TypeVar("T")


def wait_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how long waiting threads of a new process spin: those of `environment`, or `SPIN_ROUNDS` if it
    has none."""
    given = {name: environment[name] for name in WAIT_VARIABLES if name in environment}
    return given or {"GOMP_SPINCOUNT": str(SPIN_ROUNDS)}


def call_on_thread(function: Callable[[], T]) -> T:
    """Run `function` on a thread of its own and return its result, or raise its error, after that thread and its OpenMP threads
    have ended."""
    with ThreadPoolExecutor(1, thread_name_prefix="transom-load") as pool:
        return pool.submit(function).result()
