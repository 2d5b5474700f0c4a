"""What it costs the router to write a streamed chat: CPU time per output event, plain and parsed.

    python benchmarks/answer_writing.py [--events 2000] [--rounds 9] [--tree FOLDER]

- plain: nothing is parsed; constant JSON and the event's text. With `--tree` the source of another checkout writes it too, in turns
  with this one: what the parsing of others costs those who want none.
- message, reasoning, call: the answer is parsed (hermes, qwen3), and all of it is message text, reasoning, or the arguments of one
  call.

Each event has one token of five characters. Printed are the least time of all rounds in microseconds, and its ratio to plain.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_core.contract import OutputEvent, Request, SamplingParams

WORD = "word "
OPENINGS = {
    "message": "",
    "reasoning": "<think>",
    "call": '<tool_call>\n{"name": "f", "arguments": {"a": "',
}


class Words:
    """A tokenizer of two tokens: an opening, and a word."""

    vocab_size = 2
    eos_token_ids = ()

    def __init__(self, opening: str) -> None:
        self._texts = (opening, WORD)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token's text."""
        return self._texts[token_id].encode()

    def is_special(self, token_id: int) -> bool:
        """No token is special."""
        return False

    def marker_id(self, text: str) -> int | None:
        """Markers are ordinary text."""
        return None


def events(opening: str, count: int) -> Iterator[OutputEvent]:
    """The opening, and `count` words, an event each."""
    texts = [opening, *[WORD] * count]
    offset = 0
    for position, text in enumerate(texts):
        token_id = int(position > 0)
        yield OutputEvent(request_id="r", position=position, token_ids=(token_id,), text=text, text_offset=offset)
        offset += len(text)


def writer_of(kind: str) -> ChatWriter:
    """A writer for one choice."""
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), seed=0)
    metadata = ResponseMetadata(id="chatcmpl-1", model="m")
    if kind == "plain":
        return ChatWriter(metadata, [request], Words(""), include_usage=True)
    from transom_cluster.openai.answer.answer_reader import AnswerReader  # another checkout may not have these
    from transom_cluster.openai.answer.chat_answer import ChatAnswer
    from transom_core.text.markup.context import AnswerContext, ToolSpec
    from transom_core.text.markup.formats import answer_format

    words = Words(OPENINGS[kind])
    context = AnswerContext(tools=(ToolSpec("f"),), parses_tools=True, parses_reasoning=True)
    parser = answer_format("hermes", "qwen3").parser(words, context)
    answer = ChatAnswer(AnswerReader(words, request.params, parser))  # type: ignore[arg-type]
    return ChatWriter(metadata, [request], words, include_usage=True, answers=[answer])


def measure(kind: str, num_events: int, rounds: int) -> float:
    """Microseconds of CPU time per event."""
    all_events = list(events(OPENINGS.get(kind, ""), num_events))
    least_s = float("inf")
    for _ in range(rounds):
        writer = writer_of(kind)
        begin_s = time.thread_time()
        for event in all_events:
            for _ in writer.chunks(0, event):
                pass
        least_s = min(least_s, time.thread_time() - begin_s)
    return least_s / len(all_events) * 1e6


def plain_of(tree: Path, args: argparse.Namespace) -> float:
    """The same of another checkout, in a process of its own."""
    paths = os.pathsep.join(str(tree / name) for name in ("cluster", "worker", "kernels"))
    command: Sequence[str] = [
        sys.executable,
        __file__,
        *("--only-plain", "--events", str(args.events), "--rounds", str(args.rounds)),
    ]
    environment = {**os.environ, "PYTHONPATH": paths}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--only-plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    plain_us = measure("plain", args.events, args.rounds)
    if args.only_plain:
        print(plain_us)
        return
    if args.tree is not None:
        turns = [(plain_of(Path(__file__).parents[1], args), plain_of(args.tree, args)) for _ in range(5)]
        here_us, there_us = (min(times) for times in zip(*turns, strict=True))
        print(f"plain, of {args.tree}: {there_us:.2f} us; here {here_us:.2f} us, {here_us / there_us:.2f} of it")
    print(f"{'plain':<12}{plain_us:8.2f} us")
    for kind in OPENINGS:
        took_us = measure(kind, args.events, args.rounds)
        print(f"{kind:<12}{took_us:8.2f} us{took_us / plain_us:8.2f}")


if __name__ == "__main__":
    main()
