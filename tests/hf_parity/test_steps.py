"""The newest step of a run is a folder that transformers reads; ``make oracle`` checks it with both versions."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.hf_parity import steps


@pytest.mark.parametrize("name", steps.CLASSES)
def test_transformers_loads_trained_models(name: str, tmp_path: Path) -> None:
    steps.check(name, tmp_path)


def test_changed_weight_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_of = steps.logits_of
    monkeypatch.setattr(steps, "logits_of", lambda model: logits_of(model) * 1.001)
    with pytest.raises(AssertionError, match="not close"):
        steps.check("llama", tmp_path)
