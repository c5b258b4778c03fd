"""What every family says, token by token, from a paged cache: the greedy answers and the beam searches of the goldens.

Where the oracle's own cache changes its answer (``tests/hf_parity/README.md``), its answer without one is what counts.
Where the regime of RoPE depends on the length, theirs follows the length so far and kvad's the row's limit, fixed when
it is admitted: such an answer is asked for token by token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.config.layers import DynamicScalingConfig, LongRopeScalingConfig, RopeConfig
from kvad.engine import Engine, StreamChunk
from kvad.engine.scheduling.request import SamplingParams
from tests.checkpoint.test_families import KNOWN, Read
from tests.hf_parity import checkpoint as oracle

OTHERWISE = {("5", "t5gemma")}  # its window is one wider there: tests/checkpoint/test_encoder_decoders.py
ANSWERED = [case for case in KNOWN if oracle.load(*case)[0].get("greedy") and case not in OTHERWISE]
SEARCHED = [case for case in ANSWERED if oracle.load(*case)[0]["beams"]]
NEW = 12


def engine_of(read: Read) -> Engine:
    """Blocks of 4, so that every answer crosses many; 24 slots are the longest source or text."""
    longest = max(len(read.arrays["greedy/input_ids"]), 1) + NEW
    cache = CacheConfig(
        dtype="float32", block_size=4, max_num_seqs=4, max_seq_len=longest, prefill_chunk_size=5, max_source_len=24
    )
    return Engine(read.model(), cache)


def submit(read: Read, engine: Engine, prompt: list[int], start: int | None, sampling: SamplingParams) -> int:
    if read.config.kind == "encoder-decoder":
        assert start is not None
        return engine.add_request([start], sampling, encoder_token_ids=prompt)
    return engine.add_request(prompt, sampling)


def finish(engine: Engine) -> list[StreamChunk]:
    told = []
    while not engine.idle:
        told.extend(engine.step())
    return told


def regimes_from(read: Read) -> int | None:
    """The length from which the rotary regime depends on the length."""
    stack = read.config.decoder
    assert stack is not None
    for kind in stack.layer_types.values():
        rope = kind.attention.position
        if isinstance(rope, RopeConfig) and isinstance(rope.scaling, (DynamicScalingConfig, LongRopeScalingConfig)):
            return rope.scaling.original_max_seq_len
    return None


def continues(read: Read, engine: Engine, text: list[int], prompt: int, original: int) -> int:
    """Each token of the text after the prompt, as a row that may become one longer than what it begins with; the one
    whose limit alone lies past ``original`` is another regime here than there.  How many were asked for."""
    asked = 0
    for length in range(prompt, min(len(text), read.config.max_seq_len)):
        if length != original:
            engine.add_request(text[:length], SamplingParams(max_tokens=1, temperature=0))
            assert [piece.token_id for piece in finish(engine)] == [text[length]], length
            asked += 1
    return asked


@pytest.mark.parametrize(("version", "name"), ANSWERED, ids=[f"{name}-{version}" for version, name in ANSWERED])
def test_the_greedy_answer_is_theirs(version: str, name: str, tmp_path: Path) -> None:
    read = Read(version, name, tmp_path)
    said: dict[str, Any] = read.meta["greedy"]
    expected = read.arrays["greedy/sequence" if said["cache_agrees"] else "greedy/sequence_uncached"].tolist()
    prompt, engine = read.arrays["greedy/input_ids"].tolist(), engine_of(read)
    start = said["decoder_start_token_id"]
    if (original := regimes_from(read)) is not None:
        asked = continues(read, engine, expected, len(prompt), original)
        assert asked >= 7
        return
    submit(read, engine, prompt, start, SamplingParams(max_tokens=NEW, temperature=0))
    told = [piece.token_id for piece in finish(engine) if piece.token_id is not None]
    begin = [start] if read.config.kind == "encoder-decoder" else prompt
    assert [*begin, *told] == expected


@pytest.mark.parametrize(("version", "name"), SEARCHED, ids=[f"{name}-{version}" for version, name in SEARCHED])
def test_the_four_best_of_a_search_are_theirs(version: str, name: str, tmp_path: Path) -> None:
    check_beams(Read(version, name, tmp_path))


def check_beams(read: Read) -> None:
    for number, said in enumerate(read.meta["beams"]):
        prompt, engine = read.arrays[f"beams{number}/input_ids"].tolist(), engine_of(read)
        assert said["num_beams"] == said["num_return_sequences"] == 4 and said["max_new_tokens"] == NEW
        sampling = SamplingParams(
            num_beams=4,
            n=4,
            max_tokens=NEW,
            length_penalty=said["length_penalty"],
            early_stopping=said["early_stopping"],
            stop_token_ids=(said["eos_token_id"],),
        )
        submit(read, engine, prompt, said["decoder_start_token_id"], sampling)
        told = finish(engine)
        begin = [said["decoder_start_token_id"]] if read.config.kind == "encoder-decoder" else prompt
        sequences, scores = read.arrays[f"beams{number}/sequences"], read.arrays[f"beams{number}/scores"]
        for rank, sequence in enumerate(sequences.tolist()):
            own = [piece for piece in told if piece.sample_index == rank]
            text = [*begin, *(piece.token_id for piece in own if piece.token_id is not None)]
            padding = [said["pad_token_id"] or said["eos_token_id"]] * (len(sequence) - len(text))
            assert text + padding == sequence
            assert own[-1].finish_reason == ("stop" if text[-1] == said["eos_token_id"] else "length")
        totals = [piece.cumulative_logprob for piece in told if piece.finish_reason is not None]
        torch.testing.assert_close(torch.tensor(totals), torch.from_numpy(scores), rtol=0, atol=1e-5)


def test_a_changed_answer_is_detected(tmp_path: Path) -> None:
    """One number of one matrix, a little changed: another score."""
    version, name = next(case for case in SEARCHED if case[1] == "t5")
    read = Read(version, name, tmp_path)
    read.ours["decoder.layers.1.cross_attention.v.weight"][0, 0] += 0.01
    with pytest.raises(AssertionError):
        check_beams(read)
