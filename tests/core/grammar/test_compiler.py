"""The compiler's thread, its cache, and what becomes of grammars that fail or never compile."""

import itertools
import threading
from collections.abc import Iterator

import pytest

from tests.core.grammar.vocabularies import tiny, tiny_vocabulary
from transom_core.errors import Overloaded
from transom_core.grammar import CompiledGrammar, GrammarCompiler, compiler
from transom_core.grammar.compile_grammar import compile_grammar as real_compile_grammar
from transom_core.grammar.compile_queue import CompileJob, CompileQueue


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler[str]]:
    made: GrammarCompiler[str] = GrammarCompiler(tiny_vocabulary, cache_bytes=12 << 20)
    yield made
    made.close()


def take(grammars: GrammarCompiler[str], count: int) -> list[CompiledGrammar[str]]:
    ready = grammars.take_ready()
    while len(ready) < count:
        grammars.wait(60)
        ready += grammars.take_ready()
    return ready


def test_grammars_become_ready_in_order_and_equal_ones_are_compiled_once(grammars: GrammarCompiler[str]) -> None:
    assert not grammars.is_busy
    for name, text in (("a", "start: /[a-z]+/"), ("b", "start: nothing"), ("c", "start: /[a-z]+/")):
        grammars.begin(name, text)
    a, b, c = take(grammars, 3)
    assert [one.owner for one in (a, b, c)] == ["a", "b", "c"]
    assert a.matcher is not None
    assert a.error is c.error is None
    assert c.matcher is not None
    assert b.matcher is None
    assert "unknown name" in str(b.error)
    assert (grammars.num_compiled, grammars.num_cached) == (2, 1)
    assert grammars.seconds > 0
    a.matcher.consume(tiny().encode("x")[0])
    assert (a.matcher.num_consumed, c.matcher.num_consumed) == (1, 0)
    assert not grammars.is_busy


def test_resumed_output_is_replayed(grammars: GrammarCompiler[str]) -> None:
    ids = tuple(tiny().encode("ab"))
    grammars.begin("a", "start: /[a-z]+/", ids)
    grammars.begin("b", "start: /[0-9]+/", ids)
    a, b = take(grammars, 2)
    assert a.matcher is not None
    assert a.matcher.num_consumed == len(ids)
    assert "resumed_output_ids" in str(b.error)


def test_a_grammar_counts_for_what_it_takes(grammars: GrammarCompiler[str]) -> None:
    """As measured, whatever its text's length; a client's grammars push out its own, and one above its share is not kept."""
    grammars.begin("other", "start: /[x]+/", client="other")
    for number in range(5):
        grammars.begin("a", f"start: /[0-{number}]+/", num_bytes=2 << 20, client="a")
    take(grammars, 6)
    states = 1000 * len("start: /[0-4]+/")  # which its answers will add
    assert grammars.num_bytes == (1 << 20) + (2 << 20) + states + len("start: /[x]+/start: /[0-4]+/")
    grammars.begin("a", "start: /[y]+/", num_bytes=4 << 20, client="a")
    grammars.begin("other", "start: /[x]+/", client="other")
    take(grammars, 2)
    assert (grammars.num_compiled, grammars.num_cached) == (7, 1)
    assert grammars.num_bytes < 4 << 20


def test_a_client_holds_no_more_than_its_share() -> None:
    """A text waits until the client's other requests end. Another client's does not, nor one that is held already."""
    limited: GrammarCompiler[str] = GrammarCompiler(tiny_vocabulary, in_use_bytes=10 << 20)

    def begin(owner: str, text: str, client: str) -> None:
        limited.begin(owner, text, num_bytes=4 << 20, client=client)

    def hold(owner: str, text: str, client: str) -> None:
        limited.hold(owner, text, num_bytes=4 << 20, client=client)

    for owner in ("a1", "a2"):
        begin(owner, f"start: /{owner}+/", "a")
        take(limited, 1)
        hold(owner, f"start: /{owner}+/", "a")
    begin("a3", "start: /a3+/", "a")
    begin("b1", "start: /b1+/", "b")
    assert [one.owner for one in take(limited, 1)] == ["b1"]
    hold("b1", "start: /b1+/", "b")  # now each may hold half
    begin("b2", "start: /a1+/", "b")
    assert [one.owner for one in take(limited, 1)] == ["b2"]
    hold("b2", "start: /a1+/", "b")
    limited.cancel("a1")
    limited.cancel("b1")
    assert limited.is_busy  # 4 MiB of a's share of 10 MiB, but a1's text is b2's, too
    limited.cancel("b2")
    assert [one.owner for one in take(limited, 1)] == ["a3"]
    assert not limited.is_busy
    limited.close()


def test_a_grammar_that_takes_too_long_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is left alone; the grammars after it have another one, and its text fails at once from then on."""
    now, hang, entered = [0.0], threading.Event(), threading.Event()

    def compile_grammar(text: str, vocabulary: object) -> object:
        if text == "hangs":
            entered.set()
            hang.wait(60)
        return real_compile_grammar(text, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "compile_grammar", compile_grammar)
    grammars: GrammarCompiler[str] = GrammarCompiler(tiny_vocabulary, timeout_s=10, clock=lambda: now[0])
    grammars.begin("slow", "hangs")
    grammars.begin("next", 'start: "a"')
    assert entered.wait(60)
    now[0] = 10.0
    assert grammars.take_ready() == []
    now[0] = 10.1
    slow, following = take(grammars, 2)
    assert "more than 10 s" in str(slow.error)
    assert following.matcher is not None
    grammars.begin("again", "hangs")
    (again,) = take(grammars, 1)
    assert again.error is slow.error
    hang.set()
    grammars.close()
    assert not grammars.is_busy


class Gate:
    """Compiles when the test lets it, and notes the order of the texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self._entered, self._go_on = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(compiler, "compile_grammar", self._compile)

    def _compile(self, text: str, vocabulary: object) -> object:
        self.texts.append(text)
        self._entered.release()
        assert self._go_on.acquire(timeout=60)
        return real_compile_grammar(text, vocabulary)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Wait until a text is being compiled."""
        assert self._entered.acquire(timeout=60)

    def open(self, count: int) -> None:
        """Let this many texts be compiled."""
        self._go_on.release(count)


def grammar(name: str) -> str:
    return f"start: /{name}+/"


def test_clients_take_turns_and_what_no_request_wants_is_not_compiled(
    grammars: GrammarCompiler[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit's attack: many large schemas, left at once. Another client waits for the one that is being compiled, no more."""
    gate = Gate(monkeypatch)
    for name in "abcdef":
        grammars.begin(f"attacker {name}", grammar(name), client="attacker")
    gate.wait()
    for name in "cdf":
        grammars.cancel(f"attacker {name}")
    grammars.begin("victim", grammar("v"), client="victim")
    gate.open(4)
    assert [one.owner for one in take(grammars, 4)] == ["attacker a", "victim", "attacker b", "attacker e"]
    assert gate.texts == [grammar(name) for name in "avbe"]
    assert not grammars.is_busy


def test_who_has_compiled_for_long_waits_while_others_have_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a core, by CPU time: a text that took 2 s delays the client's next one by 10 s, and no other client's."""
    now_s, cpu_s, has_others = [100.0], itertools.count(), [True]
    monkeypatch.setattr(compiler, "thread_time", lambda: next(cpu_s))  # compiling takes a second, and so does a copy
    made: GrammarCompiler[str] = GrammarCompiler(
        tiny_vocabulary, clock=lambda: now_s[0], has_others=lambda: has_others[0]
    )
    for owner in ("hostile 1", "hostile 2", "other"):
        made.begin(owner, grammar(owner[-1]), client=owner[:5])
    assert [one.owner for one in take(made, 2)] == ["hostile 1", "other"]
    now_s[0] = 109.9
    made.begin("third", grammar("t"), client="third")
    assert [one.owner for one in take(made, 1)] == ["third"]
    now_s[0] = 110.1
    assert [one.owner for one in take(made, 1)] == ["hostile 2"]
    made.begin("hostile 3", grammar("3"), client="hosti")
    has_others[0], now_s[0] = False, 111.2  # no other client is left
    assert [one.owner for one in take(made, 1)] == ["hostile 3"]
    for number in "456789":  # 12 s of CPU time alone: beside others they delay the next text by a burst, not by 120 s
        made.begin(f"hostile {number}", grammar(number), client="hosti")
        take(made, 1)
    has_others[0], now_s[0] = True, 121.3
    made.begin("hostile last", grammar("l"), client="hosti")
    assert [one.owner for one in take(made, 1)] == ["hostile last"]
    made.close()


def test_a_text_that_many_want_is_compiled_once(
    grammars: GrammarCompiler[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the cache holds less than what waits, and even if the first request that wants it has ended meanwhile."""
    gate = Gate(monkeypatch)
    texts = [grammar(name) for name in "abcdefgh"]
    for turn in range(3):
        for text in texts:
            grammars.begin(f"{turn} {text}", text, client=str(turn))
    gate.wait()
    grammars.cancel(f"0 {texts[0]}")
    gate.open(len(texts))
    take(grammars, 3 * len(texts) - 1)
    assert sorted(gate.texts) == texts
    assert grammars.num_compiled == len(texts)


def test_the_texts_that_wait_are_bounded_and_each_client_has_its_share() -> None:
    queue: CompileQueue[str, int] = CompileQueue(lambda text: None, max_chars=1000)

    def add(client: str, text: str) -> None:
        queue.check_room(client, text)
        queue.add(CompileJob(owner=f"{client} {text[:2]} {len(queue)}", text=text, client=client))

    for number in range(9):
        add("attacker", f"{number}" * 100)
    add("attacker", "0" * 100)  # waits already
    add("attacker", "x" * 100)
    with pytest.raises(Overloaded, match="1,000 characters of grammars wait"):
        add("attacker", "y" * 100)
    add("victim", "v" * 500)
    with pytest.raises(Overloaded):
        add("victim", "w" * 100)
    queue.clear()
    add("victim", "w" * 1000)
    assert len(queue) == 1
    for client in ("first", "second"):  # an empty text of two clients leaves with the last of them
        queue.add(CompileJob(owner=client, text="", client=client))
    queue.cancel("first")
    queue.compiled(CompileJob(owner="second", text=""), 1)
    assert queue.next_known() is not None
    assert len(queue) == 1
