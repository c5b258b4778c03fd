"""Configurations that fit in memory: each line is the largest that fits; costs are measured or absent."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvad.benchmarks import cache_quality
from kvad.benchmarks.variants import known_variants
from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.sizing.fits import require_memory, total_bytes_with
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.config.layers import AttentionConfig
from kvad.config.model import attention_specs
from kvad.errors import DataError, MemoryPlanError
from kvad.planning import fit
from kvad.planning.cache_presets import CACHE_FORMATS, POLICY_BUILDERS, TIERED_POLICIES
from kvad.planning.known_models import known_model
from kvad.planning.report import describe_retention, layer_names
from tests.support.lab_models import tiny

ROOT = Path(__file__).parents[2]
GIB = 2**30

# ---------------------------------------------------------------- description of a group

DESCRIPTIONS = {
    "full": ["everything"],
    "window(32)": ["the last 32 tokens"],
    "sinks(4, 1020)": ["the first 4 and the last 1,020 tokens"],
    "block-window(64)": ["the last 49 to 64 tokens, 16 leaving at once"],
    "snapkv(256)": ["256 tokens per head by snapkv, evicted every 64"],
    "quest(128)": ["everything, of which a query reads 128 tokens"],
    "tiered(128, quantized=256, summaries=64)": [
        "the latest 128 tokens unchanged",
        "up to 256 older tokens, quantized",
        "64 summaries of 8 older tokens each at most",
    ],
    "tiered(64, num_sinks=16)": [
        "the first 16 and the latest 64 tokens unchanged",
        "up to 2,048 older tokens, quantized",
    ],
    "0: full; key-norm(32)": ["everything", "32 tokens per head by key-norm, evicted every 64"],
}


@pytest.mark.parametrize("policy", DESCRIPTIONS)
def test_description_of_a_group(policy):
    config = tiny(limit=2048)
    groups = build_groups(attention_specs(config), CacheConfig(max_seq_len=2048, policy=policy))
    assert [describe_retention(group, attention_specs(config)) for group in groups] == DESCRIPTIONS[policy]


def test_description_names_the_window_of_the_model():
    own = attention_specs(tiny(AttentionConfig(4, 2, window=7)))
    for policy, expected in (("full", "the last 7 tokens (the model's window)"), ("window(5)", "the last 5 tokens")):
        (group,) = build_groups(own, CacheConfig(max_seq_len=64, policy=policy))
        assert describe_retention(group, own) == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([3], "layer 3"),
        ([0, 1, 2, 3], "layers 0-3"),
        ([0, 2, 4, 6], "layers 0, 2, ..., 6"),
        ([0, 1, 2, 5, 7], "layers 0-2, 5, 7"),
        ([1, 3], "layers 1, 3"),
    ],
)
def test_layer_names(layers, expected):
    assert layer_names(layers) == expected


# ---------------------------------------------------------------- the table


def make_plan(name="gpt2", **options):
    return plan_memory(known_model(name), CacheConfig(**{"max_seq_len": 1024, **options}))


def table(plan, memory, contexts=(), rows=(), ratios=(0.75,), measured=()):
    return fit.find_configurations(
        plan,
        memory,
        contexts=contexts,
        rows=rows,
        choices=fit.policy_choices(plan, ratios),
        formats=fit.format_choices(plan),
        costs=measured,
    )


def test_every_configuration_is_the_largest_that_fits():
    plan = make_plan()
    fits = table(plan, 2 * GIB, contexts=(256, 1024), rows=(4, 64)).rows
    assert len(fits) == 4 * 4 * 4
    assert len({(row.cache_format, row.policy) for row in fits if row.context == 1024}) > 12
    for row in fits:

        def total(num_seqs, context, row=row):
            policy = fit.PolicyChoice(row.policy.partition("(")[0], row.ratio).policy(context)
            options = replace(plan.cache, max_num_seqs=num_seqs, max_seq_len=context, policy=policy)
            if row.cache_format != plan.cache.format_name:
                options = replace(options, key_dtype=row.cache_format, value_dtype=row.cache_format)
            return total_bytes_with(plan, options)

        assert row.bytes == total(row.num_seqs, row.context) <= 2 * GIB
        if row.num_seqs not in (4, 64):
            assert total(row.num_seqs + 1, row.context) > 2 * GIB
        else:
            assert row.context == 1024 or total(row.num_seqs, row.context + 16) > 2 * GIB


def test_requested_policy_is_compared_with_full():
    plan = make_plan(policy="sinks(4, 252)")
    fits = table(plan, 2 * GIB, contexts=(1024,)).rows
    assert {row.policy for row in fits} == {"full", "sinks(4, 252)"}
    assert {row.policy for row in table(make_plan(key_dtype="int8", dtype="int8"), 2 * GIB, rows=(2,)).rows} > {"full"}
    endless = plan_memory(known_model("smollm-135m"), CacheConfig(max_seq_len=1024, overflow="sinks", max_num_seqs=2))
    fits = table(endless, 2 * GIB, contexts=(512, 1024)).rows
    assert {row.policy for row in fits} == {"sinks(4, 508)", "sinks(4, 1020)"}
    assert not any(row.is_lossless or row.perplexity for row in fits)


def test_overflow_mode_selects_the_policy():
    plan = plan_memory(known_model("smollm-135m"), CacheConfig(max_seq_len=256, overflow="offload", max_num_seqs=2))
    fits = table(plan, 2 * GIB, contexts=(256, 512)).rows
    assert {row.policy for row in fits} == {"offload(192, 1856)", "offload(384, 1664, 128)"}
    assert {row.cache_format: row.is_lossless for row in fits} == {
        "float32": True, "bfloat16": False, "int8": False, "int4": False
    }  # fmt: skip
    plan = plan_memory(known_model("smollm-135m"), CacheConfig(max_seq_len=256, overflow="summarize", max_num_seqs=2))
    fits = table(plan, 2 * GIB, contexts=(256,)).rows
    (policy,) = {row.policy for row in fits}
    assert policy.startswith("tiered(") and not any(row.is_lossless or row.perplexity for row in fits)


def test_unsupported_formats_are_reported():
    plan = plan_memory(tiny(AttentionConfig(4, 2, head_dim=10, value_dim=3)), CacheConfig(max_seq_len=64))
    fits = table(plan, GIB, contexts=(64,))
    assert fits.rows and {row.cache_format for row in fits.rows} == {"float32", "bfloat16", "int8"}
    assert all("int4" in each and "packs two numbers" in each for each in fits.refused) and fits.refused


def test_weights_shortfall():
    plan = plan_memory(known_model("llama-3-8b"), CacheConfig(max_seq_len=1024, max_num_seqs=1))
    missing, dtype, weights = fit.weights_shortfall(plan, 20 * GIB)
    assert missing == plan.weights - 20 * GIB and dtype == "bfloat16" and weights == plan.weights // 2
    assert fit.weights_shortfall(plan, 40 * GIB) is None


# ---------------------------------------------------------------- costs


def line(cache, ratio, measure, **more):
    run = {"digest": "d", "commit": "c", "machine": "m", "model": "/somewhere/runs/mine", "options": {"lengths": [64]}}
    tasks = {} if measure == "text" else {"tasks": 8}
    return {"cache": cache, "ratio": ratio, "measure": measure, "length": 64, **tasks, **run, **more}


LINES = [
    line("full", 0.0, "text", perplexity_ratio=1.0, kl=0.0),
    line("full", 0.0, "single", depth=0.0, recall=1.0),
    line("full", 0.0, "single", depth=1.0, recall=0.98),
    line("full", 0.0, "many", depth=1.0, recall=0.9),
    line("int8", 0.0, "text", perplexity_ratio=1.25, kl=0.5),
    line("sinks", 0.75, "text", perplexity_ratio=None, kl=0.5),
    line("sinks", 0.75, "single", depth=0.0, recall=0.25),
    line("sinks", 0.75, "single", depth=1.0, recall=0.5),
    line("sinks", 0.75, "many", depth=1.0, recall=0.5),
    line("sinks+int8", 0.75, "text", perplexity_ratio=1.5, kl=0.75),
    line("sinks+int8", 0.75, "single", depth=0.0, recall=0.125),
    line("quest", 0.5, "text", perplexity_ratio=1.125, kl=0.25),
]


def test_lines_are_collected_into_costs():
    costs = fit.collect_costs(LINES)
    assert (costs.model, costs.commit) == ("mine", "c") and "mine, 64 tokens" in costs.source
    (sinks,) = fit.find_costs([costs], "sinks", 0.75)
    assert sinks.recall == {"single": 0.375}  # the full cache fails too many "many" tasks
    assert sinks.perplexity_ratio is None
    (int8,) = fit.find_costs([costs], "int8", 0.0)
    assert (int8.perplexity_ratio, int8.recall) == (1.25, {})
    assert fit.find_costs([costs], "sinks", 0.5) == fit.find_costs([costs], "tova", 0.75) == ()


def test_costs_are_measured_or_absent():
    fits = table(make_plan(), 2 * GIB, contexts=(1024,), measured=[fit.collect_costs(LINES)]).rows
    by_cache = {(row.cache_format, row.policy.partition("(")[0]): row for row in fits}
    assert by_cache["float32", "full"].is_lossless and not by_cache["float32", "full"].measured
    assert by_cache["int8", "full"].perplexity.perplexity_ratio == 1.25 and by_cache["int8", "full"].needle is None
    sinks, both = by_cache["float32", "sinks"], by_cache["int8", "sinks"]
    assert sinks.needle.recall == {"single": 0.375} and sinks.perplexity is None
    assert both.perplexity.perplexity_ratio == 1.5 and both.needle.recall == {"single": 0.125}
    measured_keys = ("int8", "full"), ("float32", "sinks"), ("int8", "sinks")
    others = [row for key, row in by_cache.items() if key not in measured_keys]
    assert all(not row.measured for row in others)


def test_explicit_policy_has_the_cost_of_its_ratio():
    plan = make_plan(policy="sinks(4, 252)")
    fits = table(plan, 2 * GIB, contexts=(256, 512, 1024), measured=[fit.collect_costs(LINES)]).rows
    own = {row.context: row for row in fits if (row.cache_format, row.policy) == ("float32", "sinks(4, 252)")}
    assert own[256].is_lossless  # a sequence of 256 tokens loses none
    assert not own[512].measured and own[1024].needle.recall == {"single": 0.375}


def test_sparse_read_has_the_cost_of_its_ratio():
    fits = table(
        make_plan(policy="quest(512)"), 2 * GIB, contexts=(512, 1024), measured=[fit.collect_costs(LINES)]
    ).rows
    own = {row.context: row for row in fits if (row.cache_format, row.policy) == ("float32", "quest(512)")}
    assert own[512].is_lossless and own[1024].perplexity.perplexity_ratio == 1.125


def test_merged_depths_have_equal_costs(cost_folder, capsys):
    merged = fit.merge_depths(LINES)
    assert fit.collect_costs(merged) == fit.collect_costs(LINES) and len(merged) == len(LINES) - 2
    (both,) = [each for each in merged if (each["cache"], each["measure"]) == ("sinks", "single")]
    assert (both["recall"], both["tasks"], "depth" in both) == (0.375, 16, False)
    fit.main(["--merge", str(cost_folder)])
    assert (
        [json.loads(each) for each in capsys.readouterr().out.splitlines()]
        == merged
        == fit.read_cost_lines(cost_folder)
    )


def test_packaged_costs_equal_the_runs():
    runs = sorted((ROOT / "dev" / "results").glob("cache-quality-*.jsonl"))
    run_costs = [each for path in runs for each in fit.read_costs(path)]
    assert all(each in run_costs for each in fit.read_costs())


def test_packaged_costs_name_their_source():
    packaged = fit.read_costs()
    assert packaged and fit.MIN_FULL_RECALL == cache_quality.MIN_FULL_RECALL
    for each in packaged:
        assert each.model and each.digest and len(each.commit) == 12 and each.machine and each.options
        assert "/" not in each.model
        for cost in each.costs:
            assert set(re.split("[+/]", cost.cache)) <= set(known_variants())
            assert cost.perplexity_ratio is None or cost.perplexity_ratio > 0.99
            assert all(0 <= recall <= 1 for recall in cost.recall.values())
    cache_names = {cost.cache for each in packaged for cost in each.costs}
    assert cache_names >= {"full", "int8", "int4", *POLICY_BUILDERS, *TIERED_POLICIES}
    assert cache_names >= {f"{name}+{form}" for name in fit.DEFAULT_POLICIES for form in ("bfloat16", "int8", "int4")}
    assert set(CACHE_FORMATS) <= set(known_variants())


@pytest.fixture
def cost_folder(tmp_path):
    (tmp_path / fit.LINES_FILE).write_text("".join(f"{json.dumps(each)}\n" for each in LINES))
    return tmp_path


def test_custom_costs(cost_folder, run_plan):
    words = "gpt2 --fit-memory 2GiB --max-seq-len 1024 --bandwidth 10 --quality-results"
    status, out, _ = run_plan(words, str(cost_folder))
    assert status == 0
    for text in ("perplexity x1.250", "finds 38%", "perplexity: mine, 64 tokens", "not measured", "lossless"):
        assert text in out


@pytest.mark.parametrize(("text", "error"), [("{}", "has no costs"), ("[", "has no costs"), (None, "cannot read")])
def test_files_without_costs_are_refused(tmp_path, text, error):
    if text is not None:
        (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=error):
        fit.read_costs(tmp_path / "other.json")


def test_packaged_costs_are_rewritten(cost_folder, monkeypatch):
    monkeypatch.setattr(fit, "PACKAGED_COSTS", cost_folder / "costs.json")
    fit.main([str(cost_folder)])
    assert fit.read_costs(cost_folder / "costs.json") == (fit.collect_costs(LINES),)


# ---------------------------------------------------------------- the command


def test_table_is_printed(run_plan):
    words = "llama-3-8b --dtype bfloat16 --fit-memory 24GiB --compression-ratios 0.6,0.75 --bandwidth 10"
    status, out, err = run_plan(words)
    lines = out[out.index("in 24.00 GiB") :].splitlines()
    heading = "seqs tokens each takes stored policy toy-model quality"
    assert (status, err) == (0, "") and " ".join(lines[1].split()) == heading
    for text, count in (("not measured", 2 * 3 * 3), ("lossless", 2), ("sinks(4, 508)", 3), ("commit", 2)):
        assert sum(text in each for each in lines) == count
    assert len({each for each in lines if "commit" in each}) == 2


def test_table_as_json(plan_json):
    fits = plan_json("gpt2 --fit-memory 2GiB --max-seq-len 256,1024 --max-num-seqs 3")["fit"]
    assert fits["weights_too_large"] is None
    offered = fits["table"]["rows"]
    assert {each["context"] for each in offered} >= {256, 1024} and any(each["num_seqs"] == 3 for each in offered)
    assert all(each["bytes"] <= fits["bytes"] for each in offered)
    measured = next(each["measured"] for each in offered if each["measured"])
    assert set(measured[0]) == {"model", "digest", "perplexity_ratio", "kl", "recall"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("llama-3-8b --dtype float32 --fit-memory 20GiB", "in bfloat16 they take 14.96 GiB: --dtype bfloat16"),
        ("llama-3-8b --dtype float32 --fit-memory 8GiB", "and in bfloat16 still 6.96 GiB more"),
        ("llama-3-8b --fit-memory 8GiB", "a smaller model would fit"),
    ],
)
def test_weights_that_do_not_fit(words, error, run_plan):
    status, out, _ = run_plan(words, "--bandwidth", "10")
    assert status == 1 and error in out
    assert "not even one sequence of one block fits" in out and "the weights alone take" in out


# ---------------------------------------------------------------- suggestions of an error


def test_error_suggests_a_format_and_policy_that_fit():
    plan = make_plan(max_num_seqs=16)
    with pytest.raises(MemoryPlanError) as caught:
        require_memory(plan, 1700 * 2**20)
    assert "all of it as bfloat16 (" in caught.value.hint and "under sinks(4, 252) (" in caught.value.hint
    assert total_bytes_with(plan, replace(plan.cache, dtype="bfloat16")) <= 1700 * 2**20
    assert total_bytes_with(plan, replace(plan.cache, policy="sinks(4, 252)")) <= 1700 * 2**20


def test_error_suggests_nothing_that_does_not_fit():
    with pytest.raises(MemoryPlanError) as caught:
        require_memory(make_plan(max_num_seqs=600), GIB)
    assert "all of it" not in caught.value.hint
