"""``kvad verify`` with policies, both ways of rotating and endless sequences: verdicts, losses, skipped cases."""

import dataclasses
import json

import pytest

from kvad.benchmarks.needle_tasks import LookupLanguage
from kvad.cache.config import CacheConfig
from kvad.cache.device.eviction import PerHeadMetadata
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.policy_parser import POLICIES, parse_policy
from kvad.cli.main import main
from kvad.config.layers import AlibiConfig, LearnedPositionsConfig, RopeConfig
from kvad.config.model import attention_specs
from kvad.errors import ConfigError
from kvad.verify.references import NeedleRecall
from kvad.verify.report import EXACT, POLICY_RULES, RULES
from kvad.verify.run import verify
from kvad.verify.scenario import SIZED, first_loss_length, parse_policies, sized_policy
from tests.support.cache_trace_models import make_looker
from tests.support.verify_models import FLAGS, OPTIONS, run_verify, tiny_model

BY_POSITION = ("window(8)", "sinks(2, 6)", "block-window(8)")
COMMAND = (*FLAGS, "--cache-dtype", "float64")

# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize("position", [RopeConfig(), AlibiConfig()], ids=["rope", "alibi"])
def test_policies_by_position_are_exact_and_their_loss_is_measured(position):
    rotates = ("write", "read") if isinstance(position, RopeConfig) else ("write",)
    report = run_verify(tiny_model(position=position), policies=BY_POSITION, rotates=rotates)
    assert [case.verdict for case in report.cases] == ["exact"] * (6 * len(rotates))
    assert all(case.structure <= EXACT and case.loss.kl_max > 1e-3 and case.loss.ratio != 1 for case in report.cases)
    assert report.rules == RULES + POLICY_RULES and not report.broken and not report.skipped


@pytest.mark.parametrize("name", POLICIES)
def test_every_registered_policy_is_verified(name):
    """A new policy needs only its size for the prompts, in ``SIZED``."""
    report = run_verify(tiny_model(), policies=parse_policies([name], 33, 4), rotates=("write", "read"))
    policy = parse_policy(sized_policy(name, 33, 4))
    lossy = policy.stateful is not None and name != "offload"
    assert {case.verdict for case in report.cases} == {"lossy by design" if lossy else "exact"}
    assert all(case.structure <= EXACT for case in report.cases)
    assert not [note for note in report.notes if "keeps all" in note]
    assert (report.cases[0].loss is None) == (name == "full")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["sinks(2, 6)", "tova(8, interval=4)", "tiered(8, quantized=8, interval=8)"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8/int4"])
def test_formats_and_policies_compose(policy, stored):
    options = {"policies": (policy,), "dtypes": (stored,), "layouts": ("paged",), "rotates": ("write", "read")}
    report = run_verify(tiny_model(), **options)
    assert all(case.structure <= EXACT and case.verdict != "broken" for case in report.cases)
    if stored == "float32":
        assert report.cases[0].verdict == ("exact" if policy.startswith("sinks") else "lossy by design")


def test_endless_sequences_exceed_the_limit():
    options = {"policies": (*BY_POSITION, "tova(8)"), "endless": True, "dtypes": ("float64", "int8")}
    report = run_verify(tiny_model(limit=40), **options)
    assert max(report.rows) > 40
    assert {(case.dtype, case.verdict) for case in report.cases} == {("float64", "exact"), ("int8", "lossy by design")}
    assert {case.memory.split()[2] for case in report.skipped} == {"tova(8)"}
    assert "layer 0 keeps all tokens" in report.skipped[0].reason


def test_bare_names_are_sized_for_the_prompts():
    sized = sized_policy("snapkv", 128, 16)
    assert parse_policies(["snapkv", "sinks(1,2)", "snapkv"], 128, 16) == (sized, "sinks(1,2)")
    assert len(parse_policies(["all"], 128, 16)) == len(POLICIES) == len(SIZED)
    assert parse_policies([], 128, 16) == ("full",)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        parse_policies(["windw"], 128, 16)


@pytest.mark.parametrize(("longest", "block"), [(2, 1), (12, 4), (33, 4), (129, 16), (600, 16), (50, 3)])
def test_sized_policies_evict_within_the_longest_sequence(longest, block):
    config = tiny_model().config
    for name in POLICIES:
        policy = sized_policy(name, longest, block)
        cache = CacheConfig(policy=policy, block_size=block, max_seq_len=longest, max_num_seqs=2)
        first_loss = first_loss_length(build_groups(attention_specs(config), cache))
        assert longest < 12 or first_loss is None or first_loss < longest, (name, first_loss)


# ---------------------------------------------------------------- impossible cases


def test_impossible_cases_are_skipped_with_a_reason():
    policies = ("full", "tiered(8, interval=8)")
    report = run_verify(tiny_model(position=AlibiConfig()), policies=policies, rotates=("write", "read"))
    assert len(report.cases) == 3 and len(report.skipped) == 5
    reasons = {case.memory: case.reason for case in report.skipped}
    assert "are demoted in whole blocks" in reasons["contiguous float64 tiered(8, interval=8)"]
    assert "no layer of this model rotates" in reasons["paged float64 rotate=read"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ("sinks(2, 6)",), "endless": True}, "learned positions are part of every key"),
        ({"policies": ("tiered(8, interval=8)",), "layouts": ("contiguous",)}, "are demoted in whole blocks"),
        ({"dtypes": ("int4-channel",)}, "int4-channel is for keys"),
    ],
)
def test_only_impossible_cases_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        run_verify(tiny_model(embedding=LearnedPositionsConfig(96), position=None), **options)


# ---------------------------------------------------------------- broken caches


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rotate", ["write", "read"])
@pytest.mark.parametrize("policy", ["sinks(2, 6)", "tova(8, interval=4)"])
@pytest.mark.parametrize("fault", ["mask", "position", "rotation", "scale", "cursor", "table", "layer", "neighbor"])
def test_fault_under_a_policy_is_named(fault, policy, rotate):
    options = {"policies": (policy,), "rotates": (rotate,), "layouts": ("paged",)}
    (case,) = run_verify(tiny_model(), **options, fault=fault).cases
    assert case.verdict == "broken" and case.finding.fault == fault, case.finding


def test_wider_window_than_the_policy_is_broken(monkeypatch):
    open_cache, widened = KVCache.open, set()

    def open_widened(self, model_input):
        if self not in widened:
            widened.add(self)
            specs = [group.spec._replace(window=group.spec.window and group.spec.window + 1) for group in self.groups]
            self.groups = tuple(group._replace(spec=spec) for group, spec in zip(self.groups, specs, strict=True))
            self.patterns = [spec.pattern for spec in specs]
        return open_cache(self, model_input)

    monkeypatch.setattr(KVCache, "open", open_widened)
    (case,) = run_verify(tiny_model(), policies=("window(8)",), layouts=("paged",)).cases
    assert case.verdict == "broken" and case.finding.fault == "mask"


def test_ranking_that_depends_on_other_sequences_is_broken(monkeypatch):
    """Only the comparison of each sequence with the same sequence alone shows it."""
    add = PerHeadMetadata.add
    mixed = lambda self, table, mass: add(self, table, mass + mass.sum(0, keepdim=True))  # noqa: E731
    monkeypatch.setattr(PerHeadMetadata, "add", mixed)
    options = {"policies": ("heavy-hitters(8, interval=4)",), "layouts": ("paged",), "tokens": 12}
    (case,) = run_verify(tiny_model(), **options).cases
    assert case.verdict == "broken" and case.finding is None
    assert "the same sequence alone" in case.reason


def test_swapped_sequence_without_its_blocks_is_broken(monkeypatch):
    monkeypatch.setattr(KVCache, "_swap", lambda *_: None)
    (case,) = run_verify(tiny_model(), policies=("key-norm(8, interval=4)",), layouts=("paged",)).cases
    assert case.verdict == "broken" and "swapped blocks of this sequence are lost" in case.reason


# ---------------------------------------------------------------- needles


def test_recall_of_a_model_that_looks_keys_up():
    model, tokenizer = make_looker(limit=256)
    fields = {"policies": ("full", "window(8)", "tiered(128, interval=128)"), "layouts": ("paged",)}
    fields |= {"dtypes": ("float32",), "prefill_chunk_size": 16, "block_size": 16, "tokens": 16}
    options = dataclasses.replace(OPTIONS, **fields)
    report = verify(model, [[1, 2, 3] * 35, [4, 5], [6]], options, language=LookupLanguage(tokenizer))
    full, window, tiered = report.cases
    assert full.loss is None
    assert (window.loss.recall.full, tiered.loss.recall.recall) == (1.0, 1.0) and window.loss.recall.recall < 0.5


def test_recall_of_a_cache_with_a_block_store():
    model, tokenizer = make_looker(limit=256)
    needles = NeedleRecall(model, LookupLanguage(tokenizer), 128)
    assert needles.recall(CacheConfig(max_num_seqs=1, max_seq_len=128, prefix_cache_ram=1 << 20)).recall == 1.0


def test_recall_that_cannot_be_measured_has_a_reason():
    model, tokenizer = make_looker(limit=64)
    assert NeedleRecall(model, None, 64).reason == "the checkpoint has no tokenizer"
    assert "does not fit in 3 tokens" in NeedleRecall(model, LookupLanguage(tokenizer), 3).reason
    untrained = tiny_model(vocab=tokenizer.vocab_size)
    assert "too few to compare caches" in NeedleRecall(untrained, LookupLanguage(tokenizer), 64).reason


# ---------------------------------------------------------------- the command


def test_printed_page_has_losses_and_skipped_cases(checkpoint, capsys):
    options = ("--policy", "sinks(2,6)", "--policy", "tiered", "--rope-at", "both")
    assert main(["verify", checkpoint, *COMMAND, *options]) == 0
    out = capsys.readouterr().out
    assert "contiguous float64 tiered(4, quantized=4, interval=8, summaries=4, ratio=2) and 1 more: cache.policy" in out
    assert "note       recall is not measured: a single task does not fit" in out
    assert "\nloss of " in out and "paged float64 sinks(2,6) rotate=read" in out
    assert out.splitlines()[-1].startswith("verdict: exact (paged float64 sinks(2,6), contiguous")


def test_json_has_the_policies(checkpoint, capsys):
    assert main(["verify", checkpoint, *COMMAND, "--policy", "all", "--layout", "contiguous", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cases"]) == len(POLICIES) - 3 and len(result["skipped"]) == 3 and len(result["rules"]) == 15
    case = result["cases"][1]
    expected = {"policy": "window(8)", "rotate": "write", "endless": False, "verdict": "exact"}
    assert case.items() >= expected.items() and case["loss"]["recall"] is None
    assert case["loss"]["ratio"] == pytest.approx(case["loss"]["perplexity"] / case["loss"]["reference_perplexity"])


def test_broken_policy_exits_1(checkpoint, capsys):
    assert main(["verify", checkpoint, *COMMAND, "--policy", "sinks(2,6)", "--inject-fault", "table"]) == 1
    assert "fault      table" in capsys.readouterr().out
