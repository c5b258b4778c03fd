"""``--speculative`` and ``--draft-model``: the same texts, counts of drafts, and memory that is planned."""

import json
import re

import pytest

from kvad.errors import ConfigError
from kvad.llm import LLM
from tests.support.cli_checkpoints import write_model

GENERATE = "generate --max-tokens 24 --ignore-eos --seed 4 --json --stats --temperature"
PROMPT = "hey you hey you hey you"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_change_no_text(kvad, model, temperature):
    def answer(*flags):
        result = kvad(f"{GENERATE} {temperature}", model, PROMPT, "what is", *flags)
        assert result.code == 0, result.err
        record = json.loads(result.out)
        return [each["choices"] for each in record["completions"]], record["stats"]

    base, stats = answer()
    assert stats["draft_tokens"] == stats["accepted_tokens"] == 0
    choices, stats = answer("--speculative", "ngram:3")
    assert choices == base and (stats["draft_tokens"] > 0 or temperature > 0)
    choices, stats = answer("--draft-model", model, "--speculative", "draft:3")
    assert choices == base and 0.9 < stats["accepted_tokens"] / stats["draft_tokens"] <= 1 and stats["steps"] < 20


def test_the_rate_is_printed(kvad, model):
    result = kvad(f"generate {model} 'hey you' -n 12 --temperature 0 --draft-model {model} --stats")
    assert re.search(r"speculation \d+ of \d+ drafts accepted \(\d+%\), \d+\.\d+ ms per token to draft", result.err)
    assert "speculation" not in kvad(f"generate {model} 'hey you' -n 12 --temperature 0 --stats").err


def test_a_chat_drafts(kvad, model):
    plain = kvad(f"chat {model} --temperature 0 -n 12", stdin=b"hey you hey you\n")
    drafted = kvad(f"chat {model} --temperature 0 -n 12 --speculative ngram", stdin=b"hey you hey you\n")
    assert plain.code == drafted.code == 0 and plain.out == drafted.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--speculative ngrams", "speculative.method: "),
        ("--speculative ngram:0", "speculative.num_tokens: "),
        ("--speculative draft", "--speculative draft: no draft model is given"),
        ("--speculative ngram --draft-model x", "--draft-model: --speculative ngram does not use it"),
        ("--draft-model x --speculative draft:99", "speculative.num_tokens: "),
        ("--speculative ngram --policy tova(8)", "speculative: policy tova"),
    ],
)
def test_invalid_options(kvad, model, flags, message):
    result = kvad(f"generate {model} a {flags}")
    assert result.code != 0 and message in result.err and "Traceback" not in result.err and not result.out


def test_a_draft_model_needs_the_same_tokenizer(model, tmp_path):
    other = write_model(tmp_path / "other", tokenizer=False)
    with pytest.raises(ConfigError, match=r"speculative.draft_model: .* has another tokenizer"):
        LLM.load(model, speculative={"method": "draft", "draft_model": str(other)})


def test_the_draft_model_is_planned(kvad, model):
    def plan(*flags):
        return json.loads(kvad(f"plan {model} --json --max-num-seqs 4", *flags).out)["bytes"]

    base, ngram, draft = plan(), plan("--speculative", "ngram:4"), plan("--draft-model", model)
    assert base["draft_bytes"] == ngram["draft_bytes"] == 0
    assert ngram["activations"] >= base["activations"]
    assert draft["draft_bytes"] >= base["weights"] + base["pool"]
    assert draft["total"] - draft["draft_bytes"] == plan("--speculative", "ngram")["total"]
    assert "draft model" in kvad(f"plan {model} --draft-model {model}").out
    with LLM.load(model, max_num_seqs=2, speculative={"method": "draft", "draft_model": str(model)}) as llm:
        plan_of_draft, drafter = llm.memory_plan.draft, llm.engine.scheduler.drafter
        assert plan_of_draft.pool == sum(tensor.nbytes for tensor in drafter.kv_cache.tensors())
        assert plan_of_draft.weights == sum(each.nbytes for each in drafter.runner.model.state_dict().values())


def test_memory_that_is_too_small_for_the_draft_model_is_refused(kvad, model):
    plan = json.loads(kvad(f"plan {model} --json --max-seq-len 16").out)["bytes"]
    result = kvad(f"generate {model} a -n 4 --memory {plan['total'] + 1000} --draft-model {model}")
    assert result.code == 2 and "memory: " in result.err


def test_verify_drafts(kvad, model):
    result = kvad(f"verify {model} --layout paged --cache-dtype float32 --num-prompts 2 --speculative ngram:3")
    assert result.code == 0 and re.search(r"\d+ drafts, [1-9]\d* drafts rejected", result.out)
    assert "rejected" not in kvad(f"verify {model} --layout paged --cache-dtype float32 --num-prompts 2").out
    result = kvad(f"verify {model} --speculative draft")
    assert result.code == 2 and "speculative" in result.err
