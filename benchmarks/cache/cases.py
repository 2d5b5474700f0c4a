"""The cases of the cache simulation, with vLLM 0.32's published hit shares (its default, and with dense retention)."""

from dataclasses import dataclass

GPT_OSS = "gpt-oss-20b"
GEMMA = "gemma-4-31b-like"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One replay: what, on which geometry, in how much memory."""

    model: str
    memory: str
    workload: str | None = None
    trace: str | None = None
    arrivals: str = "sequential"
    vllm_default: float | None = None
    vllm_dense: float | None = None

    @property
    def name(self) -> str:
        """Words for a table's first column."""
        overlapping = ", overlapping" if self.arrivals == "recorded" else ""
        return f"{self.workload or self.trace}, {self.model}, {self.memory}{overlapping}"


# Model and memory -> vLLM's shares
SESSIONS: dict[tuple[str, str], tuple[float | None, float | None]] = {  # that take turns
    (GEMMA, "3x"): (0.814, 0.0),
    (GEMMA, "2x"): (0.153, 0.0),
    (GEMMA, "1.5x"): (None, None),
    (GPT_OSS, "0.8x"): (0.474, None),
}
CONVERSATIONS: dict[tuple[str, str], tuple[float | None, float | None]] = {  # of conversation_a.jsonl
    (GPT_OSS, "20GiB"): (0.040, 0.040),
    (GPT_OSS, "40GiB"): (0.045, 0.047),
    (GPT_OSS, "80GiB"): (0.070, 0.070),
    (GPT_OSS, "300GiB"): (0.154, 0.237),
    (GEMMA, "80GiB"): (0.039, None),
}
RECURRENT = ("qwen3.5-27b", "nemotron-3-nano-30b-a3b", "lfm2-1.2b")
CASES = (
    *(
        Case(workload="sessions", model=model, memory=memory, vllm_default=default, vllm_dense=dense)
        for (model, memory), (default, dense) in SESSIONS.items()
    ),
    *(
        Case(workload=workload, model=model, memory=memory, arrivals=arrivals)
        for workload, arrivals in (("shuffled", "sequential"), ("poisson", "recorded"))
        for model, memory in SESSIONS
    ),
    *(
        Case(trace="conversation_a", model=model, memory=memory, vllm_default=default, vllm_dense=dense)
        for (model, memory), (default, dense) in CONVERSATIONS.items()
    ),
    Case(trace="conversation_a", model=GPT_OSS, memory="40GiB", arrivals="recorded"),
    *(Case(trace="conversation_a", model=model, memory=memory) for model in RECURRENT for memory in ("20GiB", "80GiB")),
    *(Case(workload="shuffled", model=model, memory="2x") for model in RECURRENT),
)
