"""Breaks model files at random, and loads and runs what comes out, in a process with limits.

`python -m tests.worker.hostile_models FIRST_SEED COUNT FOLDER...` breaks copies of the models in the folders, one for each seed. A
copy has to be refused with one of Transom's own errors, or to answer. Each begins with a line `SEED MODEL FILE`, so that after a
crash or a limit the last line names the culprit. The last line is `refused R, answered A, failed F`, where F counts other errors.
"""

import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_BYTES = 6 << 30  # of address space; torch and compiled code take half of it before a model is loaded
CPU_LIMIT_S = 60.0  # for one copy; a busy machine must not count as a model that takes for ever
# A template that allocates is stopped at its limit, and taking the memory up to there is nearly all that the copy costs.
TEMPLATE_LIMITS = {"cpu_s": 2.0, "memory_bytes": 256 << 20}
ODD_VALUES: list[Any] = [
    *(0, -1, 1, 3, 2**31, 2**40, 10**18, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud83d", "../../etc/passwd", "x" * 100_000, None, True, [], {}, [[]], [1] * 1000, {"": None}),
]

Change = Callable[[random.Random, bytes], bytes]


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes replaced, mostly near the beginning, where headers are; or the end cut off."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        reach = len(data) if rng.random() < 0.2 else min(len(data), rng.choice([32, 512, 8192]))
        changed[rng.randrange(reach)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(changed)


def change_json(rng: random.Random, data: bytes) -> bytes:
    """One or two values anywhere in a JSON document replaced by odd ones, or removed."""
    if rng.random() < 0.1:
        return rng.choice([b"", b"[]", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", data[:-1]])
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 2])):
        _change_value(rng, value)
    return json.dumps(value).encode("ascii")


def _change_value(rng: random.Random, value: Any) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = rng.choice(list(keys)[:2000])
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            value = inner
            continue
        if rng.random() < 0.2:
            del value[key]
        else:
            value[key] = rng.choice(ODD_VALUES)
        return


def change_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Odd values in the header, whose length is right or not; or bytes."""
    if rng.random() < 0.4:
        return change_bytes(rng, data)
    (length,) = struct.unpack_from("<Q", data)
    header = change_json(rng, data[8 : 8 + length])
    told = len(header) if rng.random() < 0.8 else rng.choice([0, 2**31, 2**63, length])
    return struct.pack("<Q", told) + header + data[8 + length :]


def change_template(rng: random.Random, data: bytes) -> bytes:
    """A template that loops, allocates, recurs or does not parse."""
    return rng.choice(
        [
            b"{% set n = namespace(x='aaaa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            b"{{ 'a' * 10000000000 }}",
            b"{{ '%1000000000d' % 1 }}",
            b"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
            b"{{ ''.__class__.__mro__[1].__subclasses__() }}",
            b"{% for %}",
            b"(" * 5000,
            b"{{" + b"(" * 5000 + b"1" + b")" * 5000 + b"}}",
            data[: rng.randrange(len(data))],
        ]
    )


CHANGES: dict[str, Change] = {
    "config.json": change_json,
    "generation_config.json": change_json,
    "tokenizer_config.json": change_json,
    "tokenizer.json": change_json,
    "model.safetensors": change_safetensors,
    "chat_template.jinja": change_template,
    "model.gguf": change_bytes,
}


def break_copy(rng: random.Random, source: Path, target: Path) -> str:
    """Copy a model and change one of its files; return the file's name."""
    shutil.copytree(source, target)
    name = rng.choice([name for name in CHANGES if (target / name).exists()])
    path = target / name
    path.write_bytes(CHANGES[name](rng, path.read_bytes()))
    return name


def load_and_ask(folder: Path) -> str:
    """Load a model, tokenise a chat and generate two tokens; return what happened: refused, answered or failed."""
    from transom_core.errors import TransomError
    from transom_worker.llm import LLM, SamplingParams

    model = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
    try:
        llm = LLM(str(model), kv_cache_memory_bytes=1 << 22, max_model_len=64, log_format="json")
        with llm:
            if llm.get_tokenizer().has_chat_template:
                llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2), use_tqdm=False)
            llm.generate("hi", SamplingParams(max_tokens=2), use_tqdm=False)
    except TransomError as error:
        print(f"{type(error).__name__}: {str(error)[:200]!r}")
        return "refused"
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return "failed"
    return "answered"


def _main(sources: list[Path], first: int, count: int) -> None:
    from transom_core.text.template_renderer import TemplateRenderer

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    defaults = TemplateRenderer.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(TEMPLATE_LIMITS)
    counts = dict.fromkeys(("refused", "answered", "failed"), 0)
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "model"
            source = sources[seed % len(sources)]
            print(seed, source.name, break_copy(random.Random(seed), source, target), flush=True)
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF ends the process inside any code
            counts[load_and_ask(target)] += 1
            signal.setitimer(signal.ITIMER_PROF, 0)
    print(", ".join(f"{outcome} {number}" for outcome, number in counts.items()), flush=True)


if __name__ == "__main__":
    _main([Path(folder) for folder in sys.argv[3:]], int(sys.argv[1]), int(sys.argv[2]))
