"""Configurations that fit in memory: each line is the largest that fits; costs are measured or absent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvad.benchmarks import cache_quality
from kvad.benchmarks.variants import known_variants
from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.sizing.fits import require_memory, total_bytes_with
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.cli.main import main
from kvad.config.layers import AttentionConfig
from kvad.config.model import attention_specs
from kvad.errors import DataError, MemoryPlanError
from kvad.planning import fit
from kvad.planning.cache_presets import CACHE_FORMATS, POLICY_BUILDERS, TIERED_POLICIES
from kvad.planning.fit import (
    DEFAULT_POLICIES,
    LINES_FILE,
    PolicyChoice,
    collect_costs,
    find_configurations,
    find_costs,
    format_choices,
    merge_depths,
    policy_choices,
    read_cost_lines,
    read_costs,
    weights_shortfall,
)
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
    return find_configurations(
        plan,
        memory,
        contexts=contexts,
        rows=rows,
        choices=policy_choices(plan, ratios),
        formats=format_choices(plan),
        costs=measured,
    )


def test_every_configuration_is_the_largest_that_fits():
    plan = make_plan()
    configurations = table(plan, 2 * GIB, contexts=(256, 1024), rows=(4, 64)).rows
    assert (
        len(configurations) == 4 * 4 * 4
        and len({(o.cache_format, o.policy) for o in configurations if o.context == 1024}) > 12
    )
    for configuration in configurations:

        def total(rows, context, configuration=configuration):
            choice = PolicyChoice(configuration.policy.partition("(")[0], configuration.ratio)
            keys = (
                {}
                if configuration.cache_format == plan.cache.format_name
                else {"key_dtype": configuration.cache_format, "value_dtype": configuration.cache_format}
            )
            options = replace(plan.cache, max_num_seqs=rows, max_seq_len=context, policy=choice.policy(context), **keys)
            return total_bytes_with(plan, options)

        assert configuration.bytes == total(configuration.num_seqs, configuration.context) <= 2 * GIB
        more = total(configuration.num_seqs + 1, configuration.context) > 2 * GIB
        longer = configuration.context == 1024 or total(configuration.num_seqs, configuration.context + 16) > 2 * GIB
        assert more if configuration.num_seqs not in (4, 64) else longer


def test_requested_policy_is_compared_with_full():
    plan = make_plan(policy="sinks(4, 252)")
    configurations = table(plan, 2 * GIB, contexts=(1024,)).rows
    assert {configuration.policy for configuration in configurations} == {"full", "sinks(4, 252)"}
    assert {
        configuration.policy
        for configuration in table(make_plan(key_dtype="int8", dtype="int8"), 2 * GIB, rows=(2,)).rows
    } > {"full"}
    endless = plan_memory(known_model("smollm-135m"), CacheConfig(max_seq_len=1024, overflow="sinks", max_num_seqs=2))
    configurations = table(endless, 2 * GIB, contexts=(512, 1024)).rows
    assert {configuration.policy for configuration in configurations} == {"sinks(4, 508)", "sinks(4, 1020)"}
    assert not any(configuration.is_lossless or configuration.perplexity for configuration in configurations)


def test_overflow_mode_selects_the_policy():
    plan = plan_memory(known_model("smollm-135m"), CacheConfig(max_seq_len=256, overflow="offload", max_num_seqs=2))
    configurations = table(plan, 2 * GIB, contexts=(256, 512)).rows
    assert {configuration.policy for configuration in configurations} == {
        "offload(192, 1856)",
        "offload(384, 1664, 128)",
    }
    assert {configuration.cache_format: configuration.is_lossless for configuration in configurations} == {
        "float32": True, "bfloat16": False, "int8": False, "int4": False
    }  # fmt: skip
    plan = plan_memory(known_model("smollm-135m"), CacheConfig(max_seq_len=256, overflow="summarize", max_num_seqs=2))
    configurations = table(plan, 2 * GIB, contexts=(256,)).rows
    (policy,) = {configuration.policy for configuration in configurations}
    assert policy.startswith("tiered(") and not any(
        configuration.is_lossless or configuration.perplexity for configuration in configurations
    )


def test_unsupported_formats_are_reported():
    plan = plan_memory(tiny(AttentionConfig(4, 2, head_dim=10, value_dim=3)), CacheConfig(max_seq_len=64))
    configurations = table(plan, GIB, contexts=(64,))
    assert configurations.rows and {configuration.cache_format for configuration in configurations.rows} == {
        "float32",
        "bfloat16",
        "int8",
    }
    assert (
        all("int4" in each and "packs two numbers" in each for each in configurations.refused)
        and configurations.refused
    )


def test_weights_shortfall():
    plan = plan_memory(known_model("llama-3-8b"), CacheConfig(max_seq_len=1024, max_num_seqs=1))
    missing, dtype, weights = weights_shortfall(plan, 20 * GIB)
    assert missing == plan.weights - 20 * GIB and dtype == "bfloat16" and weights == plan.weights // 2
    assert weights_shortfall(plan, 40 * GIB) is None


# ---------------------------------------------------------------- costs


def line(cache, ratio, measure, **more):
    common = {
        "digest": "d",
        "commit": "c",
        "machine": "m",
        "model": "/somewhere/runs/mine",
        "options": {"lengths": [64]},
    }
    tasks = {} if measure == "text" else {"tasks": 8}
    return {"cache": cache, "ratio": ratio, "measure": measure, "length": 64, **tasks, **common, **more}


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
    configurations = collect_costs(LINES)
    assert (configurations.model, configurations.commit) == ("mine", "c") and "mine, 64 tokens" in configurations.source
    ((_, sinks),) = find_costs([configurations], "sinks", 0.75)
    assert (
        sinks.recall == {"single": 0.375} and sinks.perplexity_ratio is None
    )  # the full cache fails too many "many" tasks
    ((_, int8),) = find_costs([configurations], "int8", 0.0)
    assert (int8.perplexity_ratio, int8.recall) == (1.25, {})
    assert find_costs([configurations], "sinks", 0.5) == [] and find_costs([configurations], "tova", 0.75) == []


def test_costs_are_measured_or_absent():
    configurations = table(make_plan(), 2 * GIB, contexts=(1024,), measured=[collect_costs(LINES)]).rows
    by_cache = {
        (configuration.cache_format, configuration.policy.partition("(")[0]): configuration
        for configuration in configurations
    }
    assert by_cache["float32", "full"].is_lossless and not by_cache["float32", "full"].measured
    assert by_cache["int8", "full"].perplexity.perplexity_ratio == 1.25 and by_cache["int8", "full"].needle is None
    assert (
        by_cache["float32", "sinks"].needle.recall == {"single": 0.375}
        and by_cache["float32", "sinks"].perplexity is None
    )
    both = by_cache["int8", "sinks"]
    assert both.perplexity.perplexity_ratio == 1.5 and both.needle.recall == {"single": 0.125}
    measured_keys = ("int8", "full"), ("float32", "sinks"), ("int8", "sinks")
    others = [configuration for key, configuration in by_cache.items() if key not in measured_keys]
    assert all(not configuration.measured for configuration in others)


def test_explicit_policy_has_the_cost_of_its_ratio():
    plan = make_plan(policy="sinks(4, 252)")
    configurations = table(plan, 2 * GIB, contexts=(256, 512, 1024), measured=[collect_costs(LINES)]).rows
    own = {
        configuration.context: configuration
        for configuration in configurations
        if (configuration.cache_format, configuration.policy) == ("float32", "sinks(4, 252)")
    }
    assert own[256].is_lossless  # a sequence of 256 tokens loses none
    assert not own[512].measured and own[1024].needle.recall == {"single": 0.375}


def test_sparse_read_has_the_cost_of_its_ratio():
    configurations = table(
        make_plan(policy="quest(512)"), 2 * GIB, contexts=(512, 1024), measured=[collect_costs(LINES)]
    ).rows
    own = {
        configuration.context: configuration
        for configuration in configurations
        if (configuration.cache_format, configuration.policy) == ("float32", "quest(512)")
    }
    assert own[512].is_lossless and own[1024].perplexity.perplexity_ratio == 1.125


def test_merged_depths_have_equal_costs(tmp_path, capsys):
    merged = merge_depths(LINES)
    assert collect_costs(merged) == collect_costs(LINES) and len(merged) == len(LINES) - 2
    (both,) = [each for each in merged if (each["cache"], each["measure"]) == ("sinks", "single")]
    assert (both["recall"], both["tasks"], "depth" in both) == (0.375, 16, False)
    (tmp_path / LINES_FILE).write_text("".join(f"{json.dumps(each)}\n" for each in LINES))
    fit.main(["--merge", str(tmp_path)])
    assert [json.loads(each) for each in capsys.readouterr().out.splitlines()] == merged == read_cost_lines(tmp_path)


def test_packaged_costs_equal_the_runs():
    runs = sorted((ROOT / "dev" / "results").glob("cache-quality-*.jsonl"))
    run_costs = [each for path in runs for each in read_costs(path)]
    assert all(each in run_costs for each in read_costs())


def test_packaged_costs_name_their_source():
    configurations = read_costs()
    assert configurations and fit.MIN_FULL_RECALL == cache_quality.MIN_FULL_RECALL
    for each in configurations:
        assert each.model and each.digest and len(each.commit) == 12 and each.machine and each.options
        assert "/" not in each.model
        for cost in each.costs:
            assert set(re.split("[+/]", cost.cache)) <= set(known_variants()) and (
                cost.perplexity_ratio is None or cost.perplexity_ratio > 0.99
            )
            assert all(0 <= recall <= 1 for recall in cost.recall.values())
    cache_names = {cost.cache for each in configurations for cost in each.costs}
    assert cache_names >= {"full", "int8", "int4", *POLICY_BUILDERS, *TIERED_POLICIES}
    assert cache_names >= {f"{name}+{form}" for name in DEFAULT_POLICIES for form in ("bfloat16", "int8", "int4")}
    assert set(CACHE_FORMATS) <= set(known_variants())


def test_custom_costs(tmp_path, capsys):
    (tmp_path / LINES_FILE).write_text("".join(f"{json.dumps(each)}\n" for each in LINES))
    arguments = [
        "plan",
        "gpt2",
        "--fit-memory",
        "2GiB",
        "--max-seq-len",
        "1024",
        "--bandwidth",
        "10",
        "--quality-results",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "perplexity x1.250" in out and "finds 38%" in out and "perplexity: mine, 64 tokens" in out
    assert "not measured" in out and "lossless" in out
    for text, expected in (("{}", "has no costs"), ("[", "has no costs"), (None, "cannot read")):
        path = tmp_path / "other.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(DataError, match=expected):
            read_costs(path)


def test_packaged_costs_are_rewritten(tmp_path, monkeypatch):
    (tmp_path / LINES_FILE).write_text("".join(f"{json.dumps(each)}\n" for each in LINES))
    monkeypatch.setattr(fit, "PACKAGED_COSTS", tmp_path / "prices.json")
    fit.main([str(tmp_path)])
    assert read_costs(tmp_path / "prices.json") == (collect_costs(LINES),)


# ---------------------------------------------------------------- the command


def run(capsys, *arguments):
    code = main(["plan", *arguments, "--bandwidth", "10"])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_table_is_printed(capsys):
    code, out, err = run(
        capsys, "llama-3-8b", "--dtype", "bfloat16", "--fit-memory", "24GiB", "--compression-ratios", "0.6,0.75"
    )
    lines = out[out.index("in 24.00 GiB") :].splitlines()
    assert (code, err) == (0, "") and lines[1].split() == [
        "seqs",
        "tokens",
        "each",
        "takes",
        "stored",
        "policy",
        "quality",
    ]
    assert sum("not measured" in each for each in lines) == 2 * 3 * 3 and sum("lossless" in each for each in lines) == 2
    assert (
        sum("sinks(4, 508)" in each for each in lines) == 3
        and len({each for each in lines if "commit" in each}) == sum("commit" in each for each in lines) == 2
    )


def test_table_as_json(capsys):
    code, out, _ = run(
        capsys, "gpt2", "--fit-memory", "2GiB", "--max-seq-len", "256,1024", "--max-num-seqs", "3", "--json"
    )
    configurations = json.loads(out)["fit"]
    assert code == 0 and configurations["weights_too_large"] is None
    offered = configurations["table"]["rows"]
    assert {each["context"] for each in offered} >= {256, 1024} and any(each["num_seqs"] == 3 for each in offered)
    assert all(each["bytes"] <= configurations["bytes"] for each in offered)
    assert {"model", "digest", "perplexity_ratio", "kl", "recall"} == set(
        next(each["measured"] for each in offered if each["measured"])[0]
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["llama-3-8b", "--fit-memory", "20GiB"], "in bfloat16 they take 14.96 GiB: --dtype bfloat16"),
        (["llama-3-8b", "--fit-memory", "8GiB"], "and in bfloat16 still 6.96 GiB more"),
        (["llama-3-8b", "--fit-memory", "8GiB", "--dtype", "bfloat16"], "a smaller model would fit"),
    ],
)
def test_weights_that_do_not_fit(capsys, arguments, error):
    code, out, _ = run(capsys, *arguments)
    assert (
        code == 0
        and "not even one sequence of one block fits" in out
        and "the weights alone take" in out
        and error in out
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["gpt2", "--max-seq-len", "256,512"], "add the memory, as in --fit-memory 8GiB"),
        (["gpt2", "--max-num-seqs", "1,2"], "add the memory"),
        (["gpt2", "--fit-memory", "2GiB", "--compression-ratios", "1.5"], "must be between 0 and 1"),
        (["gpt2", "--fit-memory", "2GiB", "--compression-ratios", "half"], "'half' is not a list of numbers"),
        (["gpt2", "--fit-memory", "2GiB", "--max-num-seqs", "0,4"], "must be at least 1, got 0"),
        (["gpt2", "--fit-memory", "2GiB", "--quality-results", "nowhere"], "cannot read nowhere"),
        (["gpt2", "--max-seq-len", "a,b"], "'a,b' is not a list of whole numbers"),
    ],
)
def test_invalid_options_are_refused(capsys, arguments, error):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and error in err


def test_table_does_not_load_torch():
    program = (
        "import sys\nfrom kvad.cli.main import main\n"
        "code = main(['plan', 'gpt2', '--fit-memory', '4GiB', '--policy', 'snapkv(128)', '--bandwidth', '10'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "snapkv(128)" in ran.stdout, ran.stderr


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
