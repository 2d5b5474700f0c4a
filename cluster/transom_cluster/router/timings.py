"""`RouterTimings`: how long, in seconds, a router waits for workers, for other processes, and between retries.

One class holds all these times, so that they can be compared. No setting of `transom serve` changes them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTimings:
    """How long one router waits, in seconds. A pause doubles with each retry, from its `first_` to its `longest_` value."""

    # Drain and deadlines
    drain_s: float = 30.0  # how long running requests may continue at a worker that drains, and at a router that stops
    last_drain_s: float = 300.0  # replaces `drain_s` at the last worker that has a model
    # After a request's deadline: a worker that enforces it itself answers within this time.
    deadline_grace_s: float = 0.25

    # The request queue
    retry_s: float = 0.25  # workers that refused a request are asked again after this time
    cooldown_s: float = 1.0  # a worker that answered with `WorkerLost` gets requests only if no other worker can

    # The connection to one worker
    first_reconnect_pause_s: float = 0.05
    longest_reconnect_pause_s: float = 2.0
    silence_s: float = 20.0  # a worker sends a heartbeat every 5 s; after this time without a message it counts as lost
    presence_s: float = 20.0  # how often a router shows a worker that it is there
    call_timeout_s: float = 900.0  # a call may wait for a worker's longest step and its first kernels, 300 and 600 s
    submit_grace_s: float = 0.5  # if a call fails because the worker is lost, its stream mostly breaks within this time
    last_call_timeout_s: float = 5.0  # a worker that drains answers at once; a call to a lost host never returns

    # The directory of workers, and metrics
    directory_retry_s: float = 0.5
    scrape_timeout_s: float = 2.0  # all processes are asked at once; our Prometheus configuration waits 4 s

    # LoRA adapters
    adapters_period_s: float = 10.0  # how often routers tell each other all adapters that they know
    adapter_trial_s: float = 120.0  # for a worker to download an adapter and load it into a slot that is not in use

    # The stream of the live block map
    block_map_poll_s: float = 0.25  # how often the stream looks for new and lost workers, and for the router's shutdown
    block_map_keepalive_s: float = 5.0  # proxies close a stream that is silent for long
    first_feed_pause_s: float = 0.5  # pause before a feed opens a worker's ended stream of frames again
    longest_feed_pause_s: float = 8.0
