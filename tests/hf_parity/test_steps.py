"""The newest step of a run is a folder that transformers reads; ``make oracle`` asks both versions of it."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.hf_parity import steps


@pytest.mark.parametrize("name", steps.CLASSES)
def test_what_kvad_trains_transformers_loads(name: str, tmp_path: Path) -> None:
    steps.check(name, tmp_path)


def test_a_changed_weight_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = steps.ours
    monkeypatch.setattr(steps, "ours", lambda step: real(step) * 1.001)
    with pytest.raises(AssertionError, match="not close"):
        steps.check("llama", tmp_path)
