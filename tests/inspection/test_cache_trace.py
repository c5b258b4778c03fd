"""The cache microscope: states against independent readings and hand-made ones; JSON, text, page and command."""

import json
import re
from base64 import b64encode
from collections import Counter
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cli.main import main
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.trace import trace_forward
from kvad.errors import EngineError, RequestError
from kvad.inspection import trace_report
from kvad.inspection.cache_trace import CacheTracer, trace_requests
from kvad.inspection.trace_html import trace_to_html
from kvad.inspection.trace_report import (
    STATES,
    BlockUse,
    GroupReport,
    GroupTrace,
    Reason,
    SequenceEventRecord,
    SequenceReport,
    StateChange,
    StepSpan,
    TraceReport,
    TraceStep,
    count_states,
    trace_to_json,
)
from kvad.inspection.trace_text import trace_to_text
from kvad.model_input import BlockOps
from kvad.storage.filesystem import FileSystem
from tests.support.lab_models import CONFIGS, PAIRS, write_checkpoint
from tests.support.random_models import build, model_config, pair_config

MODEL = build(model_config("rope", "pre", "gqa"))
HEADS, KV, LAYERS, SIZE = 6, 3, 2, 4
PROMPT = tuple(range(1, 31))
BRANCH = (*PROMPT[:20], 5, 6, 7)
POLICIES = (
    "full",
    "window(7)",
    "sinks(3, 9)",
    "block-window(12)",
    "heavy-hitters(16, 8)",
    "snapkv(12, 8, window=4)",
    "tova(12, 8)",
    "key-norm(12, 8)",
    "random(12, 8)",
    "tiered(8, quantized=8, summaries=4, ratio=4, interval=8)",
    "tiered(8, interval=8, num_sinks=4)",
    "offload(8, interval=8)",
    "0: full; heavy-hitters(16, 8)",
    "window(16) + block-window(8)",
)


def engine_of(policy="full", model=MODEL, **changes):
    fields = {
        "dtype": "float64",
        "block_size": SIZE,
        "max_num_seqs": 3,
        "max_seq_len": 96,
        "prefill_chunk_size": 16,
        "policy": policy,
    }
    return Engine(model, CacheConfig(**(fields | changes)))


@cache
def seen(policy="full", prompts=(PROMPT,), tokens=30, n=1, **changes):
    """(the slide, the engine that it was made on: its tensors hold what they held at the end)."""
    engine = engine_of(policy, **changes)
    return trace_requests(engine, prompts, SamplingParams(max_tokens=tokens, temperature=0, n=n)), engine


def state_of(row, layer, head, at):
    """By the changes alone."""
    line = next(one for one in row.lines if layer in one.layers and one.head in (None, head))
    now = "unwritten"
    for change in line.changes:
        if change.first <= at <= change.last:
            now = change.state
    return now


def positions_in(row, states, layer=0, head=0):
    line = next(one for one in row.lines if layer in one.layers and one.head in (None, head))
    return {at for at, sign in enumerate(line.states) if sign in [STATES[state] for state in states]}


# ---------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("policy", POLICIES)
def test_every_position_is_in_exactly_one_state(policy):
    slide, _ = seen(policy, (PROMPT, BRANCH), n=2, tokens=20)
    assert len(slide.rows) == 4
    for row in slide.rows:
        assert sum(count_states(row).values()) == LAYERS * KV * len(row.tokens) == LAYERS * KV * (row.prompt + 20)
        assert count_states(row)["unwritten"] == LAYERS * KV  # the token that was sampled last
        covered = Counter((layer, head) for line in row.lines for layer in line.layers for head in heads_of(line))
        assert covered == {(layer, head): 1 for layer in range(LAYERS) for head in range(KV)}
        for line in row.lines:
            assert "".join(STATES[state_of(row, line.layers[0], line.head, at)] for at in range(len(row.tokens))) == (
                line.states
            )
            check_changes(line, slide)


def heads_of(line):
    return range(KV) if line.head is None else [line.head]


def check_changes(line, slide):
    now = {}
    steps = [change.step for change in line.changes]
    assert steps == sorted(steps) and set(steps) <= set(range(1, len(slide.steps) + 1))
    for change in line.changes:
        assert change.first <= change.last and change.why.text and change.why.cause != "lost"
        for at in range(change.first, change.last + 1):
            assert now.get(at) != change.state, "a change that changes nothing"
            assert now.get(at) != "evicted", "nothing comes back"
            now[at] = change.state


@pytest.mark.parametrize("policy", POLICIES)
def test_watching_changes_nothing_and_ends(policy):
    slide, engine = seen(policy, (PROMPT, BRANCH), n=2, tokens=20)
    assert (
        engine.kv_cache.attention_hook is None
        and engine.kv_cache.eviction_hook is None
        and type(engine.runner).__name__ == "ModelRunner"
    )
    plain, said = engine_of(policy), []
    plain.add_request(PROMPT, SamplingParams(max_tokens=20, temperature=0))
    while not plain.idle:
        said += [piece.token_id for piece in plain.step() if piece.token_id is not None]
    assert slide.rows[0].tokens == (*PROMPT, *said)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_attention_is_counted(policy):
    """A softmax gives 1 per query and head; the blocks at the end have what is not gone."""
    slide, _ = seen(policy, (PROMPT, BRANCH), n=2, tokens=20)
    for number, row in enumerate(slide.rows):
        queries = sum(span.count for step in slide.steps for span in step.spans if span.row == number)
        for layer in row.attention_mass:
            assert len(layer) == KV and all(len(head) == len(row.tokens) for head in layer)
            assert sum(map(sum, layer)) == pytest.approx(queries * HEADS)
        for layer in range(LAYERS):
            shares = [
                share
                for block in row.blocks
                for where, share in zip(slide.groups[block.group].layers, block.share, strict=True)
                if where == layer
            ]
            assert 0 < sum(shares) <= 1 + 1e-9
            if policy == "full":
                assert sum(shares) == pytest.approx(1)


def test_attention_is_that_of_the_model_without_a_cache():
    slide, _ = seen(tokens=20)
    row = slide.rows[0]
    tokens = row.tokens[:-1]
    judge = trace_forward(MODEL, tokens, [""] * len(tokens), layers=range(LAYERS))
    for layer in range(LAYERS):
        expected = judge.layers[layer].weights.sum(1).unflatten(0, (KV, -1)).sum(1)
        got = torch.tensor(row.attention_mass[layer], dtype=torch.float64)[:, :-1]
        assert torch.allclose(got, expected, atol=1e-10)


# ---------------------------------------------------------------- by position


@pytest.mark.parametrize(
    ("policy", "sinks", "window", "grain"),
    [
        ("window(7)", 0, 7, 1),
        ("sinks(3, 9)", 3, 9, 1),
        ("block-window(12)", 0, 12, SIZE),
        ("block-window(9, 3)", 0, 9, 3),
    ],
)
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_what_a_policy_by_position_lets_go(policy, sinks, window, grain, layout):
    if layout == "contiguous" and policy == "block-window(12)":
        grain = 1
    slide, engine = seen(policy, layout=layout)
    row = slide.rows[0]
    last = len(row.tokens) - 2  # the last query
    oldest = -(-(last - window + 1) // grain) * grain
    kept = set(range(sinks)) | set(range(oldest, last + 1))
    assert positions_in(row, ["hot"]) == kept
    assert positions_in(row, ["evicted"]) == set(range(last + 1)) - kept
    held = {p for block in row.blocks for p in engine.kv_cache.positions[0][block.block].tolist()}
    assert kept <= held
    for change in row.lines[0].changes:
        if change.state == "evicted":
            at = change.first
            first = at // grain * grain + window  # the first query that does not see it
            assert change.why.cause == "window" and change.why.length == first + 1
            assert change.why.text == f"passed at step {change.step} by {slide.policy} at length {first + 1}"
            spans = slide.steps[change.step - 1].spans
            assert spans[0].start <= first < spans[0].start + spans[0].count


def test_the_layers_own_window_is_no_policy():
    slide, _ = seen("full", model=build(model_config("rope", "pre", "window-mix")))
    row = slide.rows[0]
    own = next(line for line in row.lines if 0 in line.layers)
    assert own.states == "." * 52 + "#" * 7 + "-"
    left = [change for change in own.changes if change.state == "evicted"]
    assert left[-1].why.text == "passed at step 31 by the layer's own window of 7 at length 59"
    assert next(line for line in row.lines if 1 in line.layers).states == "#" * 59 + "-"


# ---------------------------------------------------------------- by rank


def test_ranks_are_those_of_the_attention_that_was_seen():
    """Heavy hitters, worked by hand from the weights of a run of its own: what stays, what goes, score and place."""
    budget, every, recent = 16, 8, 8
    slide, _ = seen("heavy-hitters(16, 8)", tokens=20)
    steps = weights_of("heavy-hitters(16, 8)", tokens=20)
    row, told = slide.rows[0], 0
    for layer in range(LAYERS):
        for head in range(KV):
            line = next(one for one in row.lines if one.layers == (layer,) and one.head == head)
            reasons = {c.first: c.why for c in line.changes if c.state == "evicted"}
            slots, mass, length = [], {}, 0
            for weights, count in steps[layer]:
                if length > budget and length % every == 0:
                    always = [at for at in slots if at >= length - recent]
                    others = sorted((at for at in slots if at not in always), key=lambda at: (-mass[at], at))
                    kept, gone = others[: budget - len(always)], others[budget - len(always) :]
                    for place, at in enumerate(gone, budget + 1):
                        why = reasons.pop(at)
                        assert (why.cause, why.length, why.rank, why.num_candidates) == (
                            "score",
                            length,
                            place,
                            len(slots),
                        )
                        assert why.score == pytest.approx(mass[at], rel=1e-6)
                        assert why.lowest_score == pytest.approx(mass[kept[-1]], rel=1e-6)
                        assert f"score {mass[at]:.4g}, rank {place} of {len(slots)} ({place / len(slots):.0%})" in (
                            why.text
                        )
                        told += 1
                    slots = sorted([*always, *kept])
                slots += range(length, length + count)
                length += count
                got = weights[head * 2 : head * 2 + 2, :, : len(slots)].sum((0, 1)).tolist()
                for at, x in zip(slots, got, strict=True):
                    mass[at] = mass.get(at, 0.0) + x
            assert positions_in(row, ["hot"], layer, head) == set(slots)
            assert not reasons
    assert told == (48 - budget) * LAYERS * KV


def weights_of(policy, tokens):
    """By layer, of each step: (weights [H, L, S] of the one row, L)."""
    engine, steps = engine_of(policy), {layer: [] for layer in range(LAYERS)}
    engine.kv_cache.attention_hook = lambda seen: steps[seen.layer].append(
        (seen.weights[0].clone(), seen.weights.shape[2])
    )
    engine.add_request(PROMPT, SamplingParams(max_tokens=tokens, temperature=0))
    while not engine.idle:
        engine.step()
    return steps


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "(12, 8" in policy or "hitters" in policy])
def test_what_heads_keep_is_what_their_columns_say(policy):
    slide, engine = seen(policy)
    row = slide.rows[0]
    for layer, columns in engine.kv_cache.head_metadata.items():
        blocks = [b.block for b in row.blocks if layer in slide.groups[b.group].layers]
        for head in range(KV):
            held = {at for at in columns.positions[blocks, head].flatten().tolist() if at >= 0}
            assert positions_in(row, ["hot"], layer, head) == held
            assert len(held) < len(row.tokens) - 1


# ---------------------------------------------------------------- levels


def test_levels_are_where_their_blocks_are():
    policy = "tiered(8, quantized=8, summaries=4, ratio=4, interval=8)"
    slide, engine = seen(policy)
    row = slide.rows[0]
    assert row.lines[0].states == "." * 32 + "~" * 8 + "o" * 8 + "#" * 11 + "-"
    found = {"hot": set(), "quantized": set(), "summarized": set()}
    for block in row.blocks:
        group, inside = slide.groups[block.group], engine.kv_cache.positions[block.group][block.block]
        for at in inside[inside >= 0].tolist():
            found[group.state] |= {at} if group.state != "summarized" else set(range(at - 1, at + 3))  # 4 around 1.5
    assert {form: positions_in(row, [form]) for form in found} == found
    story = [c.why for c in row.lines[0].changes if c.first <= 20 <= c.last]
    assert [why.cause for why in story] == ["written", "quantized", "summarized", "dropped"]
    assert [why.length for why in story[1:]] == [32, 40, 56]
    assert story[2].text.endswith("one slot for tokens 20 to 23") and "into int8 at length 32" in story[1].text


# ---------------------------------------------------------------- several rows


def test_a_shared_prefix():
    slide, _ = seen("full", (PROMPT, BRANCH))
    first, second = slide.rows
    assert (first.num_prefix_hits, second.num_prefix_hits) == (0, 20)
    assert positions_in(second, ["shared"]) == set(range(20)) == positions_in(first, ["shared"])
    (joined,) = [c for c in first.lines[0].changes if c.state == "shared"]
    (found,) = [c for c in second.lines[0].changes if c.state == "shared"]
    assert (joined.why.cause, found.why.cause) == ("shared", "hit") and joined.step == found.step
    assert {block.rows for block in first.blocks if block.last < 20} == {2}
    assert all(block.published for block in first.blocks if block.tokens == SIZE)
    assert second.events[0].text == "admitted, 20 tokens found in the prefix cache: 20 in the pool"
    assert (found.why.source, found.why.text) == (
        "pool",
        f"found at step {found.step} in the prefix cache, in the pool",
    )


def test_samples_share_their_prompt_until_they_write():
    slide, _ = seen("full", n=2, tokens=6)
    one = slide.rows[1]
    assert one.events[0].text == "admitted, 29 tokens shared with sample 0"
    causes = [c.why.cause for c in one.lines[0].changes if c.first <= 3 <= c.last]
    assert causes[0] == "shared" and one.num_prefix_hits == 0


def test_rows_that_are_preempted_are_away():
    slide, engine = seen("full", (PROMPT, PROMPT[::-1]), tokens=30, max_num_seqs=2, num_blocks=20)
    assert engine.scheduler.stats().preemptions
    row = slide.rows[1]
    away = [c for c in row.lines[0].changes if c.state == "swapped"]
    assert away and all(c.why.cause == "preempted" for c in away)
    assert row.lines[0].states == "#" * 59 + "-" or set(row.lines[0].states) == {"=", "#", "-"}
    assert any(each.text.startswith("admitted again") for each in row.events)
    back = [c.why.cause for c in row.lines[0].changes if c.first >= 28 and c.why.cause in ("swapped-in", "recomputed")]
    assert back and set(back) == {"recomputed"}
    assert sum(count_states(row).values()) == LAYERS * KV * 60


def test_rows_that_are_parked_come_back():
    slide, engine = seen("tiered(8, interval=8)", (PROMPT, PROMPT[::-1]), tokens=30, max_num_seqs=2, num_blocks=16)
    assert engine.scheduler.stats().preemptions
    causes = {c.why.cause for row in slide.rows for line in row.lines for c in line.changes}
    assert {"swapped-out", "swapped-in", "quantized"} <= causes
    for row in slide.rows:
        assert row.lines[0].states == slide.rows[0].lines[0].states
        assert sum(count_states(row).values()) == LAYERS * KV * 60


# ---------------------------------------------------------------- beyond the pool


class Forced(SwapCostModel):
    """Rows that give way are swapped."""

    def swap_is_cheaper(self, nbytes, tokens, *, disk=False, back=False):
        return True


class Unreadable(FileSystem):
    def read(self, file, into, offset):
        raise OSError(5, "Input/output error")


def whys(row, cause):
    """{position: why} of the first layer."""
    changes = [c for c in row.lines[0].changes if c.why.cause == cause]
    return {at: change.why for change in changes for at in range(change.first, change.last + 1)}


def watched(engine, *prompts, tokens=6, **options):
    return trace_requests(engine, prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), **options)


def place(slide, name):
    (found,) = [each for each in slide.storage if each.location == name]
    return found


def lives(slide, number=0):
    return [each.text for each in slide.rows[number].events]


def test_a_hit_from_the_disk_of_a_process_that_ended(tmp_path):
    folder = str(tmp_path / "prefix-cache")
    engine = engine_of(prefix_cache_dir=folder, max_num_seqs=1)
    cold = watched(engine, PROMPT)
    assert lives(cold) == ["admitted; the block stores have no more of it (unknown)"] and not whys(
        cold.rows[0], "prefix-cache"
    )
    assert place(cold, "disk store").blocks == 8  # of the 35 tokens that were computed
    size = engine.kv_cache.block_bytes()[0]
    engine.close()
    engine = engine_of(prefix_cache_dir=folder, max_num_seqs=1)
    slide = watched(engine, PROMPT, BRANCH)
    row = slide.rows[0]
    assert row.tokens == cold.rows[0].tokens and row.num_prefix_hits == 28
    told = whys(row, "prefix-cache")
    assert set(told) == set(range(28)) and not whys(row, "hit")
    assert {(why.source, why.text) for why in told.values()} == {("disk", "read back from the disk store at step 1")}
    assert lives(slide) == [
        f"admitted, 28 tokens found in the prefix cache: 28 read back from the disk store ({7 * size:,} bytes)"
    ]
    assert set(whys(slide.rows[1], "hit")) == set(range(20))
    assert positions_in(row, ["shared"]) == set(range(28)) and set(whys(row, "written")) == set(range(28, 35))
    disk = place(slide, "disk store")
    assert (
        disk.bytes == sum(path.stat().st_size for path in (tmp_path / "prefix-cache").glob("*.kv"))
        and disk.blocks == 10
    )
    assert f"{disk.bytes:,} of {disk.limit:,} bytes in 10 blocks" in disk.text
    engine.close()


def test_a_block_that_cannot_be_read_is_named(tmp_path):
    engine = engine_of(prefix_cache_dir=str(tmp_path), max_num_seqs=1)
    watched(engine, PROMPT)
    keys = engine.block_keys(PROMPT, SamplingParams())
    engine.close()
    (third,) = tmp_path.glob(f"*{keys[2]}.kv")
    third.write_bytes(third.read_bytes()[:-3])
    engine = engine_of(prefix_cache_dir=str(tmp_path), max_num_seqs=1)
    slide = watched(engine, PROMPT)
    assert set(whys(slide.rows[0], "prefix-cache")) == set(range(8))
    assert lives(slide)[0].endswith("; the next block of it is damaged (damaged)")
    engine.close()


OTHERS = tuple(tuple(at * step % 57 + 1 for at in range(30)) for step in (3, 5, 11))


@pytest.mark.parametrize(
    ("ram", "where", "named"), [(1 << 20, "ram", "the RAM store"), (80_000, "packed", "the RAM store (compressed)")]
)
def test_a_hit_from_host_memory(ram, where, named):
    engine = engine_of(prefix_cache_ram=ram, max_num_seqs=1, num_blocks=24, max_seq_len=64)
    before = watched(engine, PROMPT, *OTHERS, tokens=20)
    kept = place(before, "RAM store")
    assert kept.bytes == engine.block_store.stats().ram.bytes and kept.limit == ram and kept.blocks > 8
    assert ("packed" in kept.text) == (where == "packed")
    slide = watched(engine, PROMPT)
    told = whys(slide.rows[0], "prefix-cache")
    assert set(told) == set(range(28)) and {why.source for why in told.values()} == {where}
    assert f"28 read back from {named}" in lives(slide)[0] and told[0].text.startswith(f"read back from {named}")
    assert slide.rows[0].tokens == before.rows[0].tokens[:36]


def parked_run(folder=None, disk=None, **fields):
    options = {} if disk is None else {"fs": disk}
    cache = CacheConfig(
        **{
            "dtype": "float64",
            "block_size": SIZE,
            "max_num_seqs": 2,
            "max_seq_len": 96,
            "prefill_chunk_size": 16,
            "num_blocks": 20,
            **fields,
        }
    )
    engine = Engine(MODEL, cache, EngineConfig(swap_dir=folder, cost_model=Forced(), **options))
    slide = watched(engine, PROMPT, PROMPT[::-1], tokens=30)
    engine.close()
    return slide, engine


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_where_a_parked_row_went_and_came_from(tmp_path, where):
    on_disk = where == "disk"
    slide, engine = parked_run(tmp_path if on_disk else None, swap_space=0 if on_disk else 1 << 20)
    row, stats = slide.rows[1], engine.preemption.stats()
    assert (stats.to_ram, stats.to_disk) == ((0, 1) if on_disk else (1, 0))
    name, size = "disk" if on_disk else "RAM", f"{stats.swapped_bytes:,} bytes"
    _, left, back = lives(slide, 1)
    length = len(whys(row, "swapped-out"))
    assert left == f"swapped out: {length} tokens, {size}, to {name}"
    assert back == f"admitted again, {length} tokens back from {name} ({size})"
    assert set(whys(row, "swapped-out")) == set(whys(row, "swapped-in")) == set(range(length))
    assert {why.source for cause in ("swapped-out", "swapped-in") for why in whys(row, cause).values()} == {where}
    assert whys(row, "swapped-in")[0].text.endswith(f", from {name}") and not whys(row, "recomputed")
    assert positions_in(row, ["swapped"]) == set()
    if on_disk:
        assert f"1 row written ({stats.swap_space.written_bytes:,} bytes), 1 read" in place(slide, "swap disk").text
    else:
        assert place(slide, "swap RAM")[:3] == ("swap RAM", 0, 1 << 20)
        assert place(slide, "swap RAM").peak == stats.swapped_bytes
        assert "1 row swapped there" in place(slide, "swap RAM").text


def test_a_parked_row_whose_copy_is_lost_is_computed_again(tmp_path):
    slide, _ = parked_run(tmp_path, Unreadable(), swap_space=0)
    told, row = lives(slide, 1), slide.rows[1]
    assert (
        told[1].startswith("swapped out: ")
        and told[1].endswith("to disk")
        and "its copy is lost:" in told[2]
        and "Input/output error" in told[2]
    )
    assert set(whys(row, "recomputed")) | set(whys(row, "hit")) >= set(whys(row, "swapped-out")) and not whys(
        row, "swapped-in"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_that_goes_on(policy):
    """In the end all is as if it had never stopped; of each token of the past it is said that it was restored."""
    if policy.startswith("offload"):
        pytest.skip("rows that spill are not kept")
    whole = watched(engine_of(policy, enable_prefix_caching=False), PROMPT, tokens=30).rows[0]
    engine, state = left_behind(policy)
    slide = watched(engine, whole.tokens[:40], tokens=20, resume=state, session="notes")
    row = slide.rows[0]
    assert row.tokens == whole.tokens and [line.states for line in row.lines] == [line.states for line in whole.lines]
    assert (row.restored, row.num_prefix_hits) == (39, 0)
    assert lives(slide) == [f"admitted, 39 tokens restored from session notes ({state.nbytes:,} bytes)"]
    for line in row.lines:
        early = [c for c in line.changes if c.first < 39 and c.step == 1]
        assert {at for c in early for at in range(c.first, min(c.last, 38) + 1)} == set(range(39))
        assert {c.why.cause for c in early} <= {"restored", "window", "score"} and {"restored"} <= {
            c.why.cause for c in early
        }
        for change in early:
            if change.why.cause == "restored":
                held = "not held by session notes any more" if change.state == "evicted" else "from session notes"
                assert held in change.why.text and change.why.source == "session"


def left_behind(policy):
    """An engine, and what a request of 30 tokens and 10 more has left in it."""
    engine = engine_of(policy, enable_prefix_caching=False)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=10, temperature=0), keep_state=True)
    while not engine.idle:
        engine.step()
    return engine, engine.pop_state(request)


def test_a_session_that_is_of_no_use_says_why():
    engine, state = left_behind("full")
    slide = watched(engine, PROMPT[::-1], resume=state, session="notes")
    assert lives(slide) == ["admitted; session notes cannot be used: tokens: the first token differs"]
    assert slide.rows[0].restored == 0 and not whys(slide.rows[0], "restored")


def test_where_things_live():
    slide, engine = seen("full", (PROMPT, BRANCH))
    (pool,) = slide.storage
    size = engine.kv_cache.block_bytes()[0]
    held = engine.kv_cache_manager.stats().used[0] + engine.kv_cache_manager.stats().evictable[0]
    assert (pool.location, pool.blocks, pool.of, pool.bytes) == (
        "pool",
        held,
        engine.kv_cache_manager.pools[0].total,
        held * size,
    )
    assert pool.peak == max(step.used[0] for step in slide.steps) * size
    assert f"{held} blocks kept for reuse" in pool.text and pool.text in trace_to_text(slide)
    slide, engine = seen("offload(8, interval=8)")
    ram = place(slide, "offload RAM")
    share = engine.kv_cache.offload_reader.plan.shares[1]
    assert ram.peak == max(step.used[1] for step in slide.steps) * share.layers * share.block_bytes > 0 == ram.bytes


def test_nothing_is_noted_where_nobody_looks():
    """The seams are off by default, and again when the microscope is put away."""
    engine = engine_of(prefix_cache_ram=1 << 20)
    for _ in range(2):
        assert engine.kv_cache_manager.prefix_offload.results is None and engine.preemption.preemption_hook is None
        watched(engine, PROMPT)
    assert engine.kv_cache_manager.prefix_offload.results is None and engine.preemption.preemption_hook is None


# ---------------------------------------------------------------- what must be named


def test_a_token_that_is_lost_is_named(monkeypatch):
    """A memory that loses a slot: no policy says why, and the microscope does not make one up."""
    honest = CacheTracer._positions

    def blind(self, number, blocks):
        found = honest(self, number, blocks)
        return found.masked_fill(found == 5, -1)

    monkeypatch.setattr(CacheTracer, "_positions", blind)
    slide, _ = seen(tokens=3)
    assert [c.why.cause for c in slide.rows[0].lines[0].changes if c.first <= 5 <= c.last] == ["lost"]


def test_what_cannot_be_examined():
    engine = engine_of()
    engine.add_request(PROMPT, SamplingParams(max_tokens=3))
    with pytest.raises(EngineError, match="the engine is busy: other requests would be in the trace"):
        trace_requests(engine, [PROMPT], SamplingParams())
    mesh = engine_of()
    mesh.kv_cache.ranks = 2
    with pytest.raises(RequestError, match="a mesh of 2 ranks cannot be traced: each has its own heads and layers"):
        trace_requests(mesh, [PROMPT], SamplingParams())
    pair = Engine(build(pair_config()), CacheConfig(dtype="float64", max_seq_len=96, max_source_len=32))
    with pytest.raises(RequestError, match="an encoder-decoder has no cache trace"):
        trace_requests(pair, [PROMPT], SamplingParams())


def test_a_failure_leaves_the_engine_unwatched(monkeypatch):
    engine = engine_of()
    monkeypatch.setattr(CacheTracer, "on_executed", lambda self, plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace_requests(engine, [PROMPT], SamplingParams(max_tokens=3))
    assert engine.kv_cache.attention_hook is None and type(engine.runner).__name__ == "ModelRunner"


# ---------------------------------------------------------------- JSON

KEYS = {
    "": {"schema", "model", "policy", "layout", "layers", "states", "groups", "steps", "rows", "storage"},
    "storage": {"location", "bytes", "limit", "blocks", "of", "peak", "text"},
    "groups": {"state", "layers", "kv_heads", "policy", "stored", "block_size", "blocks", "bytes"},
    "steps": {"step", "spans", "used"},
    "spans": {"row", "start", "count"},
    "rows": {"request", "sample", "prompt", "num_prefix_hits", "tokens", "pieces", "finish", "error", "counts", "lines"}
    | {"blocks", "attention_mass", "events", "restored"},
    "lines": {"group", "layers", "head", "states", "changes"},
    "changes": {"step", "first", "last", "state", "why"},
    "blocks": {"group", "block", "tokens", "first", "last", "rows", "published", "share"},
    "events": {"step", "text"},
}


def test_the_schema_is_as_documented():
    """Who removes or renames a key raises SCHEMA, and changes docs/explanation/kv-cache.md."""
    slide, _ = seen("heavy-hitters(16, 8)")
    told = json.loads(json.dumps(trace_to_json(slide), allow_nan=False))
    assert told["schema"] == trace_report.SCHEMA == 1 and told["states"] == STATES
    assert set(told) == KEYS[""] and set(told["rows"][0]) == KEYS["rows"]
    row, step = told["rows"][0], told["steps"][0]
    for name, each in (
        ("groups", told["groups"]),
        ("storage", told["storage"]),
        ("steps", told["steps"]),
        ("spans", step["spans"]),
    ):
        assert all(set(one) == KEYS[name] for one in each)
    for name in ("lines", "blocks", "events"):
        assert row[name] and all(set(one) == KEYS[name] for one in row[name])
    changes = [change for line in row["lines"] for change in line["changes"]]
    assert all(
        set(change) == KEYS["changes"] and {"cause", "text", "length"} <= set(change["why"]) for change in changes
    )
    ranked = next(change["why"] for change in changes if change["why"]["cause"] == "score")
    assert set(ranked) == {"cause", "text", "length", "score", "rank", "num_candidates", "lowest_score"}
    assert row["counts"] == dict(count_states(slide.rows[0])) and row["tokens"] == list(slide.rows[0].tokens)


# ---------------------------------------------------------------- text


def small(pieces=("a", "b", "c", "d", "e", "f"), states=("#..##-", "##.##-")):
    """Two heads of one layer, by hand."""
    why = Reason(
        "score", "dropped at step 2 by key-norm(3) at length 4: score -2, rank 4 of 4 (100%)", 4, -2.0, 4, 4, None
    )
    here = Reason("written", "computed at step 1", 0)
    lines = tuple(
        GroupTrace(0, (0,), head, signs, (StateChange(1, 0, 3, "hot", here), StateChange(2, 2, 2, "evicted", why)))
        for head, signs in enumerate(states)
    )
    mass = ((1.0, 0.25, 0.25, 0.25, 0.25, 0.0),) * 2
    blocks = (BlockUse(0, 2, 3, 0, 3, 1, False, (0.75,)), BlockUse(0, 5, 1, 4, 4, 2, True, (0.125,)))
    row = SequenceReport(
        0,
        0,
        4,
        0,
        (0, 1, 2, 3, 4, 5),
        tuple(pieces),
        "length",
        None,
        lines,
        blocks,
        (mass,),
        (SequenceEventRecord(1, "admitted"),),
    )
    group = GroupReport("hot", (0,), 2, "key-norm(3)", "float32", 4, 6, 1024)
    steps = (TraceStep(1, (StepSpan(0, 0, 4),), (1,)), TraceStep(2, (StepSpan(0, 4, 1),), (2,)))
    return TraceReport("m", "key-norm(3)", "paged", 1, (group,), steps, (row,))


GOLDEN = """\
m: key-norm(3), paged, 2 steps
  layer 0: key-norm(3), float32, blocks of 4, 2 of 6 used at the peak

sequence 0: 4 tokens of prompt, 2 generated, ended by length
                  0
  layer 0 head 0  #..##-
  layer 0 head 1  ##.##-
  attention       █▅▅▅▅
  # hot 58.3%   . evicted 25.0%   - unwritten 16.7%
  evicted tokens had received 18.8% of the attention
  2 blocks of layer 0, hot: █▄ 87.5% of the attention
    most: block 2, 75.0%, 3 tokens of 0 to 3, 1 sequence
  step 1: admitted
  2 evictions; the 1 with the most attention (--trace-token I shows others)
  token 2 'c', layer 0 head 0, attention 0.25: dropped at step 2 by key-norm(3) at length 4: score
      -2, rank 4 of 4 (100%)"""


def test_the_text():
    assert trace_to_text(small(), most=1) == GOLDEN


def test_a_narrow_text_says_what_a_cell_is():
    long = small(tuple("abcdef" * 10), ("#" * 30 + "." * 30,) * 2)
    row = long.rows[0]._replace(tokens=tuple(range(60)), attention_mass=(((0.5,) * 60,) * 2,))
    drawn = trace_to_text(long._replace(rows=(row,)), width=40).splitlines()
    assert "  a cell is 3 tokens and shows how most of them are" in drawn
    assert "  layer 0    " + "#" * 10 + "." * 10 in drawn  # two heads that keep the same are one line
    assert all(line == line.rstrip() for line in drawn)


def test_a_tokens_story():
    told = trace_to_text(small(), tokens=[2, 9]).splitlines()
    assert "  token 2 'c', id 2, attention 0.5" in told
    assert any("layer 0: computed at step 1; dropped at step 2 by key-norm(3)" in line for line in told)
    assert told[-1] == "  token 9: this sequence has 6 tokens"


# ---------------------------------------------------------------- the page

EVIL = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "&amp;", "\u2028", "'\"")


class Parsed(HTMLParser):
    def __init__(self, source):
        super().__init__()
        self.tags, self.data, self.now = [], {}, ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.now = f"{tag} {dict(attrs).get('id', '')}".strip()

    def handle_endtag(self, tag):
        self.now = ""

    def handle_data(self, data):
        self.data[self.now] = self.data.get(self.now, "") + data


def test_the_page_stands_alone():
    slide = small(EVIL)._replace(model="<b>m</b>")
    source = trace_to_html(slide)
    found = Parsed(source)
    digest = b64encode(sha256(found.data["script"].encode()).digest()).decode()
    text = source.replace(digest, "")  # base64 may contain anything, as //w
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp|eval\(|innerHTML|document\.write", text)
    assert Counter(tag for tag, _ in found.tags)["script"] == 2 and not {"img", "b", "link", "iframe"} & {
        tag for tag, _ in found.tags
    }
    assert not [attrs for _, attrs in found.tags if {"src", "href", "onerror", "onload"} & set(attrs)]
    assert json.loads(found.data["script data"]) == json.loads(json.dumps(trace_to_json(slide)))
    rules = next(attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in rules and f"script-src 'sha256-{digest}'" in rules and "unsafe" not in rules
    assert "prefers-color-scheme: dark" in source
    ids = set(re.findall(r'\$\("([a-z]+)"\)', found.data["script"]))
    assert ids <= {attrs.get("id") for _, attrs in found.tags}


# ---------------------------------------------------------------- the command


def run(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture
def plain(tmp_path):
    return write_checkpoint(tmp_path / "run", CONFIGS["plain"])


def test_the_command(plain, capsys, tmp_path):
    asked = [plain, "--cache", "--prompt", "the fox", "--max-tokens", 20, "--policy", "window(8)", "--block-size", 4]
    code, out, err = run(capsys, *asked)
    assert (code, err) == (0, "") and "window(8)" in out and "passed at step" in out and "\x1b" not in out
    code, out, _ = run(capsys, *asked, "--json")
    told = json.loads(out)
    assert code == 0 and told["policy"] == "window(8)" and told["rows"][0]["pieces"][0] == "t"
    html = tmp_path / "cache.html"
    code, _, err = run(capsys, *asked, "--html", html, "--trace-token", 0)
    assert code == 0 and str(html) in err and html.read_text().startswith("<!doctype html>")
    code, out, _ = run(capsys, *asked, "--out", tmp_path / "cache.json")
    assert (code, out) == (0, "") and json.loads((tmp_path / "cache.json").read_text())["rows"] == told["rows"]


def test_a_cache_that_lives_beyond_the_pool(plain, capsys, tmp_path):
    asked = [plain, "--cache", "--prompt", "the quick brown fox", "--max-tokens", 6, "--block-size", 4]
    tiered = [
        *asked,
        "--prefix-cache-dir",
        tmp_path / "tier",
        "--prefix-cache-size",
        "1MiB",
        "--prefix-cache-ram",
        "64KiB",
    ]
    assert run(capsys, *tiered)[0] == 0
    code, out, _ = run(capsys, *tiered, "--trace-token", 0)
    assert (
        code == 0 and "16 read back from the disk store (" in out and "read back from the disk store at step 1" in out
    )
    assert "    disk store: " in out and "of 1,048,576 bytes in 6 blocks" in out and "    RAM store: 0 of 65,536" in out
    html = tmp_path / "cache.html"
    code, out, _ = run(capsys, *tiered, "--json", "--html", html)
    told = json.loads(out)
    assert [each["location"] for each in told["storage"]] == ["pool", "RAM store", "disk store"]
    assert json.loads(Parsed(html.read_text()).data["script data"]) == told
    spill = ["--max-seq-len", 16, "--overflow", "offload", "--offload-ram", "1KiB", "--offload-dir", tmp_path / "spill"]
    code, out, err = run(capsys, *asked[:-2], "--max-tokens", 20, "--block-size", 4, *spill)
    assert (code, err) == (0, "") and "offload RAM: " in out and "offload disk: " in out and "s offloaded" in out
    two = ["--prompt", "fox brown the quick", "--max-tokens", 20, "--num-blocks", 16, "--swap-space", "1MiB"]
    code, out, err = run(capsys, *asked, *two)
    assert (
        (code, err) == (0, "")
        and ("swapped out: " in out or "preempted: " in out)
        and "swap RAM: 0 of 1,048,576" in out
    )


def test_a_session_is_continued_and_stays_as_it_is(plain, capsys, tmp_path, monkeypatch):
    folder = tmp_path / "sessions"
    monkeypatch.setenv("KVAD_SESSION_DIR", str(folder))
    saved = [plain, "notes", "--prompt", "the quick brown fox", "--policy", "sinks(2, 30)", "--block-size", 8]
    assert main(["session", "save", *map(str, saved)]) == 0
    before = (folder / "notes.session").read_bytes(), (folder / "notes.session").stat().st_mtime_ns
    capsys.readouterr()
    code, out, err = run(capsys, plain, "--cache", "--session", "notes", "--max-tokens", 4, "--trace-token", 3)
    assert (code, err) == (0, "") and "18 tokens restored from session notes" in out and "sinks(2, 30)" in out
    assert "restored at step 1 from session notes" in out
    code, out, _ = run(
        capsys, plain, "--cache", "--session", "notes", "--prompt", " jumps", "--max-tokens", 4, "--json"
    )
    row = json.loads(out)["rows"][0]
    assert code == 0 and (row["restored"], row["prompt"]) == (18, 19 + 6)
    assert ((folder / "notes.session").read_bytes(), (folder / "notes.session").stat().st_mtime_ns) == before
    assert [path.name for path in folder.iterdir()] == ["notes.session"]
    code, _, err = run(capsys, plain, "--cache", "--session", "other")
    assert code == 2 and "there is no session other" in err
    code, _, err = run(capsys, plain, "--cache", "--session", "notes", "--policy", "full")
    assert code == 2 and "policy: full here, sinks(2, 30) there" in err
    code, _, err = run(capsys, plain, "--cache", "--session", "notes", "--n", 2)
    assert code == 2 and "must be one sequence, got 2 samples" in err
    assert run(capsys, plain)[0] == 0  # KVAD_SESSION_DIR is no option that was given


BEYOND = {
    "--prefix-cache-dir": "folder",
    "--prefix-cache-size": "1MiB",
    "--prefix-cache-ram": "1MiB",
    "--prefix-cache-eviction": "arc",
    "--overflow": "offload",
    "--offload-dir": "folder",
    "--offload-ram": "1MiB",
    "--swap-space": "1MiB",
    "--swap-dir": "folder",
    "--num-blocks": "32",
    "--session": "notes",
    "--session-dir": "folder",
}


@pytest.mark.parametrize("flag", BEYOND)
def test_each_option_needs_cache(plain, capsys, flag):
    code, out, err = run(capsys, plain, flag, BEYOND[flag])
    assert (code, out) == (2, "") and f"{flag} needs --cache" in err


def test_prompts_of_every_kind(plain, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("the quick brown fox")
    more = ["--block-size", 4, "--max-tokens", 4, "--cache-dtype", "int8", "--layer", 1, "--head", 0]
    code, out, _ = run(capsys, plain, "--cache", "--prompt", "the quick fox", "--file", tmp_path / "prompt.txt", *more)
    assert code == 0 and "sequence 1: 19 tokens of prompt, 8 of them found in the prefix cache" in out and "int8" in out
    code, out, _ = run(capsys, plain, "--cache", "--ids", "--prompt", "1 2 3", "--n", 2, "--json", *more[:4])
    told = json.loads(out)
    assert code == 0 and [row["tokens"][:3] for row in told["rows"]] == [[1, 2, 3]] * 2


WRONG = {
    "no prompt": (["--cache"], "--cache needs something to run"),
    "no --cache": (["--policy", "window(8)"], "--policy needs --cache"),
    "no --cache, a flag": (["--block-size", "8"], "--block-size needs --cache"),
    "no --cache, a zero": (["--max-tokens", "0"], "--max-tokens needs --cache"),
    "two questions": (["--cache", "--prompt", "fox", "--tree"], "--tree and --cache exclude each other"),
    "a format": (["--cache", "--prompt", "fox", "--format", "svg"], "--format does not apply to --cache"),
    "spill": (["--cache", "--prompt", "fox", "--offload-ram", "1MiB"], "--offload-ram: nothing is offloaded"),
    "bits": (["--cache", "--prompt", "fox", "--deterministic"], "--deterministic and --cache"),
    "a folder alone": (["--cache", "--prompt", "fox", "--session-dir", "."], "--session-dir needs --session NAME"),
    "a policy": (["--cache", "--prompt", "fox", "--policy", "windw(8)"], "did you mean 'window'?"),
    "a layer": (["--cache", "--prompt", "fox", "--layer", "9"], "--layer 9 is not one of 0..1"),
    "a head": (["--cache", "--prompt", "fox", "--head", "9"], "--head 9 is not one of 0..1"),
    "a token": (["--cache", "--prompt", "fox", "--trace-token", "-1"], "--trace-token -1: must be at least 0"),
    "tokens": (["--cache", "--prompt", "fox", "--max-tokens", "-1"], "--max-tokens -1: must be at least 0"),
    "a file": (["--cache", "--file", "/nowhere/at/all"], "/nowhere/at/all: No such file"),
    "too long": (["--cache", "--prompt", "fox " * 40], "prompt: must have at most 64 tokens, got 160"),
    "ids": (["--cache", "--ids", "--prompt", "1 x"], "is not a token id"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be(plain, capsys, case):
    arguments, says = WRONG[case]
    code, out, err = run(capsys, plain, *arguments)
    assert (code, out) == (2, "") and says in err and "Traceback" not in err
    assert len(err.splitlines()) <= 2


def test_an_encoder_decoder_is_refused(tmp_path, capsys):
    code, _, err = run(capsys, write_checkpoint(tmp_path / "pair", PAIRS["pair"]), "--cache", "--prompt", "the fox")
    assert code == 2 and "--cache needs a decoder, got an encoder-decoder" in err


def test_help_tells_of_it(capsys):
    code, out, _ = run(capsys, "--help-all")
    assert code == 0 and all(
        flag in out
        for flag in (
            "--cache ",
            "--prompt",
            "--policy",
            "--html",
            "--trace-token ",
            "--prefix-cache-dir ",
            "--session ",
        )
    )


def test_a_cut_is_not_told_to_nobody():
    """The seam is off by default."""
    engine = engine_of("key-norm(12, 8)")
    assert engine.kv_cache.eviction_hook is None
    engine.kv_cache.apply(BlockOps(((),), ((),)))
