"""The oracle itself: masks move what it computes, and a wrong guess does not."""

from pathlib import Path

import pytest

from tests.tiny_checkpoints import FULL, HybridCase, reference_greedy, reference_logits, tiny_llama

PROMPT = [17 * j % 1900 + 40 for j in range(100)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tie=request.param)


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
    right, wrong = (reference_logits(folder, PROMPT, one).log_softmax(-1) for one in (case, mistake))
    assert (right - wrong).abs().max() > 1.0


def test_a_wrong_guess_changes_no_token(folder: Path) -> None:
    tokens = reference_greedy(folder, PROMPT, 12)
    for at in (0, 5, 11):
        guess = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
        assert reference_greedy(folder, PROMPT, 12, guess=guess) == tokens
    assert reference_logits(folder, PROMPT + tokens)[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
