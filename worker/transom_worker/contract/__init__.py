"""What crosses between router and worker: requests in, output events out. Whoever speaks either side imports from here.

Everything is plain data (ints, floats, strings, tuples), versioned by `CONTRACT_VERSION`. Every stateful stage of a
request's life (penalties, stops, detokeniser, grammar) can be rebuilt from a `Request`, so that a stream can be resumed on
any worker: `resumed_output_ids` are the tokens that the client side already has, and events go on from there.
"""

from transom_worker.contract.output import ErrorInfo, FinishReason, Logprob, OutputEvent, TokenLogprobs, Usage
from transom_worker.contract.request import CONTRACT_VERSION, KvPolicy, Request
from transom_worker.contract.sampling_params import MAX_LOGPROBS, SamplingParams
from transom_worker.contract.worker import WorkerInfo, WorkerLoad, WorkerMessage

__all__ = [
    "CONTRACT_VERSION",
    "MAX_LOGPROBS",
    "ErrorInfo",
    "FinishReason",
    "KvPolicy",
    "Logprob",
    "OutputEvent",
    "Request",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
    "WorkerInfo",
    "WorkerLoad",
    "WorkerMessage",
]
