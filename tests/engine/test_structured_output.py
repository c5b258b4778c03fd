"""Structured output: every text has the form that was asked for, and nothing else changes.

The mask is compared with a search over the vocabulary, for tokenizers of every kind. Random weights make every text
that the mask allows likely, so a mask that allows too much is seen at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend

from kvad.cache.config import CacheConfig
from kvad.checkpoint import GenerationConfig
from kvad.engine import Engine
from kvad.engine.execution import grammar, sampler
from kvad.engine.execution.grammar import GrammarCompiler, allowed_tokens
from kvad.engine.options import EngineConfig
from kvad.engine.requests import resolve_sampling
from kvad.engine.scheduling import SamplingParams, StructuredOutput
from kvad.engine.scheduling.request import MAX_SAMPLES, TokenLogprob
from kvad.engine.scheduling.sequence import Request, RequestMetrics, TokenSequence
from kvad.engine.scheduling.structured_output import MAX_SOURCE_BYTES
from kvad.errors import RequestError, UsageError
from kvad.llm import LLM
from kvad.text import HFTokenizer, Tokenizer
from kvad.text.tokenizer import load_tokenizer, train_tokenizer
from tests.support.random_models import build, model_config, pair_config
from tests.support.tokenizer_zoo import library, spm_folder

CACHE = CacheConfig(dtype="float32", max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=8)
KINDS = ("byte", "char", "byte_level", "byte_fallback", "wordpiece", "unigram", "Llama", "T5")
SCRIPTS = ["Straße, naïve", "привет мир", "日本語です", "नमस्ते", "안녕 👩‍👩‍👧"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "zé"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def output(**kind: Any) -> StructuredOutput:
    return StructuredOutput.from_json(kind)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("spm")
    made: dict[str, Tokenizer] = {
        "byte": train_tokenizer("byte", [], specials=["eos"]),
        "char": train_tokenizer("char", [*SCRIPTS, 'abcdefgh world{}[]",:0123456789'], specials=["eos", "unk"]),
    }
    for kind in KINDS[2:6]:
        made[kind] = HFTokenizer(Backend.from_str(library(kind)))
    for family in KINDS[6:]:
        made[family] = load_tokenizer(spm_folder(folder / family, family))
    return made


@pytest.fixture(scope="module")
def compilers(tokenizers: dict[str, Tokenizer]) -> dict[str, GrammarCompiler]:
    return {kind: GrammarCompiler(tokenizer) for kind, tokenizer in tokenizers.items()}


def new_engine(tokenizer: Tokenizer, stop_tokens: tuple[int, ...] = (), **cache: Any) -> Engine:
    """Return an engine whose embedding has five rows without a token."""
    config = dataclasses.replace(model_config(), vocab_size=tokenizer.vocab_size + 5)
    cache_config = dataclasses.replace(CACHE, **cache)
    return Engine(
        build(config, dtype=torch.float32),
        cache_config,
        EngineConfig(stop_tokens=frozenset(stop_tokens)),
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="module")
def engine(tokenizers: dict[str, Tokenizer]) -> Engine:
    return new_engine(tokenizers["byte_level"])


@pytest.fixture
def checked() -> None:
    """Request the check of grammars in a child process, which other tests skip for speed."""


@pytest.fixture(autouse=True)
def _skip_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "checked" not in request.fixturenames:
        monkeypatch.setattr(grammar, "_check_in_process", lambda source: "")


@dataclasses.dataclass
class Sample:
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish: str | None = None
    error: str | None = None


def run(engine: Engine) -> dict[tuple[int, int], Sample]:
    samples: dict[tuple[int, int], Sample] = {}
    while not engine.idle:
        for chunk in engine.step():
            sample = samples.setdefault((chunk.request, chunk.sample_index), Sample())
            sample.text += chunk.text
            sample.tokens += [] if chunk.token_id is None else [chunk.token_id]
            sample.logprobs += [] if chunk.logprob is None else [chunk.logprob]
            sample.finish, sample.error = chunk.finish_reason or sample.finish, chunk.error or sample.error
        engine.scheduler.check()
    return samples


def generate(engine: Engine, form: StructuredOutput | None, **options: Any) -> list[Sample]:
    params = SamplingParams(**{"structured_output": form, "seed": 1, "temperature": 3.0, "max_tokens": 80, **options})
    request = engine.add_request([7, 8, 9], params)
    return [sample for key, sample in sorted(run(engine).items()) if key[0] == request]


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert re.fullmatch("[a-z]{1,5}", value["name"]) and 0 <= value["age"] <= 120 and type(value["age"]) is int
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"x", "yy", "zé"}


# ---------------------------------------------------------------- the value


def test_a_value_survives_json_and_is_a_key() -> None:
    forms = [
        output(json_schema=SCHEMA),
        output(json_object=True),
        output(regex="a+"),
        output(grammar='start: "a"'),
        output(choice=["é", "b"]),
    ]
    assert [StructuredOutput.from_json(json.loads(json.dumps(form.to_json()))) for form in forms] == forms
    assert len(set(forms)) == 5
    assert output(json_schema=json.dumps(SCHEMA, indent=3)) == forms[0], "white space of a schema has no meaning"
    assert output(choice='["é",  "b"]') == forms[4]
    other = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    assert output(json_schema=other) != forms[0], "the order of properties is the order of the text"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "must be an object with one of the keys json_schema, json_object, regex, grammar, choice"),
        ({"regex": "a", "choice": ["a"]}, "must be an object with one of the keys"),
        ("regex", "must be an object with one of the keys"),
        ({"regexp": "a"}, "unknown kind 'regexp'"),
        ({"json_object": False}, "json_object: must be true"),
        ({"json_object": "{}"}, "json_object: must be true"),
        ({"regex": ""}, "regex: must not be empty"),
        ({"regex": ["a"]}, "regex: must be text, got list"),
        ({"regex": "\ud800"}, "regex: contains a lone surrogate"),
        ({"grammar": "x" * (MAX_SOURCE_BYTES + 1)}, "grammar: must have at most 131,072 bytes, got 131,073"),
        ({"json_schema": "[1]"}, "json_schema: must be an object, got list"),
        ({"json_schema": '{"a": NaN}'}, "json_schema: line 1, column 7: NaN is not a JSON number"),
        ({"json_schema": '{"a": 1, "a": 2}'}, "json_schema: an object contains 'a' twice"),
        ({"json_schema": {"a": math.inf}}, "json_schema: Out of range float values"),
        ({"json_schema": {"a": {1}}}, "json_schema: set is no JSON value"),
        ({"json_schema": nested(120)}, "json_schema: line 1, column .*nested too deeply, beyond 100 levels"),
        ({"json_schema": nested(5000)}, "json_schema: nested too deeply"),
        ({"json_schema": "{" * 60_000}, "json_schema: line 1"),
        ({"choice": []}, "choice: must be a list of texts that are not empty"),
        ({"choice": ["a", ""]}, "choice: must be a list of texts that are not empty"),
        ({"choice": [1]}, "choice: must be a list of texts that are not empty"),
        ({"choice": "yes"}, "choice: line 1, column 1"),
    ],
)
def test_values_of_a_wrong_form_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_output: {message}") as error:
        StructuredOutput.from_json(value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_beams_are_refused_and_beams_of_a_checkpoint_are_dropped() -> None:
    with pytest.raises(RequestError, match="structured_output: cannot be combined with num_beams=2"):
        SamplingParams(num_beams=2, structured_output=output(regex="a"))
    with pytest.raises(RequestError, match="structured_output"):
        SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type]
    generation = GenerationConfig(sampling={"num_beams": 4, "temperature": 0.0})
    params = resolve_sampling({"structured_output": output(regex="a")}, generation)
    assert (params.num_beams, params.temperature) == (1, 0.0)


# ---------------------------------------------------------------- compiling


BOMBS = {
    "nested groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "nested alternatives": {"regex": "(a|" * 3000 + "b" + ")*" * 3000},
    "chain of rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'},
    "chain of terminals": {
        "grammar": "start: R0\n" + "\n".join(f'R{i}: R{i + 1} "x"' for i in range(6000)) + '\nR6000: "a"'
    },
    "nested parentheses": {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
    "rules without an end": {"grammar": "start: start"},
    "chain of references": {
        "json_schema": {
            "$ref": "#/definitions/d0",
            "definitions": {
                f"d{i}": {"type": "array", "items": {"$ref": f"#/definitions/d{i + 1}"}} for i in range(2000)
            }
            | {"d2000": {}},
        }
    },
    "reference to itself": {"json_schema": {"$ref": "#"}},
    "references in a circle": {
        "json_schema": {
            "anyOf": [{"$ref": "#/definitions/a"}],
            "definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"$ref": "#/definitions/a"}},
        }
    },
    "intersections": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}, "required": [f"p{i}{j}"]} for j in range(7)]}
                for i in range(7)
            ]
        }
    },
    "a large divisor": {"json_schema": {"type": "integer", "multipleOf": 1_000_003}},
}
# These look as bad, but are small automata that are built while they are used.
TAME = {
    "repetition of repetition": {"regex": "(a{1000}){1000}"},
    "backtracking": {"regex": "(a+)+b"},
    "backtracking, many": {"regex": "(a|aa)+" * 30 + "b"},
    "huge bounds": {"json_schema": {"type": "string", "maxLength": 10**9, "minLength": 10**6}},
    "a recursive reference": {
        "json_schema": {
            "$ref": "#/definitions/tree",
            "definitions": {"tree": {"type": "array", "items": {"$ref": "#/definitions/tree"}, "maxItems": 2}},
        }
    },
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.usefixtures("checked")
def test_bombs_end_quickly_with_one_line(name: str, compilers: dict[str, GrammarCompiler]) -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=r"^structured_output: (regex|grammar|json_schema): ") as error:
        compilers["byte_level"].compile(StructuredOutput.from_json(BOMBS[name]))
    assert time.process_time() - start < 1, "of this process; the limit of the other one is a second, too"
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("name", TAME)
@pytest.mark.usefixtures("checked")
def test_what_only_looks_like_a_bomb_runs(name: str, engine: Engine) -> None:
    (sample,) = generate(engine, StructuredOutput.from_json(TAME[name]), max_tokens=30)
    assert sample.error is None and sample.tokens


@pytest.mark.parametrize("part", ["[\n", "\n", "[", '"\\', "/\\", '"', "[temperature ", "#", "x[a]\n"])
def test_attributes_of_rules_are_searched_in_linear_time(part: str) -> None:
    start = time.process_time()
    grammar.grammar_source(output(grammar=part * (65536 // len(part))))
    assert time.process_time() - start < 1


def test_texts_comments_and_patterns_are_no_attributes() -> None:
    lark = 'start[capture]: "[max_tokens=1]" /[ temperature=\\/]/ x // max_tokens=\nx: "\\"max_tokens=" # temperature='
    assert "temperature=" in grammar.grammar_source(output(grammar=lark))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"regex": "a("}, "regex: unclosed group"),
        ({"regex": "(?=a)b"}, "regex: look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"\bfoo"}, "regex: .*lookarounds not supported"),
        ({"grammar": "start: x"}, 'grammar: at 1.8.: unknown name: "x"'),
        ({"grammar": "start: <|eos|>"}, "grammar: a special token has no text and cannot be generated"),
        ({"grammar": 'start: x\nx[temperature=0.5]: "a"'}, "grammar: temperature is not supported in a rule"),
        ({"grammar": "start[capture, max_tokens=2]: /.+/"}, "grammar: max_tokens is not supported in a rule"),
        (
            {"grammar": 'start: "\\"" /"/ // "\n x-y[stop="]", max_tokens=2]: /.+/'},
            "grammar: max_tokens is not supported",
        ),
        ({"json_schema": {"x-guidance": 3}}, "json_schema: x-guidance: must be an object, got int"),
        ({"json_schema": {"x-guidance": {"foo": 3}}}, "json_schema: unknown field `foo`"),
        (
            {"json_schema": {"$ref": "file:///etc/hostname"}},
            "json_schema: Resource 'file:///etc/hostname' is not present",
        ),
        ({"grammar": 'start: ""'}, "grammar: allows no text"),
        ({"json_schema": {"not": {"type": "string"}}}, 'json_schema: Unimplemented keys: ."not".'),
        ({"json_schema": {"type": "array", "items": {"if": {}}}}, 'json_schema: Unimplemented keys: ."if".'),
        ({"json_schema": {"uniqueItems": True}}, 'json_schema: Unimplemented keys: ."uniqueItems".'),
        ({"json_schema": {"type": "objekt"}}, "json_schema: Invalid type: objekt"),
        ({"json_schema": {"enum": []}}, "json_schema: Unsatisfiable schema"),
        ({"json_schema": {"$ref": "https://example.org/x.json"}}, "json_schema: Resource"),
    ],
)
@pytest.mark.usefixtures("checked")
def test_what_cannot_be_compiled_is_refused_by_name(
    value: Any, message: str, compilers: dict[str, GrammarCompiler]
) -> None:
    with pytest.raises(RequestError, match=f"^structured_output: {message}") as error:
        compilers["byte_level"].compile(StructuredOutput.from_json(value))
    assert "\n" not in str(error.value)


def test_a_vocabulary_that_cannot_begin_the_text_is_refused(compilers: dict[str, GrammarCompiler]) -> None:
    with pytest.raises(RequestError, match="choice: no token of this vocabulary can continue the text"):
        compilers["char"].compile(output(choice=["ж"]))


def test_requirements_are_named(monkeypatch: pytest.MonkeyPatch, tokenizers: dict[str, Tokenizer]) -> None:
    form = output(regex="a")
    with pytest.raises(RequestError, match="structured_output: requires a tokenizer"):
        GrammarCompiler(None).compile(form)
    with pytest.raises(RequestError, match="structured_output: the text of a token of this word tokenizer varies"):
        GrammarCompiler(train_tokenizer("word", ["a b"])).compile(form)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"^structured_output: requires the package llguidance .*kvad\[structured\]"):
        GrammarCompiler(tokenizers["byte"]).compile(form)


def test_grammars_are_cached_up_to_a_number(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    compiler = GrammarCompiler(tokenizers["byte"])
    forms = [output(regex=text) for text in "abc"]
    first = compiler.compile(forms[0])
    compiler.compile(forms[1])
    assert compiler.compile(output(regex="a")) is first
    compiler.compile(forms[2])
    assert compiler.compile(forms[0]) is first, "the one that was not used for the longest time is dropped"
    assert len(compiler._cache) == 2


# ---------------------------------------------------------------- the mask


def sequence(compiler: GrammarCompiler, form: StructuredOutput, tokens: list[int], **options: Any) -> TokenSequence:
    """Return a sample whose prompt is one token, and whose end tokens are 1 and 2."""
    params = SamplingParams(structured_output=form, seed=0, **options)
    request = Request(0, 0, params, b"", frozenset({1, 2}), RequestMetrics(1, 0.0), grammar=compiler.compile(form))
    seq = TokenSequence(request, 0, [0], 1 << 60)
    seq.token_ids += tokens
    return seq


def continuations(tokenizer: Tokenizer, texts: list[str], tokens: list[int], ends: set[int]) -> set[int]:
    """Search the vocabulary for the tokens after which the text is the beginning of one of ``texts``."""
    wholes = [text.encode() for text in texts]
    decode = tokenizer.incremental_decoder()
    before = b"".join(map(decode, tokens))
    allowed = set(ends) if before in wholes else set()
    for token in set(range(tokenizer.vocab_size)) - ends - set(tokenizer.special_tokens.names().values()):
        one = tokenizer.incremental_decoder()
        text = b"".join(map(one, [*tokens, token]))
        if text != before and any(whole.startswith(text) for whole in wholes):
            allowed.add(token)
    return allowed


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_what_a_search_over_the_vocabulary_finds(
    kind: str, tokenizers: dict[str, Tokenizer], compilers: dict[str, GrammarCompiler]
) -> None:
    tokenizer, texts = tokenizers[kind], ["a", "a bed", " a", "bad  cab", "cab", "cabbage a", "the and"]
    form, size = output(choice=texts), tokenizer.vocab_size + 5
    generator = torch.Generator().manual_seed(0)
    ended = 0
    for _ in range(6):
        seq = sequence(compilers[kind], form, [])
        while True:
            (mask,) = allowed_tokens([seq], size)
            allowed = set(mask.nonzero()[0].tolist())
            assert allowed == continuations(tokenizer, texts, seq.token_ids[1:], {1, 2})
            choices = sorted(allowed - {1, 2})
            if not choices:
                break
            seq.token_ids.append(choices[int(torch.randint(len(choices), (1,), generator=generator))])
        ended += tokenizer.decode(seq.token_ids[1:]) in texts
    assert ended, "no text was completed"


def test_special_tokens_and_rows_beyond_the_vocabulary_are_never_allowed(
    tokenizers: dict[str, Tokenizer], compilers: dict[str, GrammarCompiler]
) -> None:
    for kind, tokenizer in tokenizers.items():
        specials = sorted(set(tokenizer.special_tokens.names().values()) - {1, 2})
        for form in (output(regex="(.|\n)+"), output(grammar="start: <[0-40]>+")):
            (mask,) = allowed_tokens([sequence(compilers[kind], form, [])], tokenizer.vocab_size + 5)
            assert mask.any() and not mask[specials].any() and not mask[tokenizer.vocab_size :].any()
            assert not mask[[1, 2]].any(), "an end token where no text may end"


def test_the_mask_is_a_function_of_the_tokens(compilers: dict[str, GrammarCompiler]) -> None:
    """Tokens that are taken back, replaced or given at once: as if they had been there from the start."""
    form, compiler = output(regex="(ab|ba|c)+d"), compilers["byte"]
    seq = sequence(compiler, form, [])
    histories = ["", "a", "ab", "abc", "ab", "ba", "b", "", "cccabab", "cccabb", "cccabba", "cd", "c", "cd", "ab"]
    for text in histories:
        seq.token_ids[1:] = list(text.encode())
        fresh = sequence(compiler, form, list(text.encode()))
        together = allowed_tokens([seq, fresh], 300)
        assert together[0].tolist() == together[1].tolist(), text
    assert sum(together[0]) == 4
    seq.token_ids[1:] = list(b"ax")
    with pytest.raises(RequestError, match=r"^structured_output: "):
        allowed_tokens([seq], 300)
    seq.token_ids[1:] = list(b"a")
    assert allowed_tokens([seq], 300)[0].nonzero()[0].tolist() == [ord("b")], "an error is one of its tokens only"


def test_other_rows_keep_their_bits(compilers: dict[str, GrammarCompiler]) -> None:
    mine = sequence(compilers["byte"], output(regex="a|b"), [])
    other = TokenSequence(Request(1, 1, SamplingParams(seed=0), b"", frozenset(), RequestMetrics(1, 0.0)), 0, [0], 9)
    scores = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    before = scores.clone()
    out = sampler.apply_structured_output(scores, [other, mine, other])
    assert torch.equal(scores, before) and torch.equal(out[[0, 2]], before[[0, 2]])
    assert out[1].isfinite().nonzero().squeeze(-1).tolist() == [97, 98]
    assert torch.equal(out[1, 97:99], before[1, 97:99])
    alone = sampler.apply_structured_output(scores[1:2], [mine])
    assert torch.equal(alone, out[1:2])


def test_a_forced_end_does_not_cut_a_text_and_a_forced_first_token_precedes_it(
    compilers: dict[str, GrammarCompiler],
) -> None:
    scores = torch.zeros(1, 300)
    for text, expected in (("a", [ord("b")]), ("ab", [256])):
        seq = sequence(compilers["byte"], output(regex="ab(ab)*"), list(text.encode()), forced_eos_token_id=256)
        seq.stop_tokens, seq.max_len = frozenset({256}), len(seq.token_ids) + 1
        masked = sampler.apply_structured_output(scores, [seq])
        assert sampler.apply_forced_tokens(masked, [seq]).isfinite().nonzero()[:, 1].tolist() == expected
    seq = sequence(compilers["byte"], output(regex="ab"), [], forced_bos_token_id=257)
    assert sampler.apply_structured_output(scores, [seq]) is scores
    assert sampler.apply_forced_tokens(scores, [seq]).isfinite().nonzero()[:, 1].tolist() == [257]
    seq.token_ids.append(257)
    assert sampler.apply_structured_output(scores, [seq]).isfinite().nonzero()[:, 1].tolist() == [97]


# ---------------------------------------------------------------- generation

FORMS = {
    "schema": (output(json_schema=SCHEMA), None),
    "regex": (output(regex="[a-d]{3}-[0-9]{1,4}"), re.compile("[a-d]{3}-[0-9]{1,4}")),
    "choice": (output(choice=["yes", "no", "maybe not"]), re.compile("yes|no|maybe not")),
    "lark": (
        output(grammar='start: sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]{0,2}/'),
        re.compile(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}"),
    ),
}


@pytest.mark.parametrize("kind", ["byte", "byte_level", "byte_fallback", "wordpiece", "Llama"])
def test_texts_have_the_form(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    engine = new_engine(tokenizer, tuple(tokenizer.special_tokens.end_ids) or (2,))
    forms = [name for name in FORMS if kind != "wordpiece" or name in ("choice",)]  # a space is before each word
    for name in forms:
        form, pattern = FORMS[name]
        samples = generate(engine, form, n=4, presence_penalty=0.5, repetition_penalty=1.1, logprobs=0)
        for sample in samples:
            assert (sample.finish, sample.error) == ("stop", None)
            check_schema(sample.text) if pattern is None else None
            assert pattern is None or pattern.fullmatch(sample.text), sample.text
            ends = set(tokenizer.special_tokens.end_ids)
            assert tokenizer.decode([token for token in sample.tokens if token not in ends]) == sample.text
            assert max(sample.tokens) < tokenizer.vocab_size and len(sample.logprobs) == len(sample.tokens)
        assert len({sample.text for sample in samples}) > 1 or name == "choice"
        again = generate(engine, form, n=4, presence_penalty=0.5, repetition_penalty=1.1)
        assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]


@pytest.mark.parametrize("kind", ["byte", "char", "byte_level", "byte_fallback", "Llama"])
def test_choices_in_five_scripts_come_out_whole(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    engine = new_engine(tokenizers[kind])
    texts = {sample.text for seed in range(3) for sample in generate(engine, output(choice=SCRIPTS), n=8, seed=seed)}
    assert texts <= set(SCRIPTS) and len(texts) >= 2
    for text in SCRIPTS:
        (sample,) = generate(engine, output(choice=[text]))
        assert (sample.text, sample.finish) == (text, "stop")


def test_any_object_is_json_with_bounded_space(engine: Engine) -> None:
    samples = [sample for seed in range(6) for sample in generate(engine, output(json_object=True), n=4, seed=seed)]
    assert all(sample.error is None for sample in samples)
    done = [sample.text for sample in samples if sample.finish == "stop"]
    assert done and all(isinstance(json.loads(text), dict) for text in done)
    assert all(not re.search(r"[\[{:,]\s{22}", sample.text) for sample in samples)
    spaced = generate(engine, output(json_schema={"type": "object", "x-guidance": {"whitespace_flexible": False}}), n=4)
    assert all(not re.match(r"\{\s", sample.text) for sample in spaced)


def test_a_complete_text_ends_at_once_and_others_at_end_tokens_or_limits(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte"]
    end, digit = tokenizer.special_tokens.eos, ord("7")
    assert end is not None
    engine = new_engine(tokenizer)
    whole, digits = output(regex="[ab]{3}"), output(regex="[0-9]+")
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 9}, {"max_tokens": 3}):
        (sample,) = generate(engine, whole, **options)
        assert (sample.finish, len(sample.tokens), len(sample.text)) == ("stop", 3, 3)
    (sample,) = generate(engine, whole, max_tokens=2)
    assert (sample.finish, len(sample.text)) == ("length", 2)
    (sample,) = generate(engine, digits, logit_bias={end: 1000, digit: 500})
    assert (sample.finish, sample.text, sample.tokens) == ("stop", "7", [digit, end])
    (sample,) = generate(engine, digits, logit_bias={end: 1000, digit: 500}, min_tokens=4)
    assert (sample.finish, sample.text, sample.tokens) == ("stop", "7777", [*[digit] * 4, end])
    (sample,) = generate(engine, digits, logit_bias={end: 1000}, ignore_eos=True, max_tokens=30)
    assert sample.finish == "length" and re.fullmatch("[0-9]{30}", sample.text)
    (sample,) = generate(engine, digits, stop_token_ids=(digit,), logit_bias={digit: 1000})
    assert sample.finish == "stop" and re.fullmatch("[0-9]+", sample.text) and sample.tokens[-1] == digit
    assert sample.text.count("7") == 0, "an end token is no text, and comes only where the text may end"


def test_stop_strings_samples_seeds_and_penalties_together(engine: Engine) -> None:
    form = output(regex="([a-d] ){2,6}stop here")
    options: dict[str, Any] = {"frequency_penalty": 0.3, "top_p": 0.95, "bad_words_ids": ((97,),), "n": 4}
    cut = generate(engine, form, stop=("d ", " here"), **options)
    for sample, whole in zip(cut, generate(engine, form, **options), strict=True):
        assert sample.finish == whole.finish == "stop"
        assert re.fullmatch("([a-d] ){2,6}stop here", whole.text)
        end = min(whole.text.find(stop) for stop in ("d ", " here") if stop in whole.text)
        assert sample.text == whole.text[:end]
        assert whole.tokens[: len(sample.tokens)] == sample.tokens


def test_neighbors_have_the_same_tokens_as_alone(engine: Engine) -> None:
    form = output(json_schema=SCHEMA)
    prompts: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 6, 7], {"temperature": 0.0, "logprobs": 2}),
        ([9, 8], {"structured_output": form, "seed": 4, "logprobs": 1}),
        ([10, 11, 12, 13], {"seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}),
        ([5, 6, 7], {"structured_output": output(regex="[a-c]{20}"), "seed": 4}),
    ]
    alone = []
    for prompt, options in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=24, **options))
        alone += run(engine).values()
    for prompt, options in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=24, **options))
    together = [sample for _, sample in sorted(run(engine).items())]
    assert [sample.tokens for sample in together] == [sample.tokens for sample in alone]
    assert [sample.text for sample in together] == [sample.text for sample in alone]


def test_logprobs_are_those_of_the_raw_logits(engine: Engine) -> None:
    (sample,) = generate(engine, output(json_schema=SCHEMA), logprobs=0, logit_bias={70: 3.0})
    request = engine.add_request([7, 8, 9, *sample.tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
    scores: list[TokenLogprob] = []
    while not engine.idle:
        scores += [score for chunk in engine.step() if chunk.request == request for score in chunk.prompt_logprobs]
    expected = [score.logprob for score in scores[2:]]
    assert [score.logprob for score in sample.logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("every", [1, 7])
def test_preemption_in_the_middle_changes_nothing(every: int, tokenizers: dict[str, Tokenizer]) -> None:
    form = output(json_schema=SCHEMA)
    expected = generate(new_engine(tokenizers["byte_level"]), form, n=3)
    engine = new_engine(tokenizers["byte_level"])
    params = SamplingParams(structured_output=form, seed=1, temperature=3.0, max_tokens=80, n=3)
    request = engine.add_request([7, 8, 9], params)
    texts, preemptions = dict.fromkeys(range(3), ""), 0
    for step in range(2000):
        if engine.idle:
            break
        for chunk in engine.step():
            texts[chunk.sample_index] += chunk.text
        if step % every == every - 1:
            preemptions += engine.scheduler.preempt(request)
    assert preemptions > 2 and list(texts.values()) == [sample.text for sample in expected]


def test_a_text_that_cannot_go_on_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = engine.add_request(
        [4, 5], SamplingParams(structured_output=output(regex="ab"), logit_bias={}, bad_words_ids=BANNED, max_tokens=9)
    )
    good = engine.add_request([4, 5], SamplingParams(structured_output=output(regex="ab"), seed=1, max_tokens=9))
    plain = engine.add_request([4, 5], SamplingParams(temperature=0, max_tokens=3))
    samples = run(engine)
    assert samples[bad, 0].error is not None and "every token is banned by" in samples[bad, 0].error
    assert "structured_output" in samples[bad, 0].error
    assert samples[good, 0].text == "ab" and len(samples[plain, 0].tokens) == 3
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 40)
    complex_one = engine.add_request(
        [4, 5], SamplingParams(structured_output=output(regex="([a-z]{1,90}){1,90}"), seed=1, ignore_eos=True)
    )
    plain = engine.add_request([4, 5], SamplingParams(temperature=0, max_tokens=3))
    samples = run(engine)
    assert samples[complex_one, 0].finish == "error" and "structured_output: " in (samples[complex_one, 0].error or "")
    assert len(samples[plain, 0].tokens) == 3 and "\n" not in (samples[complex_one, 0].error or "")


BANNED = tuple((token,) for token in range(600))


def test_samples_are_limited_by_n_only(engine: Engine) -> None:
    samples = generate(engine, output(regex="[a-z]{2}"), n=MAX_SAMPLES, max_tokens=4)
    assert len(samples) == MAX_SAMPLES and all(re.fullmatch("[a-z]{2}", sample.text) for sample in samples)


def test_an_encoder_decoder_forces_its_first_token_before_the_text() -> None:
    tokenizer = train_tokenizer("byte", [], specials=["eos", "bos"])
    bos, eos = tokenizer.special_tokens.bos, tokenizer.special_tokens.eos
    config = dataclasses.replace(pair_config(), vocab_size=tokenizer.vocab_size)
    cache = dataclasses.replace(CACHE, max_seq_len=64, max_source_len=32)
    engine = Engine(build(config, dtype=torch.float32), cache, tokenizer=tokenizer)
    options: dict[str, Any] = {"structured_output": output(regex="[a-c]{4}(xy)*"), "seed": 1, "max_tokens": 12}
    for first, last in ((bos, None), (None, eos), (bos, eos)):
        params = SamplingParams(forced_bos_token_id=first, forced_eos_token_id=last, **options)
        engine.add_request([1], params, encoder_token_ids=[3, 4, 5])
        (sample,) = run(engine).values()
        assert re.fullmatch("[a-c]{4}(xy)*", sample.text) and sample.finish == "stop"
        assert (sample.tokens[0] == bos) == (first is not None)
    with pytest.raises(RequestError, match="the token of forced_bos_token_id must have no text"):
        engine.add_request([1], SamplingParams(forced_bos_token_id=65, **options), encoder_token_ids=[3])


# ---------------------------------------------------------------- the front doors


@pytest.mark.usefixtures("checked")
def test_generate_stream_and_chat_take_it(tmp_path: Path) -> None:
    from tests.support.cli_checkpoints import write_model

    write_model(tmp_path / "m", padding=3)
    (tmp_path / "m" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    form = output(choice=["yes", "no"])
    with LLM.load(tmp_path / "m") as llm:
        assert {each.text for each in llm.generate(["a", "b"], structured_output=form)} <= {"yes", "no"}
        assert "".join(chunk.text for chunk in llm.stream("a", structured_output=form)) in ("yes", "no")
        assert llm.generate("a", SamplingParams(structured_output=form, temperature=0)).text in ("yes", "no")
        assert llm.chat([{"role": "user", "content": "hi"}], structured_output=form).text in ("yes", "no")
        session = llm.session()
        assert {session.generate(text, structured_output=form).text for text in ("a", "b")} <= {"yes", "no"}
        with pytest.raises(RequestError, match="structured_output: regex: unclosed group"):
            llm.generate("a", structured_output=output(regex="("))
