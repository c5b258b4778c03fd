"""The cache trace: states compared with independent readings; JSON, text, HTML page and command."""

import json
import re
from base64 import b64encode
from collections import Counter
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from itertools import product

import pytest
import torch

from kvad.benchmarks.scorers import run_engine
from kvad.cache.config import CacheConfig
from kvad.cli.main import main
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.trace import trace_forward
from kvad.errors import EngineError, RequestError
from kvad.inspection import trace_report
from kvad.inspection.cache_trace import CacheTracer, trace_requests
from kvad.inspection.trace_renderer import trace_to_html, trace_to_text
from kvad.inspection.trace_report import STATES, Reason, count_states, trace_to_json
from kvad.model_input import BlockOps
from kvad.storage.filesystem import FileSystem
from tests.support.lab_models import CONFIGS, PAIRS, write_checkpoint
from tests.support.random_models import build, model_config, pair_config

MODEL = build(model_config("rope", "pre", "gqa"))
HEADS, KV, LAYERS, SIZE = 6, 3, 2, 4
PROMPT = tuple(range(1, 31))
BRANCH = (*PROMPT[:20], 5, 6, 7)
POLICIES = (
    "full", "window(7)", "sinks(3, 9)", "block-window(12)", "heavy-hitters(16, 8)", "snapkv(12, 8, window=4)",
    "tova(12, 8)", "key-norm(12, 8)", "random(12, 8)", "tiered(8, quantized=8, summaries=4, ratio=4, interval=8)",
    "tiered(8, interval=8, num_sinks=4)", "offload(8, interval=8)", "0: full; heavy-hitters(16, 8)",
    "window(16) + block-window(8)",
)  # fmt: skip
FIELDS = {"dtype": "float64", "block_size": SIZE, "max_num_seqs": 3, "max_seq_len": 96, "prefill_chunk_size": 16}


def build_engine(policy="full", model=MODEL, **changes):
    return Engine(model, CacheConfig(**{**FIELDS, "policy": policy, **changes}))


def greedy(tokens, **more):
    return SamplingParams(max_tokens=tokens, temperature=0, **more)


@cache
def traced(policy="full", prompts=(PROMPT,), tokens=30, n=1, **changes):
    """Return the trace, and its engine, whose tensors hold the state at the end."""
    engine = build_engine(policy, **changes)
    return trace_requests(engine, prompts, greedy(tokens, n=n)), engine


def line_of(row, layer=0, head=0):
    return next(line for line in row.lines if layer in line.layers and line.head in (None, head))


def positions_in(row, states, layer=0, head=0):
    signs = [STATES[state] for state in states]
    return {at for at, sign in enumerate(line_of(row, layer, head).states) if sign in signs}


# ---------------------------------------------------------------- every policy


@pytest.mark.parametrize("policy", POLICIES)
def test_every_position_is_in_exactly_one_state(policy):
    trace, _ = traced(policy, (PROMPT, BRANCH), n=2, tokens=20)
    assert len(trace.rows) == 4
    for row in trace.rows:
        counts = count_states(row)
        assert sum(counts.values()) == LAYERS * KV * len(row.tokens) == LAYERS * KV * (row.prompt + 20)
        assert counts["unwritten"] == LAYERS * KV  # the token that was sampled last
        covered = Counter()
        for line in row.lines:
            covered.update(product(line.layers, range(KV) if line.head is None else [line.head]))
            check_changes(line, len(trace.steps))
        assert covered == dict.fromkeys(product(range(LAYERS), range(KV)), 1)


def check_changes(line, num_steps):
    """Check that the changes lead to the final states, and that each changes something."""
    states, steps = {}, [change.step for change in line.changes]
    assert steps == sorted(steps) and set(steps) <= set(range(1, num_steps + 1))
    for change in line.changes:
        assert change.first <= change.last and change.why.text and change.why.cause != "lost"
        for at in range(change.first, change.last + 1):
            assert states.get(at) not in (change.state, "evicted")
            states[at] = change.state
    assert "".join(STATES[states.get(at, "unwritten")] for at in range(len(line.states))) == line.states


@pytest.mark.parametrize("policy", POLICIES)
def test_traced_output_is_equal_and_the_hooks_are_removed(policy):
    trace, engine = traced(policy, (PROMPT, BRANCH), n=2, tokens=20)
    assert engine.kv_cache.attention_hook is None and engine.kv_cache.eviction_hook is None
    assert type(engine.runner).__name__ == "ModelRunner"
    plain = build_engine(policy)
    plain.add_request(PROMPT, greedy(20))
    assert trace.rows[0].tokens == (*PROMPT, *next(iter(run_engine(plain).values())))


@pytest.mark.parametrize("policy", POLICIES)
def test_all_attention_is_counted(policy):
    """A softmax gives 1 per query and head; blocks at the end have the share of the tokens that are left."""
    trace, _ = traced(policy, (PROMPT, BRANCH), n=2, tokens=20)
    for number, row in enumerate(trace.rows):
        queries = sum(span.count for step in trace.steps for span in step.spans if span.row == number)
        for layer in row.attention_mass:
            assert len(layer) == KV and all(len(head) == len(row.tokens) for head in layer)
            assert sum(map(sum, layer)) == pytest.approx(queries * HEADS)
        for layer in range(LAYERS):
            shares = [
                block.share[trace.groups[block.group].layers.index(layer)]
                for block in row.blocks
                if layer in trace.groups[block.group].layers
            ]
            assert 0 < sum(shares) <= 1 + 1e-9
            if policy == "full":
                assert sum(shares) == pytest.approx(1)


def test_attention_equals_that_without_a_cache():
    trace, _ = traced(tokens=20)
    row = trace.rows[0]
    tokens = row.tokens[:-1]
    reference = trace_forward(MODEL, tokens, [""] * len(tokens), layers=range(LAYERS))
    for layer in range(LAYERS):
        expected = reference.layers[layer].weights.sum(1).unflatten(0, (KV, -1)).sum(1)
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
def test_policy_by_position_evicts(policy, sinks, window, grain, layout):
    if layout == "contiguous" and policy == "block-window(12)":
        grain = 1
    trace, engine = traced(policy, layout=layout)
    row = trace.rows[0]
    last = len(row.tokens) - 2  # the last query
    oldest = -(-(last - window + 1) // grain) * grain
    visible = set(range(sinks)) | set(range(oldest, last + 1))
    assert positions_in(row, ["hot"]) == visible
    assert positions_in(row, ["evicted"]) == set(range(last + 1)) - visible
    held = {p for block in row.blocks for p in engine.kv_cache.positions[0][block.block].tolist()}
    assert visible <= held
    for change in row.lines[0].changes:
        if change.state == "evicted":
            at = change.first
            first = at // grain * grain + window  # the first query that cannot read it
            assert change.why.cause == "window" and change.why.length == first + 1
            assert change.why.text == f"passed at step {change.step} by {trace.policy} at length {first + 1}"
            spans = trace.steps[change.step - 1].spans
            assert spans[0].start <= first < spans[0].start + spans[0].count


def test_window_of_a_layer_is_not_a_policy():
    trace, _ = traced("full", model=build(model_config("rope", "pre", "window-mix")))
    row = trace.rows[0]
    own = line_of(row)
    assert own.states == "." * 52 + "#" * 7 + "-"
    left = [change for change in own.changes if change.state == "evicted"]
    assert left[-1].why.text == "passed at step 31 by the layer's own window of 7 at length 59"
    assert line_of(row, 1).states == "#" * 59 + "-"


# ---------------------------------------------------------------- by rank


def test_scores_and_ranks_by_hand():
    """Heavy hitters, computed from the attention weights of a separate run."""
    budget, interval, recent = 16, 8, 8
    trace, _ = traced("heavy-hitters(16, 8)", tokens=20)
    steps = weights_of("heavy-hitters(16, 8)", tokens=20)
    row, num_evicted = trace.rows[0], 0
    for layer, head in product(range(LAYERS), range(KV)):
        reasons = {
            change.first: change.why for change in line_of(row, layer, head).changes if change.state == "evicted"
        }
        slots, mass, length = [], {}, 0
        for weights, count in steps[layer]:
            if length > budget and length % interval == 0:
                always = [at for at in slots if at >= length - recent]
                others = sorted(set(slots) - set(always), key=lambda at: (-mass[at], at))
                stays, evicted = others[: budget - len(always)], others[budget - len(always) :]
                for rank, at in enumerate(evicted, budget + 1):
                    why = reasons.pop(at)
                    ranked = why.cause, why.length, why.rank, why.num_candidates
                    assert ranked == ("score", length, rank, len(slots))
                    assert why.score == pytest.approx(mass[at], rel=1e-6)
                    assert why.lowest_score == pytest.approx(mass[stays[-1]], rel=1e-6)
                    text = f"score {mass[at]:.4g}, rank {rank} of {len(slots)} ({rank / len(slots):.0%})"
                    assert text in why.text
                    num_evicted += 1
                slots = sorted([*always, *stays])
            slots += range(length, length + count)
            length += count
            received = weights[head * 2 : head * 2 + 2, :, : len(slots)].sum((0, 1)).tolist()
            for at, share in zip(slots, received, strict=True):
                mass[at] = mass.get(at, 0.0) + share
        assert positions_in(row, ["hot"], layer, head) == set(slots)
        assert not reasons
    assert num_evicted == (48 - budget) * LAYERS * KV


def weights_of(policy, tokens):
    """Return by layer, for each step: (weights [H, L, S] of the only sequence, L)."""
    engine, steps = build_engine(policy), {layer: [] for layer in range(LAYERS)}

    def record(trace):
        steps[trace.layer].append((trace.weights[0].clone(), trace.weights.shape[2]))

    engine.kv_cache.attention_hook = record
    engine.add_request(PROMPT, greedy(tokens))
    run_engine(engine)
    return steps


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "(12, 8" in policy or "hitters" in policy])
def test_tokens_of_heads_equal_the_cache_metadata(policy):
    trace, engine = traced(policy)
    row = trace.rows[0]
    for layer, columns in engine.kv_cache.head_metadata.items():
        blocks = [b.block for b in row.blocks if layer in trace.groups[b.group].layers]
        for head in range(KV):
            held = {at for at in columns.positions[blocks, head].flatten().tolist() if at >= 0}
            assert positions_in(row, ["hot"], layer, head) == held
            assert len(held) < len(row.tokens) - 1


# ---------------------------------------------------------------- levels


def test_states_of_a_tiered_policy_equal_its_blocks():
    policy = "tiered(8, quantized=8, summaries=4, ratio=4, interval=8)"
    trace, engine = traced(policy)
    row = trace.rows[0]
    assert row.lines[0].states == "." * 32 + "~" * 8 + "o" * 8 + "#" * 11 + "-"
    found = {"hot": set(), "quantized": set(), "summarized": set()}
    for block in row.blocks:
        group, inside = trace.groups[block.group], engine.kv_cache.positions[block.group][block.block]
        for at in inside[inside >= 0].tolist():
            found[group.state] |= {at} if group.state != "summarized" else set(range(at - 1, at + 3))  # 4 around 1.5
    assert {form: positions_in(row, [form]) for form in found} == found
    story = [c.why for c in row.lines[0].changes if c.first <= 20 <= c.last]
    assert [why.cause for why in story] == ["written", "quantized", "summarized", "dropped"]
    assert [why.length for why in story[1:]] == [32, 40, 56]
    assert story[2].text.endswith("one slot for tokens 20 to 23") and "into int8 at length 32" in story[1].text


# ---------------------------------------------------------------- several sequences


def test_shared_prefix():
    trace, _ = traced("full", (PROMPT, BRANCH))
    first, second = trace.rows
    assert (first.num_prefix_hits, second.num_prefix_hits) == (0, 20)
    assert positions_in(second, ["shared"]) == set(range(20)) == positions_in(first, ["shared"])
    (joined,) = [c for c in first.lines[0].changes if c.state == "shared"]
    (found,) = [c for c in second.lines[0].changes if c.state == "shared"]
    assert (joined.why.cause, found.why.cause) == ("shared", "hit") and joined.step == found.step
    assert {block.rows for block in first.blocks if block.last < 20} == {2}
    assert all(block.published for block in first.blocks if block.tokens == SIZE)
    assert second.events[0].text == "admitted, 20 tokens found in the prefix cache: 20 in the pool"
    assert found.why.source == "pool"
    assert found.why.text == f"found at step {found.step} in the prefix cache, in the pool"


def test_samples_share_their_prompt():
    trace, _ = traced("full", n=2, tokens=6)
    one = trace.rows[1]
    assert one.events[0].text == "admitted, 29 tokens shared with sample 0"
    causes = [c.why.cause for c in one.lines[0].changes if c.first <= 3 <= c.last]
    assert causes[0] == "shared" and one.num_prefix_hits == 0


def test_preempted_sequence_is_recomputed():
    trace, engine = traced("full", (PROMPT, PROMPT[::-1]), tokens=30, max_num_seqs=2, num_blocks=20)
    assert engine.scheduler.stats().preemptions
    row = trace.rows[1]
    away = [c for c in row.lines[0].changes if c.state == "swapped"]
    assert away and all(c.why.cause == "preempted" for c in away)
    assert row.lines[0].states == "#" * 59 + "-" or set(row.lines[0].states) == {"=", "#", "-"}
    assert any(each.text.startswith("admitted again") for each in row.events)
    back = [c.why.cause for c in row.lines[0].changes if c.first >= 28 and c.why.cause in ("swapped-in", "recomputed")]
    assert back and set(back) == {"recomputed"}
    assert sum(count_states(row).values()) == LAYERS * KV * 60


def test_lossy_sequence_is_swapped_out_and_in():
    trace, engine = traced("tiered(8, interval=8)", (PROMPT, PROMPT[::-1]), tokens=30, max_num_seqs=2, num_blocks=16)
    assert engine.scheduler.stats().preemptions
    causes = {c.why.cause for row in trace.rows for line in row.lines for c in line.changes}
    assert {"swapped-out", "swapped-in", "quantized"} <= causes
    for row in trace.rows:
        assert row.lines[0].states == trace.rows[0].lines[0].states
        assert sum(count_states(row).values()) == LAYERS * KV * 60


# ---------------------------------------------------------------- blocks and block tables


def replay_blocks(trace):
    """Yield (step, pools, tables) after each step, from the recorded changes."""
    pools = [{} for _ in trace.groups]
    tables = {(row, group): () for row in range(len(trace.rows)) for group in range(len(trace.groups))}
    for step in trace.steps:
        for block in step.pool:
            pools[block.group][block.block] = block
        for change in step.tables:
            key = change.row, change.group
            tables[key] = tables[key][: change.start] + change.entries
        yield step, [dict(pool) for pool in pools], dict(tables)


BLOCK_RUNS = {
    "full": {"prompts": (PROMPT, BRANCH)},
    "samples": {"n": 2, "tokens": 6},
    "window(7)": {"policy": "window(7)"},
    "heavy-hitters": {"policy": "heavy-hitters(16, 8)"},
    "tiered": {"policy": "tiered(8, quantized=8, summaries=4, ratio=4, interval=8)"},
    "preempted": {"prompts": (PROMPT, PROMPT[::-1]), "max_num_seqs": 2, "num_blocks": 20},
}


@pytest.mark.parametrize("case", BLOCK_RUNS)
def test_recorded_tables_and_pools_agree(case):
    """The references of a block are the tables that list it, and live blocks are those of ``used``."""
    trace, engine = traced(**BLOCK_RUNS[case])
    for step, pools, tables in replay_blocks(trace):
        live = [sum(block.references > 0 for block in pool.values()) for pool in pools]
        assert tuple(live) == step.used
        listed = Counter((group, entry[0]) for (_, group), entries in tables.items() for entry in entries)
        references = {(n, b.block): b.references for n, pool in enumerate(pools) for b in pool.values() if b.references}
        assert listed == references
        for span in step.spans:
            newest = max(entry[3] for group in range(len(trace.groups)) for entry in tables[span.row, group])
            assert newest == span.start + span.count - 1
    at_end = {(n, block): each.is_cached for n, pool in enumerate(pools) for block, each in pool.items()}
    at_end |= {(change.group, change.block): change.is_cached for change in trace.end}
    for group, pool in enumerate(engine.kv_cache_manager.pools):
        assert {block for block, node in enumerate(pool.prefixes) if node is not None} == {
            block for (number, block), is_cached in at_end.items() if number == group and is_cached
        }
    assert all(change.references == 0 for change in trace.end)


def test_table_lists_filled_slots_and_positions():
    trace, _ = traced("full", tokens=3)
    (_, _, tables) = list(replay_blocks(trace))[-1]
    entries = tables[0, 0]
    assert [entry[1:] for entry in entries] == [(4, 4 * n, 4 * n + 3) for n in range(8)]
    shared, _ = traced("full", (PROMPT, BRANCH))
    both = [tables for _, _, tables in replay_blocks(shared) if tables[0, 0] and tables[1, 0]]
    assert [entry[0] for entry in both[0][0, 0][:5]] == [entry[0] for entry in both[0][1, 0][:5]]


# ---------------------------------------------------------------- beyond the pool


class AlwaysSwap(SwapCostModel):
    """Preempted sequences are always swapped."""

    def swap_is_cheaper(self, nbytes, tokens, *, disk=False, back=False):
        return True


class UnreadableFiles(FileSystem):
    def read(self, file, into, offset):
        raise OSError(5, "Input/output error")


def reasons_of(row, cause):
    """Return position -> reason of the first layer's changes with this cause."""
    changes = [c for c in row.lines[0].changes if c.why.cause == cause]
    return {at: change.why for change in changes for at in range(change.first, change.last + 1)}


def trace_prompts(engine, *prompts, tokens=6, **options):
    return trace_requests(engine, prompts, greedy(tokens, ignore_eos=True), **options)


def storage_of(trace, name):
    (found,) = [each for each in trace.storage if each.location == name]
    return found


def events_of(trace, number=0):
    return [each.text for each in trace.rows[number].events]


def test_prefix_is_read_from_the_disk_store_of_an_earlier_engine(tmp_path):
    folder = str(tmp_path / "prefix-cache")
    engine = build_engine(prefix_cache_dir=folder, max_num_seqs=1)
    cold = trace_prompts(engine, PROMPT)
    assert events_of(cold) == ["admitted; the block stores have no more of it (unknown)"]
    assert not reasons_of(cold.rows[0], "prefix-cache")
    assert storage_of(cold, "disk store").blocks == 8  # of the 35 tokens that were computed
    size = engine.kv_cache.block_bytes()[0]
    engine.close()
    engine = build_engine(prefix_cache_dir=folder, max_num_seqs=1)
    trace = trace_prompts(engine, PROMPT, BRANCH)
    row = trace.rows[0]
    assert row.tokens == cold.rows[0].tokens and row.num_prefix_hits == 28
    reasons = reasons_of(row, "prefix-cache")
    assert set(reasons) == set(range(28)) and not reasons_of(row, "hit")
    assert {(why.source, why.text) for why in reasons.values()} == {("disk", "read back from the disk store at step 1")}
    assert events_of(trace) == [
        f"admitted, 28 tokens found in the prefix cache: 28 read back from the disk store ({7 * size:,} bytes)"
    ]
    assert set(reasons_of(trace.rows[1], "hit")) == set(range(20))
    assert positions_in(row, ["shared"]) == set(range(28)) and set(reasons_of(row, "written")) == set(range(28, 35))
    disk = storage_of(trace, "disk store")
    assert disk.bytes == sum(path.stat().st_size for path in (tmp_path / "prefix-cache").glob("*.kv"))
    assert disk.blocks == 10
    assert f"{disk.bytes:,} of {disk.limit:,} bytes in 10 blocks" in disk.text
    engine.close()


def test_damaged_block_is_named(tmp_path):
    engine = build_engine(prefix_cache_dir=str(tmp_path), max_num_seqs=1)
    trace_prompts(engine, PROMPT)
    keys = engine.block_keys(PROMPT)
    engine.close()
    (third,) = tmp_path.glob(f"*{keys[2]}.kv")
    third.write_bytes(third.read_bytes()[:-3])
    engine = build_engine(prefix_cache_dir=str(tmp_path), max_num_seqs=1)
    trace = trace_prompts(engine, PROMPT)
    assert set(reasons_of(trace.rows[0], "prefix-cache")) == set(range(8))
    assert events_of(trace)[0].endswith("; the next block of it is damaged (damaged)")
    engine.close()


OTHERS = tuple(tuple(at * step % 57 + 1 for at in range(30)) for step in (3, 5, 11))


@pytest.mark.parametrize(
    ("ram", "where", "named"), [(1 << 20, "ram", "the RAM store"), (80_000, "packed", "the RAM store (compressed)")]
)
def test_prefix_is_read_from_the_ram_store(ram, where, named):
    engine = build_engine(prefix_cache_ram=ram, max_num_seqs=1, num_blocks=24, max_seq_len=64)
    before = trace_prompts(engine, PROMPT, *OTHERS, tokens=20)
    store = storage_of(before, "RAM store")
    assert store.bytes == engine.block_store.stats().ram.bytes and store.limit == ram and store.blocks > 8
    assert ("packed" in store.text) == (where == "packed")
    trace = trace_prompts(engine, PROMPT)
    reasons = reasons_of(trace.rows[0], "prefix-cache")
    assert set(reasons) == set(range(28)) and {why.source for why in reasons.values()} == {where}
    assert f"28 read back from {named}" in events_of(trace)[0] and reasons[0].text.startswith(f"read back from {named}")
    assert trace.rows[0].tokens == before.rows[0].tokens[:36]


def trace_swap(swap_dir=None, swap_space=0, **options):
    fields = {**FIELDS, "max_num_seqs": 2, "num_blocks": 20, "swap_space": swap_space}
    engine_config = EngineConfig(swap_dir=swap_dir, cost_model=AlwaysSwap(), **options)
    engine = Engine(MODEL, CacheConfig(**fields), engine_config)
    trace = trace_prompts(engine, PROMPT, PROMPT[::-1], tokens=30)
    engine.close()
    return trace, engine


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_swapped_sequence_names_its_location(tmp_path, where):
    on_disk = where == "disk"
    trace, engine = trace_swap(tmp_path if on_disk else None, 0 if on_disk else 1 << 20)
    row, stats = trace.rows[1], engine.preemption.stats()
    assert (stats.to_ram, stats.to_disk) == ((0, 1) if on_disk else (1, 0))
    name, size = "disk" if on_disk else "RAM", f"{stats.swapped_bytes:,} bytes"
    _, left, back = events_of(trace, 1)
    length = len(reasons_of(row, "swapped-out"))
    assert left == f"swapped out: {length} tokens, {size}, to {name}"
    assert back == f"admitted again, {length} tokens back from {name} ({size})"
    assert set(reasons_of(row, "swapped-out")) == set(reasons_of(row, "swapped-in")) == set(range(length))
    assert {why.source for cause in ("swapped-out", "swapped-in") for why in reasons_of(row, cause).values()} == {where}
    assert reasons_of(row, "swapped-in")[0].text.endswith(f", from {name}") and not reasons_of(row, "recomputed")
    assert positions_in(row, ["swapped"]) == set()
    if on_disk:
        assert (
            f"1 row written ({stats.swap_space.written_bytes:,} bytes), 1 read" in storage_of(trace, "swap disk").text
        )
    else:
        assert storage_of(trace, "swap RAM")[:3] == ("swap RAM", 0, 1 << 20)
        assert storage_of(trace, "swap RAM").peak == stats.swapped_bytes
        assert "1 row swapped there" in storage_of(trace, "swap RAM").text


def test_sequence_with_a_lost_copy_is_recomputed(tmp_path):
    trace, _ = trace_swap(tmp_path, fs=UnreadableFiles())
    events, row = events_of(trace, 1), trace.rows[1]
    assert events[1].startswith("swapped out: ") and events[1].endswith("to disk")
    assert "its copy is lost:" in events[2] and "Input/output error" in events[2]
    assert {*reasons_of(row, "recomputed"), *reasons_of(row, "hit")} >= set(reasons_of(row, "swapped-out"))
    assert not reasons_of(row, "swapped-in")


@pytest.mark.parametrize("policy", POLICIES)
def test_resumed_session_ends_in_the_same_states(policy):
    """Every earlier token is reported as restored."""
    if policy.startswith("offload"):
        pytest.skip("sessions are unavailable with token offload")
    whole = trace_prompts(build_engine(policy, enable_prefix_caching=False), PROMPT, tokens=30).rows[0]
    engine, state = finished_state(policy)
    trace = trace_prompts(engine, whole.tokens[:40], tokens=20, resume=state, session="notes")
    row = trace.rows[0]
    assert row.tokens == whole.tokens and [line.states for line in row.lines] == [line.states for line in whole.lines]
    assert (row.restored, row.num_prefix_hits) == (39, 0)
    assert events_of(trace) == [f"admitted, 39 tokens restored from session notes ({state.nbytes:,} bytes)"]
    for line in row.lines:
        early = [c for c in line.changes if c.first < 39 and c.step == 1]
        assert {at for c in early for at in range(c.first, min(c.last, 38) + 1)} == set(range(39))
        assert {"restored"} <= {c.why.cause for c in early} <= {"restored", "window", "score"}
        for change in early:
            if change.why.cause == "restored":
                held = "not held by session notes any more" if change.state == "evicted" else "from session notes"
                assert held in change.why.text and change.why.source == "session"


def finished_state(policy):
    """Return an engine, and the state of a finished request of 30 tokens and 10 more."""
    engine = build_engine(policy, enable_prefix_caching=False)
    request = engine.add_request(PROMPT, greedy(10), keep_state=True)
    run_engine(engine)
    return engine, engine.pop_state(request)


def test_session_of_another_text_is_not_used():
    engine, state = finished_state("full")
    trace = trace_prompts(engine, PROMPT[::-1], resume=state, session="notes")
    assert events_of(trace) == ["admitted; session notes cannot be used: tokens: the first token differs"]
    assert trace.rows[0].restored == 0 and not reasons_of(trace.rows[0], "restored")


def test_storage_sizes():
    trace, engine = traced("full", (PROMPT, BRANCH))
    (pool,) = trace.storage
    size = engine.kv_cache.block_bytes()[0]
    held = engine.kv_cache_manager.stats().used[0] + engine.kv_cache_manager.stats().evictable[0]
    total = engine.kv_cache_manager.pools[0].total
    assert (pool.location, pool.blocks, pool.of, pool.bytes) == ("pool", held, total, held * size)
    assert pool.peak == max(step.used[0] for step in trace.steps) * size
    assert f"{held} blocks kept for reuse" in pool.text and pool.text in trace_to_text(trace)
    trace, engine = traced("offload(8, interval=8)")
    ram = storage_of(trace, "offload RAM")
    share = engine.kv_cache.offload_reader.plan.shares[1]
    assert ram.peak == max(step.used[1] for step in trace.steps) * share.layers * share.block_bytes > 0 == ram.bytes


def test_hooks_are_off_outside_a_trace():
    engine = build_engine(prefix_cache_ram=1 << 20)
    assert engine.kv_cache_manager.prefix_offload.results is None and engine.preemption.preemption_hook is None
    trace_prompts(engine, PROMPT)
    assert engine.kv_cache_manager.prefix_offload.results is None and engine.preemption.preemption_hook is None
    engine = build_engine("key-norm(12, 8)")
    assert engine.kv_cache.eviction_hook is None
    engine.kv_cache.apply(BlockOps(((),), ((),)))


# ---------------------------------------------------------------- errors


def test_lost_token_has_no_other_reason(monkeypatch):
    read_positions = CacheTracer._positions

    def without_position_5(self, number, blocks):
        positions = read_positions(self, number, blocks)
        return positions.masked_fill(positions == 5, -1)

    monkeypatch.setattr(CacheTracer, "_positions", without_position_5)
    trace, _ = traced(tokens=3)
    assert [c.why.cause for c in trace.rows[0].lines[0].changes if c.first <= 5 <= c.last] == ["lost"]


def test_impossible_traces_are_refused():
    engine = build_engine()
    engine.add_request(PROMPT, SamplingParams(max_tokens=3))
    with pytest.raises(EngineError, match="the engine is busy: other requests would be in the trace"):
        trace_requests(engine, [PROMPT], SamplingParams())
    mesh = build_engine()
    mesh.kv_cache.ranks = 2
    with pytest.raises(RequestError, match="a mesh of 2 ranks cannot be traced: each has its own heads and layers"):
        trace_requests(mesh, [PROMPT], SamplingParams())
    pair = Engine(build(pair_config()), CacheConfig(dtype="float64", max_seq_len=96, max_source_len=32))
    with pytest.raises(RequestError, match="an encoder-decoder has no cache trace"):
        trace_requests(pair, [PROMPT], SamplingParams())


def test_failed_trace_removes_its_hooks(monkeypatch):
    engine = build_engine()
    monkeypatch.setattr(CacheTracer, "on_executed", lambda self, plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace_requests(engine, [PROMPT], SamplingParams(max_tokens=3))
    assert engine.kv_cache.attention_hook is None and type(engine.runner).__name__ == "ModelRunner"


# ---------------------------------------------------------------- JSON

KEYS = {
    "": {"schema", "model", "policy", "layout", "layers", "states", "groups", "steps", "rows", "storage"} | {"end"},
    "storage": {"location", "bytes", "limit", "blocks", "of", "peak", "text"},
    "groups": {"state", "layers", "kv_heads", "policy", "stored", "block_size", "blocks", "bytes"},
    "steps": {"step", "spans", "used", "pool", "tables"},
    "pool": {"group", "block", "references", "is_cached"},
    "tables": {"row", "group", "start", "entries"},
    "spans": {"row", "start", "count"},
    "rows": {"request", "sample", "prompt", "num_prefix_hits", "tokens", "pieces", "finish", "error", "counts", "lines"}
    | {"blocks", "attention_mass", "events", "restored"},
    "lines": {"group", "layers", "head", "states", "changes"},
    "changes": {"step", "first", "last", "state", "why"},
    "blocks": {"group", "block", "tokens", "first", "last", "rows", "published", "share"},
    "events": {"step", "text"},
}


def test_json_has_the_documented_keys():
    """A removed or renamed key needs a new SCHEMA and a change of docs/explanation/kv-cache.md."""
    trace, _ = traced("heavy-hitters(16, 8)")
    plain = json.loads(json.dumps(trace_to_json(trace), allow_nan=False))
    assert plain["schema"] == trace_report.SCHEMA == 1 and plain["states"] == STATES
    assert set(plain) == KEYS[""] and set(plain["rows"][0]) == KEYS["rows"]
    row = plain["rows"][0]
    lists = {name: plain[name] for name in ("groups", "storage", "steps")}
    lists |= {name: row[name] for name in ("lines", "blocks", "events")} | {"spans": plain["steps"][0]["spans"]}
    lists |= {name: plain["steps"][0][name] for name in ("pool", "tables")}
    lists["changes"] = [change for line in row["lines"] for change in line["changes"]]
    for name, items in lists.items():
        assert items and all(set(item) == KEYS[name] for item in items)
    reasons = [change["why"] for change in lists["changes"]]
    assert all({"cause", "text", "length"} <= set(why) for why in reasons)
    ranked = next(why for why in reasons if why["cause"] == "score")
    assert set(ranked) == {"cause", "text", "length", "score", "rank", "num_candidates", "lowest_score"}
    assert row["counts"] == dict(count_states(trace.rows[0])) and row["tokens"] == list(trace.rows[0].tokens)


# ---------------------------------------------------------------- text


def two_heads(pieces=("a", "b", "c", "d", "e", "f"), states=("#..##-", "##.##-")):
    """Build a trace of two heads of one layer by hand."""
    text = "dropped at step 2 by key-norm(3) at length 4: score -2, rank 4 of 4 (100%)"
    changes = (
        trace_report.StateChange(1, 0, 3, "hot", Reason("written", "computed at step 1", 0)),
        trace_report.StateChange(2, 2, 2, "evicted", Reason("score", text, 4, -2.0, 4, 4, None)),
    )
    blocks = (0, 2, 3, 0, 3, 1, False, (0.75,)), (0, 5, 1, 4, 4, 2, True, (0.125,))
    row = trace_report.SequenceReport(
        request=0,
        sample=0,
        prompt=4,
        num_prefix_hits=0,
        tokens=(0, 1, 2, 3, 4, 5),
        pieces=tuple(pieces),
        finish="length",
        error=None,
        lines=tuple(trace_report.GroupTrace(0, (0,), head, signs, changes) for head, signs in enumerate(states)),
        blocks=tuple(trace_report.BlockUse(*block) for block in blocks),
        attention_mass=(((1.0, 0.25, 0.25, 0.25, 0.25, 0.0),) * 2,),
        events=(trace_report.SequenceEventRecord(1, "admitted"),),
    )
    group = trace_report.GroupReport("hot", (0,), 2, "key-norm(3)", "float32", 4, 6, 1024)
    spans = trace_report.StepSpan(0, 0, 4), trace_report.StepSpan(0, 4, 1)
    steps = tuple(trace_report.TraceStep(step, (span,), (step,)) for step, span in enumerate(spans, 1))
    return trace_report.TraceReport("m", "key-norm(3)", "paged", 1, (group,), steps, (row,))


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


def test_text_of_a_trace():
    assert trace_to_text(two_heads(), most=1) == GOLDEN


def test_narrow_text_joins_tokens():
    long = two_heads(tuple("abcdef" * 10), ("#" * 30 + "." * 30,) * 2)
    row = long.rows[0]._replace(tokens=tuple(range(60)), attention_mass=(((0.5,) * 60,) * 2,))
    drawn = trace_to_text(long._replace(rows=(row,)), width=40).splitlines()
    assert "  a cell is 3 tokens and shows how most of them are" in drawn
    assert "  layer 0    " + "#" * 10 + "." * 10 in drawn  # two heads that keep the same are one line
    assert all(line == line.rstrip() for line in drawn)


def test_history_of_a_token():
    lines = trace_to_text(two_heads(), tokens=[2, 9]).splitlines()
    assert "  token 2 'c', id 2, attention 0.5" in lines
    assert any("layer 0: computed at step 1; dropped at step 2 by key-norm(3)" in line for line in lines)
    assert lines[-1] == "  token 9: this sequence has 6 tokens"


# ---------------------------------------------------------------- HTML

HOSTILE_TEXTS = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "&amp;", "\u2028", "'\"")


class ParsedPage(HTMLParser):
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


def test_html_page_loads_nothing():
    trace = two_heads(HOSTILE_TEXTS)._replace(model="<b>m</b>")
    source = trace_to_html(trace)
    found = ParsedPage(source)
    digest = b64encode(sha256(found.data["script"].encode()).digest()).decode()
    text = source.replace(digest, "")  # base64 may contain anything, as //w
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp|eval\(|innerHTML|document\.write", text)
    tags = Counter(tag for tag, _ in found.tags)
    assert tags["script"] == 2 and not {"img", "b", "link", "iframe"} & set(tags)
    assert not [attrs for _, attrs in found.tags if {"src", "href", "onerror", "onload"} & set(attrs)]
    assert json.loads(found.data["script data"]) == json.loads(json.dumps(trace_to_json(trace)))
    rules = next(attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in rules and f"script-src 'sha256-{digest}'" in rules and "unsafe" not in rules
    assert "prefers-color-scheme: dark" in source
    ids = set(re.findall(r'\$\("([a-z]+)"\)', found.data["script"]))
    assert ids <= {attrs.get("id") for _, attrs in found.tags}


def test_notebook_shows_the_page_in_a_sandbox():
    trace, _ = traced("full", tokens=3)
    frame = trace._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"') and frame.count("<") == 2
    ((tag, attrs),) = ParsedPage(frame).tags
    assert tag == "iframe" and attrs["srcdoc"] == trace_to_html(trace)


# ---------------------------------------------------------------- the command


@pytest.fixture
def plain(tmp_path):
    return write_checkpoint(tmp_path / "run", CONFIGS["plain"])


def test_command_output(plain, inspect, tmp_path):
    command = [plain, "--cache", "--prompt", "the fox", "--max-tokens", 20, "--policy", "window(8)", "--block-size", 4]
    code, out, err = inspect(*command)
    assert (code, err) == (0, "") and "window(8)" in out and "passed at step" in out and "\x1b" not in out
    code, out, _ = inspect(*command, "--json")
    plain_trace = json.loads(out)
    assert code == 0 and plain_trace["policy"] == "window(8)" and plain_trace["rows"][0]["pieces"][0] == "t"
    html, file = tmp_path / "cache.html", tmp_path / "cache.json"
    code, _, err = inspect(*command, "--html", html, "--trace-token", 0)
    assert code == 0 and str(html) in err and html.read_text().startswith("<!doctype html>")
    assert inspect(*command, "--out", file) == (0, "", "")
    assert json.loads(file.read_text())["rows"] == plain_trace["rows"]


def test_storage_beyond_the_pool(plain, inspect, tmp_path):
    command = [plain, "--cache", "--prompt", "the quick brown fox", "--block-size", 4]
    stores = [*command, "--max-tokens", 6, "--prefix-cache-dir", tmp_path / "store", "--prefix-cache-size", "1MiB"]
    stores += ["--prefix-cache-ram", "64KiB"]
    assert inspect(*stores).code == 0
    code, out, _ = inspect(*stores, "--trace-token", 0)
    assert code == 0 and "16 read back from the disk store (" in out
    assert "read back from the disk store at step 1" in out
    assert "    disk store: " in out and "of 1,048,576 bytes in 6 blocks" in out and "    RAM store: 0 of 65,536" in out
    html = tmp_path / "cache.html"
    plain_trace = json.loads(inspect(*stores, "--json", "--html", html).out)
    assert [storage["location"] for storage in plain_trace["storage"]] == ["pool", "RAM store", "disk store"]
    assert json.loads(ParsedPage(html.read_text()).data["script data"]) == plain_trace
    offload = ["--max-seq-len", 16, "--overflow", "offload", "--offload-ram", "1KiB", "--offload-dir", tmp_path / "off"]
    code, out, err = inspect(*command, "--max-tokens", 20, *offload)
    assert (code, err) == (0, "") and "offload RAM: " in out and "offload disk: " in out and "s offloaded" in out
    two = ["--prompt", "fox brown the quick", "--max-tokens", 20, "--num-blocks", 16, "--swap-space", "1MiB"]
    code, out, err = inspect(*command, *two)
    assert (code, err) == (0, "") and "swap RAM: 0 of 1,048,576" in out
    assert "swapped out: " in out or "preempted: " in out


def test_saved_session_is_traced_and_not_changed(plain, inspect, capsys, tmp_path, monkeypatch):
    folder = tmp_path / "sessions"
    monkeypatch.setenv("KVAD_SESSION_DIR", str(folder))
    save = [plain, "notes", "--prompt", "the quick brown fox", "--policy", "sinks(2, 30)", "--block-size", 8]
    assert main(["session", "save", *map(str, save)]) == 0
    capsys.readouterr()
    file = folder / "notes.session"
    before = file.read_bytes(), file.stat().st_mtime_ns
    command = [plain, "--cache", "--session", "notes", "--max-tokens", 4]
    code, out, err = inspect(*command, "--trace-token", 3)
    assert (code, err) == (0, "") and "18 tokens restored from session notes" in out and "sinks(2, 30)" in out
    assert "restored at step 1 from session notes" in out
    row = json.loads(inspect(*command, "--prompt", " jumps", "--json").out)["rows"][0]
    assert (row["restored"], row["prompt"]) == (18, 19 + 6)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before and list(folder.iterdir()) == [file]
    for options, message in (
        (["--session", "other"], "there is no session other"),
        (["--session", "notes", "--policy", "full"], "policy: full here, sinks(2, 30) there"),
        (["--session", "notes", "--n", 2], "must be one sequence, got 2 samples"),
    ):
        code, _, err = inspect(plain, "--cache", *options)
        assert code == 2 and message in err
    assert inspect(plain).code == 0  # KVAD_SESSION_DIR alone does not need --cache


def test_several_prompts(plain, inspect, tmp_path):
    (tmp_path / "prompt.txt").write_text("the quick brown fox")
    command = [plain, "--cache", "--block-size", 4, "--max-tokens", 4]
    options = ["--cache-dtype", "int8", "--layer", 1, "--head", 0]
    code, out, _ = inspect(*command, "--prompt", "the quick fox", "--file", tmp_path / "prompt.txt", *options)
    assert code == 0 and "sequence 1: 19 tokens of prompt, 8 of them found in the prefix cache" in out and "int8" in out
    code, out, _ = inspect(*command, "--ids", "--prompt", "1 2 3", "--n", 2, "--json")
    assert code == 0 and [row["tokens"][:3] for row in json.loads(out)["rows"]] == [[1, 2, 3]] * 2


NEED_CACHE = (
    "--prefix-cache-dir=folder", "--prefix-cache-size=1MiB", "--prefix-cache-ram=1MiB", "--prefix-cache-eviction=arc",
    "--overflow=offload", "--offload-dir=folder", "--offload-ram=1MiB", "--swap-space=1MiB", "--swap-dir=folder",
    "--num-blocks=32", "--session=notes", "--session-dir=folder", "--policy=window(8)", "--block-size=8",
    "--max-tokens=0",
)  # fmt: skip
INVALID = {
    "no prompt": ([], "--cache needs something to run"),
    "two outputs": (["--prompt", "fox", "--tree"], "--tree and --cache exclude each other"),
    "format": (["--prompt", "fox", "--format", "svg"], "--format does not apply to --cache"),
    "offload": (["--prompt", "fox", "--offload-ram", "1MiB"], "--offload-ram: nothing is offloaded"),
    "deterministic": (["--prompt", "fox", "--deterministic"], "--deterministic and --cache"),
    "compile": (["--prompt", "fox", "--compile"], "--compile and --cache"),
    "folder alone": (["--prompt", "fox", "--session-dir", "."], "--session-dir needs --session NAME"),
    "policy": (["--prompt", "fox", "--policy", "windw(8)"], "did you mean 'window'?"),
    "layer": (["--prompt", "fox", "--layer", "9"], "--layer 9 is not one of 0..1"),
    "head": (["--prompt", "fox", "--head", "9"], "--head 9 is not one of 0..1"),
    "token": (["--prompt", "fox", "--trace-token", "-1"], "--trace-token -1: must be at least 0"),
    "max tokens": (["--prompt", "fox", "--max-tokens", "-1"], "--max-tokens -1: must be at least 0"),
    "file": (["--file", "/nowhere/at/all"], "/nowhere/at/all: No such file"),
    "too long": (["--prompt", "fox " * 40], "prompt: must have at most 64 tokens, got 160"),
    "ids": (["--ids", "--prompt", "1 x"], "is not a token id"),
}


def test_html_needs_something_to_draw(plain, inspect):
    code, out, err = inspect(plain, "--html=page.html")
    assert (code, out) == (2, "") and "--html needs --cache or --attention TEXT" in err


@pytest.mark.parametrize("option", NEED_CACHE)
def test_options_that_need_cache(plain, inspect, option):
    code, out, err = inspect(plain, option)
    assert (code, out) == (2, "") and f"{option.partition('=')[0]} needs --cache" in err


@pytest.mark.parametrize("case", INVALID)
def test_invalid_options_are_refused(plain, inspect, case):
    options, message = INVALID[case]
    code, out, err = inspect(plain, "--cache", *options)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err
    assert len(err.splitlines()) <= 2


def test_encoder_decoder_is_refused(tmp_path, inspect):
    code, _, err = inspect(write_checkpoint(tmp_path / "pair", PAIRS["pair"]), "--cache", "--prompt", "the fox")
    assert code == 2 and "--cache needs a decoder, got an encoder-decoder" in err


def test_full_help_lists_the_options(inspect):
    code, out, _ = inspect("--help-all")
    flags = ("--cache ", "--prompt", "--policy", "--html", "--trace-token ", "--prefix-cache-dir ", "--session ")
    assert code == 0 and all(flag in out for flag in flags)
