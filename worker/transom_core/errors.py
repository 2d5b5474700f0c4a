"""Every error that Transom raises on purpose, in one tree; the last column is the HTTP status code.

    TransomError
    ├── ConfigError            a setting is wrong or not supported yet      (start-up)
    ├── ModelError             a checkpoint is missing, broken or unknown   (start-up)
    ├── RequestError           the client's request is wrong                400
    │   ├── PromptTooLong      longer than the model's length               400
    │   └── RequestTooLarge    could never fit the KV pool                  400
    ├── Overloaded             queue full; try again after `retry_after_s`  503
    │   └── RateLimited        the client is over its own limit             429
    ├── RequestTimeout         the request's deadline passed                408
    ├── WorkerLost             the worker is lost; another can take over    503
    │   └── EngineDead         its step loop has ended for good             503
    ├── PoisonRequest          workers are lost wherever it runs            500
    └── StepFailed             a step raised; its requests end              500
        ├── OutOfMemory        a step needed more memory than there is      503
        └── RankLost           a rank died or hung (within a worker)        500

A message says what was given, what is allowed, and what to change. `transom_cluster.openai` maps each class to its HTTP
status code. Between processes an error travels as `contract.ErrorInfo`.
"""

from typing import Literal, get_args

LossCause = Literal[
    "exception",  # a step raised an error of Python
    "device_error",  # the device, or its driver, reported an error
    "out_of_memory",  # a step, or the kernel of the host, ran out of memory
    "crash",  # a process ended itself: a fatal signal such as SIGSEGV, or an exit code
    "hung",  # a step took longer than `step_timeout_s`
    "killed",  # a signal that a process does not send itself, such as SIGKILL
    "host_lost",  # the host, or the network to it, is gone
    "silent",  # the worker sent nothing for a while; it may still run
    "stopped",  # an orderly end
    "unknown",  # the connection broke, and nothing else is known
]
"""Why a worker lost its requests, as far as it is known."""

LOSS_CAUSES: tuple[LossCause, ...] = get_args(LossCause)


class TransomError(Exception):
    """The base class of every error that Transom raises on purpose."""


class ConfigError(TransomError):
    """A setting is out of range, contradicts another or is not supported yet."""


class ModelError(TransomError):
    """A checkpoint or tokenizer is missing, broken or of an unknown family; the message names the file and the tensor."""


class RequestError(TransomError):
    """The request is wrong. `param` is the name of the wrong field in the request's JSON body, or None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt, or prompt and max_tokens together, is longer than the model's length; the message has both numbers."""


class RequestTooLarge(RequestError):
    """The request would not fit the KV pool even if it ran alone; the message has the numbers."""


class Overloaded(TransomError):
    """The request queue is full. `retry_after_s` is a hint for the client."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(TransomError):
    """The request's deadline passed before it finished."""


class RateLimited(Overloaded):
    """The client is over its own limit of requests per minute or at once. `retry_after_s` is when it may try again."""


class WorkerLost(TransomError):
    """The worker died, starts again or is being replaced. Its requests can migrate to any worker, even to the same one once it
    runs again.

    `num_lost` is the number of requests that the worker had begun to compute when it was lost; None if it did not report that.
    """

    def __init__(self, message: str, *, loss_cause: LossCause = "unknown", num_lost: int | None = None) -> None:
        super().__init__(message)
        self.loss_cause = loss_cause
        self.num_lost = num_lost


class EngineDead(WorkerLost):
    """The engine's step loop has ended; this worker serves no more requests."""


class PoisonRequest(TransomError):
    """Several workers were lost while each computed this request; the router sends it to no other worker."""


class StepFailed(TransomError):
    """A step raised an error inside the executor; the requests that it computed end."""

    def __init__(self, message: str, *, loss_cause: LossCause = "exception") -> None:
        super().__init__(message)
        self.loss_cause = loss_cause


class OutOfMemory(StepFailed):
    """A step needed more memory than the device or the host has; the request that asked for the most ends, and no other."""

    def __init__(self, message: str, *, loss_cause: LossCause = "out_of_memory") -> None:
        super().__init__(message, loss_cause=loss_cause)


class RankLost(StepFailed):
    """A rank died, hung or lost the connection to other ranks; the executor has to start all ranks again."""

    def __init__(self, message: str | None, *, loss_cause: LossCause = "unknown") -> None:
        super().__init__(message or "A rank was lost.", loss_cause=loss_cause)
