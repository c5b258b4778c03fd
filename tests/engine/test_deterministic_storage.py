"""With ``deterministic``, stored data gives the same bits: blocks from stores, sessions from files, swapped sequences.

The reference is that of ``test_deterministic.py``: one pass of the uncached model over the whole text.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.sessions.state import SequenceState, load_session, save_session
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError, StorageError
from kvad.model.transformer import Transformer
from tests.engine.test_deterministic import DTYPES, differences, full_text, many_tiles
from tests.engine.test_swap import FixedChoice
from tests.support.driver import Stream, drive
from tests.support.manager_driver import unpublish_all
from tests.support.random_models import VOCAB, build, model_config

TILES = many_tiles  # a fixture, for every test here
ENGINES: dict[str, dict[str, Any]] = {
    "paged": {},
    "blocks of 8": {"block_size": 8},
    "contiguous": {"layout": "contiguous", "block_size": None},
    "many small steps": {"prefill_chunk_size": 3},
}
KINDS = {"full": ("rope", "gqa"), "windows": ("alibi", "window-mix"), "t5": ("t5", "sinks")}


def text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def cache_of(dtype: str, **change: Any) -> CacheConfig:
    given = {"dtype": dtype, "block_size": 4, "max_num_seqs": 4, "max_seq_len": 60, "prefill_chunk_size": 16} | change
    return CacheConfig(**{name: value for name, value in given.items() if value is not None})


def llm_engine(kind: str, dtype: str) -> Transformer:
    position, heads = KINDS[kind]
    return build(model_config(position, heads=heads), dtype=getattr(torch, dtype))


# ---------------------------------------------------------------- block stores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_from_disk_has_the_same_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    """The second engine uses the first one's blocks, in another batch and with other chunks."""
    model = llm_engine(kind, dtype)
    shared = text(30, 1)
    first = [Stream(shared + text(n, n), [text(6, n)]) for n in (3, 9)]
    then = [Stream(shared + text(n, 10 + n), [text(6, n)], arrives=n % 2) for n in (1, 5, 8)]
    for streams, chunk in ((first, 16), (then, 5)):
        cache = cache_of(dtype, prefill_chunk_size=chunk, prefix_cache_dir=str(tmp_path), prefix_cache_ram=1 << 20)
        run = drive(model, cache, streams, budget=40, deterministic=True)
        assert differences(model, streams, run) == 0
    assert run.hit_tokens >= 28 * len(then)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evicted_and_loaded_blocks_have_the_same_bits(dtype: str) -> None:
    model = llm_engine("full", dtype)
    prompts = [text(30, seed) for seed in range(4)] * 2
    streams = [Stream(prompt, [text(5, at)], arrives=4 * at) for at, prompt in enumerate(prompts)]
    cache = cache_of(dtype, num_blocks=26, prefix_cache_ram=1 << 20)
    run = drive(model, cache, streams, deterministic=True)
    assert differences(model, streams, run) == 0 and run.hit_tokens > 0


# ---------------------------------------------------------------- parking


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["full", "windows"])
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_swapped_sequences_have_the_same_bits(where: str, kind: str, dtype: str, tmp_path: Path) -> None:
    model = llm_engine(kind, dtype)
    streams = [Stream(text(n, n), [text(12, n)], arrives=n % 3) for n in (9, 14, 6)]
    cache = cache_of(dtype, num_blocks=14, max_seq_len=40, swap_space=1 << 20 if where == "ram" else 0)
    folder = {} if where == "ram" else {"swap_dir": tmp_path}
    run = drive(model, cache, streams, deterministic=True, cost_model=FixedChoice(True), **folder)
    assert differences(model, streams, run) == 0
    assert run.swaps is not None and (run.swaps.to_ram if where == "ram" else run.swaps.to_disk) > 0


# ---------------------------------------------------------------- sessions


def spoken(engine: Engine, tokens: list[int], most: int, **options: Any) -> tuple[int, list[int], Tensor]:
    """(request, tokens, logits [most, V]) of a greedy request, alone."""
    seen, real = [], engine.runner.execute

    def run(output: Any) -> Tensor:
        seen.append(real(output))
        return seen[-1]

    engine.runner.execute = run  # type: ignore[method-assign]
    request = engine.add_request(tokens, SamplingParams(max_tokens=most, temperature=0, ignore_eos=True), **options)
    out = []
    while not engine.idle:
        out += [piece.token_id for piece in engine.step() if piece.token_id is not None]
    engine.runner.execute = real  # type: ignore[method-assign]
    return request, out, torch.cat(seen)


def wrong_bits(model: Transformer, tokens: list[int], out: list[int], logits: Tensor) -> int:
    right = full_text(model, Stream(tokens, [out]), 0)[len(tokens) - 1 : len(tokens) - 1 + len(out)]
    assert right.shape == logits.shape
    return sum(not torch.equal(a, b) for a, b in zip(right, logits, strict=True))


def saved(engine: Engine, path: Path, tokens: list[int]) -> list[int]:
    request, out, _ = spoken(engine, tokens, 7, keep_state=True)
    state = engine.pop_state(request)
    save_session(path, state, engine.cache_fingerprint(state.regime), state.tokens, {})
    return tokens + out


def loaded(engine: Engine, path: Path) -> SequenceState:
    known = lambda regime, salt: engine.cache_fingerprint(regime, cache_salt=salt)  # noqa: E731
    return load_session(path, known, engine.kv_cache, engine.state_keeper.engine_id).state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_from_a_file_has_the_same_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    model = llm_engine(kind, dtype)
    first = Engine(model, cache_of(dtype), EngineConfig(deterministic=True))
    tokens = saved(first, tmp_path / "a", text(29, 1))
    first.close()
    for name, change in ENGINES.items():
        other = Engine(model, cache_of(dtype, **change), EngineConfig(deterministic=True))
        request, out, logits = spoken(other, tokens, 8, resume=loaded(other, tmp_path / "a"))
        assert other.metrics(request).num_cached_tokens == len(tokens) - 1, name
        assert wrong_bits(model, tokens, out, logits) == 0, name
        other.close()


def test_without_determinism_bits_differ(tmp_path: Path) -> None:
    """Chunks round differently than one pass, and the comparison detects it."""
    model = llm_engine("full", "float32")
    engine = Engine(model, cache_of("float32", prefill_chunk_size=3))
    tokens = saved(engine, tmp_path / "a", text(29, 1))
    unpublish_all(engine.kv_cache_manager)
    _, out, logits = spoken(engine, tokens, 8, resume=loaded(engine, tmp_path / "a"))
    assert wrong_bits(model, tokens, out, logits) > 0
    engine.close()
    with pytest.raises(StorageError, match="computed"):  # its bits are not those of an engine that promises them
        loaded(Engine(model, cache_of("float32"), EngineConfig(deterministic=True)), tmp_path / "a")


# ---------------------------------------------------------------- rejected


def test_token_offload_is_rejected() -> None:
    cache = cache_of("float32", overflow="offload", max_seq_len=24)
    with pytest.raises(ConfigError, match="deterministic: not supported with overflow=offload"):
        Engine(llm_engine("full", "float32"), cache, EngineConfig(deterministic=True))
