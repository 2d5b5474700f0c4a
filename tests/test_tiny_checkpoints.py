"""The oracle itself: masks move the text, margins are clear, caching changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import (
    FULL,
    HybridCase,
    load_reference,
    reference_logits,
    reference_steps,
    tiny_llama,
    visible,
)

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


def test_masks_by_hand() -> None:
    assert visible(1, 6, window=2, sinks=1).tolist() == [[True, False, False, False, True, True]]
    assert visible(2, 4, window=None, sinks=3).tolist() == [[True, True, True, False], [True] * 4]
    assert visible(3, 3, window=1, sinks=0).tolist() == torch.eye(3, dtype=torch.bool).tolist()
    assert visible(2, 4, window=None, sinks=0, chunk=3).tolist() == [[True, True, True, False], [False] * 3 + [True]]


def test_without_windows_the_masks_are_the_models_own(folder: Path) -> None:
    model = load_reference(folder)
    with torch.inference_mode():
        plain = model(torch.tensor([prompt(50)])).logits[0]
    torch.testing.assert_close(reference_logits(model, prompt(50)), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_text_is_varied_and_clear(folder: Path, case: HybridCase) -> None:
    for length in (1, 17, 40, 200):
        steps = reference_steps(folder, prompt(length), 24, case)
        tokens = [token for token, _ in steps]
        assert len(set(tokens)) > len(tokens) // 2
        assert min(margin for _, margin in steps) > MIN_MARGIN
        whole = reference_logits(folder, [*prompt(length), *tokens[:-1]], case)[length - 1 :]
        assert whole.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_guess_changes_nothing(folder: Path, case: HybridCase) -> None:
    plain = reference_steps(folder, prompt(30), 12, case)
    tokens = [token for token, _ in plain]
    for right in (0, 1, 5, 11, 12):  # as many of its tokens are right; what follows them is not
        for guess in (tokens[:right], [*tokens[:right], 7, *tokens[right + 1 :]], tokens[:right] + tokens[::-1]):
            steps = reference_steps(folder, prompt(30), 12, case, guess=guess)
            assert [token for token, _ in steps] == tokens
            assert [margin for _, margin in steps] == pytest.approx([margin for _, margin in plain], abs=1e-4)


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
