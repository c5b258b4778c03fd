"""``docs/explanation/request-and-batch.md`` names the functions that a request and a training step really call."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
import torch

import kvad
from kvad import ops
from kvad.cache.config import CacheConfig
from kvad.llm import LLM
from kvad.text import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import train_model
from tests.support.random_models import build, model_config

PACKAGE = Path(kvad.__file__).parent
PAGE = PACKAGE.parent / "docs/explanation/request-and-batch.md"
STOP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
MAX_STEP_FILES = 36  # files of kvad that a decode step enters; three choose kernels of a GPU, one draws on a CPU

Calls = dict[tuple[str, str], None]  # (file, function) in the order of first calls


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    calls: Calls = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}/"):
            calls.setdefault((file.removeprefix(f"{PACKAGE}/"), frame.f_code.co_qualname))

    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def stops(section: str) -> list[tuple[str, str]]:
    """Return the stops that a section of the page lists."""
    (text,) = (part for part in PAGE.read_text().split("\n## ")[1:] if part.startswith(section))
    return [(file, name) for file, name in STOP.findall(text)]


def assert_in_order(listed: list[tuple[str, str]], calls: Calls) -> None:
    order = {call: index for index, call in enumerate(calls)}
    missing = [stop for stop in listed if stop not in order]
    assert not missing, f"the page lists functions that are not called: {missing}"
    for before, after in pairwise(listed):
        assert order[before] < order[after], f"{after} is called before {before}"


@contextmanager
def open_llm(*, native: bool) -> Iterator[LLM]:
    letters = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz"])
    model = build(replace(model_config(), vocab_size=letters.vocab_size), dtype=torch.float32)
    with LLM(model, letters, CacheConfig(dtype="float32", max_num_seqs=2, max_seq_len=32)) as opened:
        if not native:
            opened.engine.runner.native_reason = "a test"
        yield opened


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(native=False) as opened:
        yield opened


@pytest.mark.skipif(ops.native.load().library is None, reason=ops.native.load().reason)
def test_one_call_of_the_native_kernels_replaces_the_model() -> None:
    with open_llm(native=True) as native_llm, recorded_calls() as calls:
        native_llm.generate("abc", max_tokens=2, temperature=0.7)
    stops_of_model = {("model/transformer.py", "Transformer.forward"), ("cache/device/kv_cache.py", "KVCache.open")}
    assert not stops_of_model & calls.keys()
    called = [("engine/execution/native_program.py", "NativeProgram.run"), ("ops/native/library.py", "Library.step")]
    assert_in_order(called, calls)
    assert all(f"`{name}` (`{file}`)" in PAGE.read_text() for file, name in called)


def test_the_request_passes_the_listed_stops(llm: LLM) -> None:
    with recorded_calls() as calls:
        llm.generate("abc", max_tokens=2, temperature=0.7)
    listed = stops("From a prompt to text")
    assert len(listed) > 15
    assert_in_order(listed, calls)


def test_the_page_names_every_file_of_a_decode_step(llm: LLM) -> None:
    chunks = llm.stream("abc", max_tokens=6, temperature=0.7, ignore_eos=True)
    for _ in range(3):
        next(chunks)
    with recorded_calls() as calls:
        next(chunks)
    chunks.close()
    files = {file for file, _ in calls}
    assert len(files) <= MAX_STEP_FILES, sorted(files)
    unnamed = [file for file in sorted(files) if f"`{file}`" not in PAGE.read_text()]
    assert not unnamed, f"the page does not name {unnamed}"


def test_a_training_batch_passes_the_listed_stops(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(8):
        lines = [f"{number + i} is less than {number + i + 1}." for i in range(30)]
        (corpus / f"{number}.txt").write_text("\n".join(lines))
    shape = {"hidden_size": 16, "decoder.num_layers": 1, "decoder.layer_types.L.mlp.intermediate_size": 24}
    train = {"steps": 1, "batch_size": 2, "eval_interval": 5, "save_interval": 5, "precision": "fp32"}
    settings = {"model": {"preset": "tiny", "set": shape}, "data": {"seq_len": 16}, "tokenizer": {"kind": "byte"}}
    config = RunConfig.from_dict({**settings, "train": train})
    with recorded_calls() as calls:
        train_model(config, [corpus], tmp_path / "run")
    listed = stops("From a line of text to its gradient")
    assert len(listed) > 12
    assert_in_order(listed, calls)


def test_a_wrong_order_and_an_uncalled_function_are_found() -> None:
    calls: Calls = {("a.py", "f"): None, ("b.py", "g"): None}
    assert_in_order([("a.py", "f"), ("b.py", "g")], calls)
    with pytest.raises(AssertionError, match="is called before"):
        assert_in_order([("b.py", "g"), ("a.py", "f")], calls)
    with pytest.raises(AssertionError, match="not called"):
        assert_in_order([("c.py", "h")], calls)
