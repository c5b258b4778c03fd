"""Adapters that requests of ``LLM`` and of the server choose by name."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
import torch

from kvad import api
from kvad.cli.commands.serve import _adapters
from kvad.errors import RequestError, StorageError, UsageError
from kvad.llm import LLM
from kvad.server import AsyncLLM, ServerConfig, serve
from kvad.server.api import ApiContext
from kvad.server.app import build_app
from kvad.server.metrics import ServerMetrics
from tests.support.cli_checkpoints import run, write_adapter, write_model

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPT = "def sing(poem, voice):"
RANKS = {"a": 2, "b": 3}
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a base and of two adapters; b has a chat template, and a token that ends a turn."""
    folder = tmp_path_factory.mktemp("models")
    base = write_model(folder / "base")
    write_adapter(folder / "a", base, RANKS["a"], uses=lambda layer: layer.endswith((".q", ".down")))
    write_adapter(folder / "b", base, RANKS["b"], template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folders):
    adapters = {name: folders / name for name in RANKS}
    with LLM.load(folders / "base", dtype="float64", adapters=adapters, max_num_seqs=4, block_size=4) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def merged(folders):
    models = {name: LLM.load(folders / "base", dtype="float64", adapter=folders / name, block_size=4) for name in RANKS}
    models[""] = LLM.load(folders / "base", dtype="float64", block_size=4)
    yield models
    for model in models.values():
        model.close()


def test_every_method_computes_with_the_named_adapter(llm, merged):
    for name, reference in merged.items():
        ours, theirs = (
            model.generate(PROMPT, **GREEDY, **extra) for model, extra in ((llm, {"adapter": name}), (reference, {}))
        )
        assert ours.tokens == theirs.tokens
        assert [chunk.token_id for chunk in llm.stream(PROMPT, adapter=name, **GREEDY)] == list(theirs.tokens)
        scores = llm.score(PROMPT, adapter=name).logprobs[1:], reference.score(PROMPT).logprobs[1:]
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)
        assert (llm.logits(PROMPT, adapter=name) - reference.logits(PROMPT)).abs().max() < 1e-10
        assert (llm.embed(PROMPT, adapter=name) - reference.embed(PROMPT)).abs().max() < 1e-10
    assert (merged["a"].logits(PROMPT) - merged[""].logits(PROMPT)).abs().max() > 0.1
    assert (merged["b"].logits(PROMPT) - merged["a"].logits(PROMPT)).abs().max() > 0.1
    for call in (llm.generate, llm.score, llm.logits, llm.embed, lambda text, adapter: llm.session(adapter=adapter)):
        with pytest.raises(RequestError, match=r"adapter: unknown adapter 'c' \(known: a, b"):
            call(PROMPT, adapter="c")


def test_a_chat_has_the_template_of_its_adapter(llm, merged):
    messages = [{"role": "user", "content": PROMPT}]
    assert llm.chat(messages, adapter="b", **GREEDY).tokens == merged["b"].generate(f"u{PROMPT}", **GREEDY).tokens
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat(messages, adapter="a", **GREEDY)


def test_the_end_of_a_turn_is_that_of_the_adapter(folders, tmp_path):
    first = LLM.load(folders / "base", adapter=folders / "b").generate(PROMPT, **GREEDY).tokens
    assert len(set(first)) > 1
    copy = tmp_path / "b"
    copy.mkdir()
    for path in (folders / "b").iterdir():
        if path.name != "manifest.json":
            (copy / path.name).write_bytes(path.read_bytes())
    end = next(token for token in first if token != first[0])
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    options = {**GREEDY, "ignore_eos": False}
    with LLM.load(folders / "base", adapters={"b": copy, "plain": folders / "b"}) as llm:
        assert llm.generate(PROMPT, adapter="b", **options).finish_reason == "stop"
        assert llm.generate(PROMPT, adapter="plain", **options).finish_reason == "length"


def test_a_session_belongs_to_its_adapter(llm, merged, folders, tmp_path):
    session = llm.session("mine", tmp_path, adapter="a")
    first = session.generate(PROMPT, **GREEDY)
    session.save()
    length = len(session.tokens)
    with LLM.load(folders / "base", dtype="float64", adapters={"other": folders / "a", "b": folders / "b"}) as fresh:
        restored = fresh.session("mine", tmp_path, adapter="other")  # the factors are compared, not the name
        second = restored.generate(" and", **GREEDY)
        assert restored.reused >= length - 1 and restored.missed == ""
        text = merged["a"].encode(PROMPT) + list(first.tokens) + merged["a"].encode(" and")
        assert second.tokens == merged["a"].generate(text, **GREEDY).tokens
        for name in ("", "b"):
            with pytest.raises(StorageError, match="adapter: "):
                fresh.session("mine", tmp_path, adapter=name)


def test_the_memory_plan_counts_factors_and_terms(llm, folders):
    with LLM.load(folders / "base", dtype="float64", max_num_seqs=4, block_size=4) as plain:
        without = plain.memory_plan
    plan, stored = llm.memory_plan, [pair for terms in llm.engine.adapters._terms.values() for pair in terms.values()]
    factors = sum(a.nbytes + 3 * b.nbytes for a, b in stored)  # of the kernels, too
    assert without.adapters == 0 and plan.total - without.total == plan.adapters
    widest = max(a.shape[1] + a.shape[0] + 2 * b.shape[0] for a, b in stored)
    assert plan.adapters == factors + 8 * 2048 * widest
    planned = api.plan(folders / "base", dtype="float64", adapters={name: folders / name for name in RANKS}).plan
    assert planned.adapters == plan.adapters > 0


def test_the_plan_command_counts_adapters(folders, capsys):
    def plan(*flags, target=folders / "base"):
        return run(capsys, "plan", target, "--bandwidth", "10", *flags)

    named = plan("--adapter", f"a={folders / 'a'}")
    assert named.code == 0 and re.search(r"^adapters +[\d,]+ ", named.out, re.MULTILINE)
    assert "adapters" not in plan().out
    assert "has no name" in plan("--adapter", str(folders / "a")).err
    unknown = plan("--adapter", f"a={folders / 'a'}", target="gpt2")
    assert unknown.code == 2 and "Traceback" not in unknown.err


def test_names_and_folders_of_the_serve_command(tmp_path):
    assert _adapters(()) == {"adapter": None, "adapters": {}}
    assert _adapters(("x=one", "two", "y=a=b")) == {
        "adapter": Path("two"), "adapters": {"x": Path("one"), "y": Path("a=b")},
    }  # fmt: skip
    (tmp_path / "r=8").mkdir()
    assert _adapters((str(tmp_path / "r=8"),))["adapter"] == tmp_path / "r=8"
    for given, message in ((("x=1", "x=2"), "'x' is given twice"), (("one", "two"), "one and two cannot both be")):
        with pytest.raises(UsageError, match=message):
            _adapters(given)
    with pytest.raises(UsageError, match="'base' is the base model"):
        serve(tmp_path / "base", {"adapters": {"base": tmp_path}}, ServerConfig())


def test_the_model_of_a_request_chooses_the_adapter(folders, merged, tmp_path):
    expected = {name: model.generate(PROMPT, **GREEDY).text for name, model in merged.items()}
    sessions = [merged["a"].generate(PROMPT, **GREEDY).tokens]

    async def check():
        options = {"dtype": "float64", "session_dir": tmp_path, "max_num_seqs": 4, "block_size": 4}
        adapters = {name: folders / name for name in RANKS}
        async with await AsyncLLM.load(folders / "base", adapters=adapters, **options) as llm:
            context = ApiContext(llm, ServerConfig(session_dir=tmp_path), ServerMetrics("base"), "base")
            transport = httpx.ASGITransport(app=build_app(context))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                await routes(client, llm)

    async def routes(client, llm):
        models = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in models] == [("base", None), ("a", "base"), ("b", "base")]
        assert [each["has_chat_template"] for each in models] == [False, False, True]
        assert (await client.get("/v1/models/b")).json()["root"] == "b"
        body = {"prompt": PROMPT, **GREEDY}

        async def post(path, **fields):
            return await client.post(path, json={**body, **fields})

        replies = await asyncio.gather(*(post("/v1/completions", model=name or "base") for name in expected))
        for name, reply in zip(expected, replies, strict=True):
            assert reply.json()["model"] == (name or "base")
            assert reply.json()["choices"][0]["text"] == expected[name]
        reply = await post("/v1/completions", model="c")
        assert reply.status_code == 404 and "use 'base' or 'a' or 'b'" in reply.json()["error"]["message"]
        chat = {
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
        }
        reply = (await client.post("/v1/chat/completions", json={**chat, "model": "b"})).json()
        answer = merged["b"].generate(f"u{PROMPT}", **GREEDY).text
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("b", answer)
        response = {"model": "b", "input": PROMPT, "temperature": 0, "max_output_tokens": 6}
        assert (await client.post("/v1/responses", json=response)).json()["model"] == "b"
        reply = await client.post("/v1/embeddings", json={"model": "a", "input": PROMPT})
        vector, reference = reply.json()["data"][0]["embedding"], merged["a"].embed(PROMPT)[0]
        assert reply.json()["model"] == "a" and (torch.tensor(vector) - reference).abs().max() < 1e-5
        score = await llm.score(PROMPT, adapter="a")
        assert score.logprobs[1:] == pytest.approx(merged["a"].score(PROMPT).logprobs[1:], abs=1e-6)
        reply = await post("/v1/completions", model="a", session="mine")
        assert reply.json()["choices"][0]["text"] == expected["a"] and sessions
        reply = await post("/v1/completions", model="b", session="mine")
        assert reply.status_code == 400 and "'mine' belongs to a" in reply.json()["error"]["message"]

    asyncio.run(check())
