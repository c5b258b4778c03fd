"""Stored files of every format, written once by `tests/support/golden_files.py`, are read by the current code."""

import json
import shutil
from pathlib import Path

import pytest

from kvad import LLM
from kvad.errors import KvadError
from tests.support.golden_files import PROMPT, run, scores

GOLDEN = Path(__file__).parent / "golden_files" / "formats"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text("utf-8"))


@pytest.fixture
def files(tmp_path):
    """Return a copy of the files, which a test may change."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "files", symlinks=True))


@pytest.mark.parametrize("name", ["run-hf", "run-native"])
def test_checkpoint_of_each_layout_has_its_scores(name):
    assert scores(GOLDEN / name) == pytest.approx(EXPECTED[name], abs=1e-5)


def test_adapter_has_its_scores():
    adapted = scores(GOLDEN / "run-hf", adapter=GOLDEN / "adapter")
    assert adapted == pytest.approx(EXPECTED["adapter"], abs=1e-5)
    assert adapted != pytest.approx(EXPECTED["run-hf"], abs=1e-5)


def test_summarizer_is_loaded():
    policy = "tiered(8, quantized=0, interval=8, summaries=8, ratio=4)"
    with LLM.load(GOLDEN / "run-hf", summarizer=GOLDEN / "summarizer", policy=policy, block_size=4) as llm:
        assert llm.generate(PROMPT, max_tokens=8, temperature=0).choices[0].token_ids


def test_session_continues(files):
    with LLM.load(files / "run-hf") as llm:
        session = llm.session("notes", files / "sessions")
        session.generate("", max_tokens=2, temperature=0)
        assert session.reused >= 10 and not session.missed


def test_prefix_is_found_in_its_directory(files):
    with LLM.load(files / "run-hf", prefix_cache_dir=files / "prefix-cache", block_size=4) as llm:
        assert llm.generate(PROMPT + "x", max_tokens=1, temperature=0).usage.num_cached_tokens == 12


def test_prepared_data_and_run_folder_are_read(files):
    run("data", "check", files / "run-hf", files / "prepared")
    run("train", "--resume", "--out", files / "run-native")
    assert (files / "run-native" / "checkpoints" / "step-00000004").is_dir()


def test_damaged_copy_is_rejected(files):
    session = files / "sessions" / "notes.session"
    content = bytearray(session.read_bytes())
    content[len(content) // 2] ^= 1
    session.write_bytes(bytes(content))
    with LLM.load(files / "run-hf") as llm, pytest.raises(KvadError):
        llm.session("notes", files / "sessions").generate("", max_tokens=1)
