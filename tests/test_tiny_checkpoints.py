"""The oracle itself: masks move the text, margins are clear, caching changes nothing."""

from pathlib import Path

import pytest

from tests.tiny_checkpoints import FULL, HybridCase, reference_logits, reference_steps, tiny_llama

CASES = [
    FULL,
    HybridCase(window=24, pattern="SF"),
    HybridCase(window=17, sinks=5, pattern="SSF"),
    HybridCase(window=17, chunk=24, pattern="SCF"),
]
MIN_MARGIN = 5e-4  # fp32 rounding moves these logits by at most 7e-5


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tie=request.param)


def prompt(length: int) -> list[int]:
    return [(131 * length + 17 * j) % 1900 + 40 for j in range(length)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_text_is_varied_and_clear(folder: Path, case: HybridCase) -> None:
    for length in (1, 17, 40, 200):
        steps = reference_steps(folder, prompt(length), 24, case)
        tokens = [token for token, _ in steps]
        assert len(set(tokens)) > len(tokens) // 2
        assert min(margin for _, margin in steps) > MIN_MARGIN
        whole = reference_logits(folder, [*prompt(length), *tokens[:-1]], case)[length - 1 :]
        assert whole.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        (HybridCase(window=24), HybridCase(window=23)),
        (HybridCase(window=24), HybridCase(window=25)),
        (HybridCase(window=24, sinks=4), HybridCase(window=24, sinks=3)),
        (HybridCase(window=24, pattern="SF"), HybridCase(window=24, pattern="FS")),
        (HybridCase(window=40), FULL),
        (HybridCase(chunk=24, pattern="CF"), HybridCase(chunk=25, pattern="CF")),
        (HybridCase(chunk=24, pattern="CF"), HybridCase(window=24, pattern="SF")),
    ],
    ids=str,
)
def test_a_wrong_mask_shows(folder: Path, case: HybridCase, mistake: HybridCase) -> None:
    right, wrong = (reference_logits(folder, prompt(100), one).log_softmax(-1) for one in (case, mistake))
    assert (right - wrong).abs().max() > 1.0
