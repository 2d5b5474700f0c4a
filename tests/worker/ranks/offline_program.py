"""A user's program: answers, is interrupted, answers again, and never ends by itself. Lines on standard output say where it is."""

import signal
import sys

from transom_worker.llm import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": [(31 * i + 17 * j) % 1900 + 40 for j in range(40)]} for i in range(3)]
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


def main() -> None:
    """No guard against a second import by the ranks is needed: they do not run this file."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
    llm = LLM(
        sys.argv[1],
        device="cpu",
        tensor_parallel_size=2,
        steps_in_flight=2,
        kv_cache_memory_bytes="8MiB",
        num_threads=1,
    )
    first = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, SHORT, use_tqdm=False)]
    try:
        print("ready", flush=True)  # who reads it may interrupt at once
        while True:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    except KeyboardInterrupt:
        again = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, SHORT, use_tqdm=False)]
        print("same" if again == first else f"{first} became {again}", flush=True)
    while True:
        llm.generate(PROMPTS, LONG, use_tqdm=False)


main()
