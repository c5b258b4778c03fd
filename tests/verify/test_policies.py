"""``kvad verify`` over the whole product: policies, ways of rotating, endless rows; what is skipped, what is lost."""

import dataclasses
import json

import pytest
import torch

from kvad.benchmarks.needle_tasks import LookupLanguage
from kvad.cache.config import CacheConfig
from kvad.cache.device.eviction import PerHeadMetadata
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.policy_parser import POLICIES, parse_policy
from kvad.checkpoint.native import save_checkpoint
from kvad.cli.main import main
from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    LayerConfig,
    LearnedPositionsConfig,
    RopeConfig,
    StackConfig,
)
from kvad.config.model import ModelConfig, attention_specs
from kvad.errors import ConfigError, UsageError
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionPattern
from kvad.text.simple_tokenizers import ByteTokenizer
from kvad.verify.cases import SIZED, first_loss_length, parse_policies, sized_policy
from kvad.verify.references import NeedleRecall
from kvad.verify.report import EXACT, POLICY_RULES, RULES
from kvad.verify.run import verify
from kvad.verify.scenario import ScenarioOptions, build_prompts
from tests.support.cache_trace_models import make_looker

OPTIONS = ScenarioOptions(num_seqs=3, prefill_chunk_size=8, block_size=4, tokens=8, dtypes=("float64",))
MASKS, RANKED = (
    ("window(8)", "sinks(2, 6)", "block-window(8)"),
    ("heavy-hitters(8, interval=4)", "random(8, interval=4)"),
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(vocab=64, limit=96, absolute=None, layers=2, **mixer):
    torch.manual_seed(0)
    kinds = {"L": LayerConfig(AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, **mixer}), GatedMLPConfig(48))}
    stack = StackConfig(num_layers=layers, layer_types=kinds)
    model = Transformer(
        ModelConfig(
            hidden_size=32, vocab_size=vocab, max_seq_len=limit, decoder=stack, embedding=EmbeddingConfig(absolute)
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return model.eval().requires_grad_(False)


def run(model, fault=None, language=None, **options):
    asked = dataclasses.replace(OPTIONS, **options)
    return verify(model, build_prompts(model.config, asked, None), asked, fault=fault, language=language)


# ---------------------------------------------------------------- what holds


@pytest.mark.parametrize("position", [RopeConfig(), AlibiConfig()], ids=["rope", "alibi"])
def test_a_policy_by_position_is_exact_and_says_what_it_hides(position):
    rotates = ("write", "read") if isinstance(position, RopeConfig) else ("write",)
    report = run(tiny(position=position), policies=MASKS, rotates=rotates)
    assert [m.verdict for m in report.cases] == ["exact"] * (6 * len(rotates))
    assert all(m.structure <= EXACT and m.loss.kl_max > 1e-3 and m.loss.ratio != 1 for m in report.cases)
    assert report.rules == RULES + POLICY_RULES and not report.broken and not report.skipped


@pytest.mark.parametrize("name", POLICIES)
def test_one_of_each_kind_holds(name):
    """A new policy is verified by being registered; its size for the prompts stands in ``SIZED``."""
    report = run(tiny(), policies=parse_policies([name], 33, 4), rotates=("write", "read"))
    mask = parse_policy(sized_policy(name, 33, 4))
    lossy = (mask.eviction, mask.tiered, mask.sparse_read) != (None, None, None) and name != "offload"
    assert {m.verdict for m in report.cases} == {"lossy by design" if lossy else "exact"}
    assert all(m.structure <= EXACT for m in report.cases)
    assert not [note for note in report.notes if "keeps all" in note]
    assert (report.cases[0].loss is None) == (name == "full")


@pytest.mark.parametrize("policy", ["sinks(2, 6)", "tova(8, interval=4)", "tiered(8, quantized=8, interval=8)"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8/int4"])
def test_formats_and_policies_compose(policy, stored):
    report = run(tiny(), policies=(policy,), dtypes=(stored,), layouts=("paged",), rotates=("write", "read"))
    assert all(m.structure <= EXACT and m.verdict != "broken" for m in report.cases)
    if stored == "float32":
        assert report.cases[0].verdict == ("exact" if policy.startswith("sinks") else "lossy by design")


def test_rows_without_an_end_pass_the_limit():
    report = run(tiny(limit=40), policies=(*MASKS, "tova(8)"), endless=True, dtypes=("float64", "int8"))
    assert max(report.rows) > 40
    assert {(m.dtype, m.verdict) for m in report.cases} == {("float64", "exact"), ("int8", "lossy by design")}
    assert {each.memory.split()[2] for each in report.skipped} == {"tova(8)"}
    assert "layer 0 keeps all tokens" in report.skipped[0].reason


def test_bare_names_are_sized_for_the_prompts():
    assert parse_policies(["snapkv", "sinks(1,2)", "snapkv"], 128, 16) == (
        sized_policy("snapkv", 128, 16),
        "sinks(1,2)",
    )
    assert len(parse_policies(["all"], 128, 16)) == len(POLICIES) == len(SIZED)
    assert parse_policies([], 128, 16) == ("full",)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        parse_policies(["windw"], 128, 16)


@pytest.mark.parametrize(("longest", "block"), [(2, 1), (12, 4), (33, 4), (129, 16), (600, 16), (50, 3)])
def test_every_size_can_be(longest, block):
    config = tiny().config
    for name in POLICIES:
        cache = CacheConfig(
            policy=sized_policy(name, longest, block), block_size=block, max_seq_len=longest, max_num_seqs=2
        )
        cut = first_loss_length(build_groups(attention_specs(config), cache))
        assert longest < 12 or cut is None or cut < longest, (name, cut)


# ---------------------------------------------------------------- what cannot be


def test_what_cannot_be_is_skipped_and_said():
    report = run(tiny(position=AlibiConfig()), policies=("full", "tiered(8, interval=8)"), rotates=("write", "read"))
    assert len(report.cases) == 3 and len(report.skipped) == 5
    said = {each.memory: each.reason for each in report.skipped}
    assert "are demoted in whole blocks" in said["contiguous float64 tiered(8, interval=8)"]
    assert "no layer of this model rotates" in said["paged float64 rotate=read"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policies": ("sinks(2, 6)",), "endless": True}, "learned positions are part of every key"),
        ({"policies": ("tiered(8, interval=8)",), "layouts": ("contiguous",)}, "are demoted in whole blocks"),
        ({"dtypes": ("int4-channel",)}, "int4-channel is for keys"),
    ],
)
def test_where_nothing_can_be_it_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        run(tiny(absolute=LearnedPositionsConfig(96), position=None), **options)


def test_a_contiguous_hierarchy_is_refused_by_the_cache_itself():
    with pytest.raises(ConfigError, match="are demoted in whole blocks"):
        build_groups(
            attention_specs(tiny().config), CacheConfig(layout="contiguous", policy="tiered(8)", max_seq_len=64)
        )


# ---------------------------------------------------------------- it can object


@pytest.mark.parametrize("rotate", ["write", "read"])
@pytest.mark.parametrize("policy", ["sinks(2, 6)", "tova(8, interval=4)"])
@pytest.mark.parametrize("fault", ["mask", "position", "rotation", "scale", "cursor", "table", "layer", "neighbor"])
def test_a_fault_under_a_policy_is_named(fault, policy, rotate):
    report = run(tiny(), policies=(policy,), rotates=(rotate,), layouts=("paged",), fault=fault)
    (memory,) = report.cases
    assert memory.verdict == "broken" and memory.finding.fault == fault, memory.finding


def test_a_mask_that_is_not_the_policys_is_broken(monkeypatch):
    real = AttentionPattern.visible
    monkeypatch.setattr(KVCache, "open", widened(KVCache.open))
    report = run(tiny(), policies=("window(8)",), layouts=("paged",))
    assert real is AttentionPattern.visible and report.cases[0].verdict == "broken"
    assert report.cases[0].finding.fault == "mask"


def widened(open_):
    """A memory whose windows are a token wider."""

    def wider(self, step):
        if not getattr(self, "_wider", False):
            self._wider = True
            self.groups = tuple(
                g._replace(spec=g.spec._replace(window=g.spec.window and g.spec.window + 1)) for g in self.groups
            )
        return open_(self, step)

    return wider


def test_a_policy_that_looks_at_its_neighbours_is_broken(monkeypatch):
    """What nobody could see in one run: each row against itself alone."""
    add = PerHeadMetadata.add
    monkeypatch.setattr(
        PerHeadMetadata, "add", lambda self, table, mass: add(self, table, mass + mass.sum(0, keepdim=True))
    )
    report = run(tiny(), policies=("heavy-hitters(8, interval=4)",), layouts=("paged",))
    (memory,) = report.cases
    assert memory.verdict == "broken" and memory.finding is None
    assert "the same sequence alone" in memory.reason


def test_a_row_that_is_woken_with_nothing_is_broken(monkeypatch):
    monkeypatch.setattr(KVCache, "_swap", lambda *_: None)
    assert run(tiny(), policies=("key-norm(8, interval=4)",), layouts=("paged",)).broken


# ---------------------------------------------------------------- needles


def test_recall_beside_a_model_that_looks_keys_up():
    model, tokenizer = make_looker(limit=256)
    options = dataclasses.replace(
        OPTIONS, policies=("full", "window(8)", "tiered(128, interval=128)"), layouts=("paged",), dtypes=("float32",)
    )
    options = dataclasses.replace(options, prefill_chunk_size=16, block_size=16, tokens=16)
    report = verify(model, [[1, 2, 3] * 35, [4, 5], [6]], options, language=LookupLanguage(tokenizer))
    full, window, hierarchy = report.cases
    assert full.loss is None
    assert (window.loss.recall.full, hierarchy.loss.recall.recall) == (1.0, 1.0) and window.loss.recall.recall < 0.5


def test_without_a_language_or_room_recall_is_omitted_and_said():
    model, tokenizer = make_looker(limit=64)
    assert NeedleRecall(model, None, 64).reason == "the checkpoint has no tokenizer"
    assert "does not fit in 3 tokens" in NeedleRecall(model, LookupLanguage(tokenizer), 3).reason
    dull = tiny(vocab=tokenizer.vocab_size)
    assert "too few to compare caches" in NeedleRecall(dull, LookupLanguage(tokenizer), 64).reason


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("verify") / "model", ByteTokenizer()
    model = tiny(vocab=tokenizer.vocab_size)
    save_checkpoint(folder, model.config, model.state_dict(), tokenizer)
    return str(folder)


SMALL = ("--num-prompts", "3", "--prefill-chunk-size", "8", "--block-size", "4", "--max-tokens", "8")
SMALL += ("--cache-dtype", "float64")


def test_the_page_says_what_is_lost_and_what_is_skipped(checkpoint, capsys):
    asked = ("--policy", "sinks(2,6)", "--policy", "tiered", "--rope-at", "both")
    assert main(["verify", checkpoint, *SMALL, *asked]) == 0
    out = capsys.readouterr().out
    assert "contiguous float64 tiered(4, quantized=4, interval=8, summaries=4, ratio=2) and 1 more: cache.policy" in out
    assert "note       recall is not measured: a single task does not fit" in out
    assert "\nloss of " in out and "paged float64 sinks(2,6) rotate=read" in out
    assert out.splitlines()[-1].startswith("verdict: exact (paged float64 sinks(2,6), contiguous")


def test_json_has_the_policies(checkpoint, capsys):
    assert main(["verify", checkpoint, *SMALL, "--policy", "all", "--layout", "contiguous", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["cases"]) == len(POLICIES) - 3 and len(found["skipped"]) == 3
    memory = found["cases"][1]
    assert (memory["policy"], memory["rotate"], memory["endless"], memory["verdict"]) == (
        "window(8)", "write", False, "exact",
    )  # fmt: skip
    assert memory["loss"]["ratio"] == pytest.approx(
        memory["loss"]["perplexity"] / memory["loss"]["reference_perplexity"]
    )
    assert memory["loss"]["recall"] is None and len(found["rules"]) == 12


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--policy", "windw(3)"), "did you mean 'window'"),
        (("--policy", "sinks(3)"), "The signature is sinks(num_sinks, window)"),
        (("--endless",), "layer 0 keeps all tokens of a sequence"),
        (("--policy", "full", "--endless"), "Use a policy that drops old tokens"),
    ],
)
def test_bad_input(checkpoint, capsys, asked, says):
    assert main(["verify", checkpoint, *SMALL, *asked]) == 2
    assert says in capsys.readouterr().err


def test_a_broken_policy_exits_with_one(checkpoint, capsys):
    assert main(["verify", checkpoint, *SMALL, "--policy", "sinks(2,6)", "--inject-fault", "table"]) == 1
    assert "fault      table" in capsys.readouterr().out


def test_options_without_a_policy_are_refused():
    with pytest.raises(UsageError, match="nothing to verify"):
        ScenarioOptions(policies=())
