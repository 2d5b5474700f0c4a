"""The messages between routers and workers: requests go to a worker, output events come back.

All messages are plain data (ints, floats, strings, tuples), and `CONTRACT_VERSION` numbers their format.

All state of a running request (penalties, stop strings, detokeniser, grammar) can be rebuilt from its `Request`, so a request can
**migrate** to another worker. Example: a worker is lost after 40 tokens of an output. The router sends the request to another
worker with these 40 tokens as `resumed_output_ids`, and that worker's first output event has position 40.
"""

from transom_core.contract.adapter import Adapter
from transom_core.contract.kv_policy import (
    AdaptivePolicy,
    HeavyPolicy,
    KvPolicy,
    WindowPolicy,
    check_kv_policy,
    max_prompt_len,
    max_stream_len,
)
from transom_core.contract.logprob_table import Logprob, LogprobTable, TokenLogprobs
from transom_core.contract.output import ErrorInfo, FinishReason, KvQuality, OutputEvent, Usage
from transom_core.contract.request import CONTRACT_VERSION, PrefixSource, Request
from transom_core.contract.sampling_params import MAX_LOGPROBS, Pooling, SamplingParams
from transom_core.contract.worker import FetchSpeed, KvGroupInfo, PauseMode, WorkerInfo, WorkerLoad, WorkerMessage

__all__ = [
    "CONTRACT_VERSION", "MAX_LOGPROBS", "Adapter", "AdaptivePolicy", "ErrorInfo", "FetchSpeed", "FinishReason",
    "HeavyPolicy", "KvGroupInfo", "KvPolicy", "KvQuality", "Logprob", "LogprobTable", "OutputEvent", "PauseMode",
    "Pooling", "PrefixSource", "Request", "SamplingParams", "TokenLogprobs", "Usage", "WindowPolicy", "WorkerInfo", "WorkerLoad",
    "WorkerMessage", "check_kv_policy", "max_prompt_len", "max_stream_len",
]  # fmt: skip
