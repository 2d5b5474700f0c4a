"""Every error that Transom raises on purpose.

    TransomError
    ├── ConfigError            a setting is wrong or not supported yet      (start-up)
    ├── ModelError             a checkpoint is missing, broken or unknown   (start-up)
    ├── RequestError           the client's request is wrong                400
    │   ├── PromptTooLong      longer than the model's length               400
    │   └── RequestTooLarge    could never fit the KV pool                  400
    ├── Overloaded             queue full; try again after `retry_after_s`  503
    ├── RateLimited            this client's own limit; likewise            429
    ├── RequestTimeout         the request's deadline passed                408
    ├── WorkerLost             this worker cannot go on; another one can    503
    │   └── EngineDead         its step loop has ended for good             503
    ├── PoisonRequest          workers are lost wherever it runs            500
    └── StepFailed             a step raised; its requests cannot go on     500
        └── RankLost           a rank died or hung (within a worker)        500

Messages say what was given, what is allowed, and what to change. HTTP statuses are mapped once, by class, in
`transom_cluster.openai.errors`. Errors cross process boundaries as `contract.ErrorInfo`.
"""

from __future__ import annotations


class TransomError(Exception):
    """Root of the tree."""


class ConfigError(TransomError):
    """A setting is out of range, contradicts another or is not supported yet."""


class ModelError(TransomError):
    """A checkpoint or tokenizer is missing, broken or of an unknown family; names file and tensor."""


class RequestError(TransomError):
    """The request is wrong. `param` names the offending field, as on the wire, or is None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request_error, (type(self), str(self), self.param))


class PromptTooLong(RequestError):
    """Prompt (or prompt + max_tokens) is longer than the model's length; the message has both."""


class RequestTooLarge(RequestError):
    """The request could never fit the KV pool, even alone; the message has the numbers."""


class Overloaded(TransomError):
    """The waiting queue is full. `retry_after_s` is a hint for the client."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_overloaded, (type(self), str(self), self.retry_after_s))


class RequestTimeout(TransomError):
    """The request's deadline passed before it finished."""


class RateLimited(Overloaded):
    """A client is over its own rate or number of requests at once. `retry_after_s` is when to come back."""


class WorkerLost(TransomError):
    """The worker died, is starting again or is being replaced. Its requests can be resumed by any worker, itself included."""


class EngineDead(WorkerLost):
    """The engine's step loop has ended; no request can be served by this worker any more."""


class PoisonRequest(TransomError):
    """One worker after the other was lost while it computed this request; it is not sent to another."""


class StepFailed(TransomError):
    """A step raised inside the executor; the requests it computed cannot go on."""


class RankLost(StepFailed):
    """A rank died, hung or lost its peers; the executor has to start all ranks again."""


def _rebuild_request_error(kind: type[RequestError], message: str, param: str | None) -> RequestError:
    return kind(message, param=param)


def _rebuild_overloaded(kind: type[Overloaded], message: str, retry_after_s: float) -> Overloaded:
    return kind(message, retry_after_s=retry_after_s)
