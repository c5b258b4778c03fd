"""Choice of replicas, merged replies, and two replicas on this machine if Ray is installed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import httpx
import psutil
import pytest

from kvad.errors import EngineError
from kvad.server.api import ApiContext
from kvad.server.app import build_app
from kvad.server.config import ServerConfig
from kvad.server.metrics import ServerMetrics
from kvad.server.routing import MAX_LEAD, PREFIX_BLOCKS, merge_replies, prefix_key, rank_replicas, rename_requests

NAMES = [f"replica-{number}" for number in range(4)]


def test_the_first_blocks_and_the_salt_choose_the_replica() -> None:
    prompt = list(range(100))
    key = prefix_key(prompt, 4, "", None)
    assert key == prefix_key([*prompt[: 4 * PREFIX_BLOCKS], 7, 7, 7], 4, "", None)
    others = [
        prefix_key([9, *prompt], 4, "", None),
        prefix_key(prompt, 4, "salt", None),
        prefix_key([1, 2], 4, "", None),
    ]
    assert len({key, *others}) == 4 and others[-1] == ""
    assert prefix_key(prompt, 4, "", {"owner": "a", "name": "x"}) == prefix_key([1], 4, "", {"owner": "a", "name": "x"})


def test_prefixes_spread_evenly_and_stay_when_a_replica_ends() -> None:
    keys = [f"prefix {number}" for number in range(2000)]
    idle = dict.fromkeys(NAMES, 0)
    first = {key: rank_replicas(key, idle)[0] for key in keys}
    assert all(400 < count < 600 for count in Counter(first.values()).values())
    without = {name: 0 for name in NAMES if name != NAMES[2]}
    moved = [key for key in keys if rank_replicas(key, without)[0] != first[key]]
    assert moved == [key for key in keys if first[key] == NAMES[2]]


def test_a_busy_replica_is_passed_over_and_load_decides_without_a_prefix() -> None:
    best = rank_replicas("prefix", dict.fromkeys(NAMES, 3))[0]
    loads = dict.fromkeys(NAMES, 3)
    assert rank_replicas("prefix", {**loads, best: 3 + MAX_LEAD - 1})[0] == best
    assert rank_replicas("prefix", {**loads, best: 3 + MAX_LEAD})[-1] == best
    assert rank_replicas("", {"a": 2, "b": 0, "c": 1}) == ["b", "c", "a"]
    assert rank_replicas("prefix", {}) == []


def test_replies_are_merged() -> None:
    reply = {"reply": 1, "pools": ["uf"], "cache": {"hits": 2, "used": [1]}, "block_size": 4, "store": None}
    merged = merge_replies([{**reply, "sequences": [{"blocks": [[5]]}]}, {**reply, "sequences": [{"blocks": [[6]]}]}])
    assert merged["pools"] == ["uf", "uf"] and merged["cache"] == {"hits": 4, "used": [1, 1]}
    assert merged["sequences"] == [{"blocks": [[5]], "replica": 0}, {"blocks": [[], [6]], "replica": 1}]
    assert (merged["block_size"], merged["store"]) == (4, None)


def test_requests_of_replicas_have_the_numbers_of_the_server() -> None:
    """Each replica counts its requests from 1; the server's numbers are unique, and prompts are sorted by them."""
    own = [{"request": 2, "tokens": 7}, {"request": 1, "tokens": 8}]
    reply = {"prompts": own, "evictions": [{"request": None}, {"request": 3}], "pools": ["u"], "block_size": 4}
    first, second = rename_requests(reply, {1: 11, 2: 14}), rename_requests(reply, {1: 12, 2: 13})
    assert first["evictions"] == [{"request": None}] * 2 and (first["pools"], first["block_size"]) == (["u"], 4)
    merged = merge_replies([first, second])
    assert [(each["request"], each["replica"], each["tokens"]) for each in merged["prompts"]] == [
        (14, 0, 7), (13, 1, 7), (12, 1, 8), (11, 0, 8),
    ]  # fmt: skip
    assert own == [{"request": 2, "tokens": 7}, {"request": 1, "tokens": 8}]


class EndedEngine:
    """An engine whose process has ended."""

    tokenizer, streams = None, ()

    async def call(self, operation: str) -> dict:
        raise EngineError("a replica has ended: ActorDiedError")


def test_metrics_are_sent_without_an_engine() -> None:
    context = ApiContext(EndedEngine(), ServerConfig(), ServerMetrics("tiny"), "tiny")
    transport = httpx.ASGITransport(build_app(context))
    reply = asyncio.run(transport.handle_async_request(httpx.Request("GET", "http://127.0.0.1/metrics")))
    text = asyncio.run(reply.aread()).decode()
    assert reply.status_code == 200 and "kvad:requests_in_progress" in text and "kvad:engine_steps" not in text


def test_embeddings_of_a_replica_have_the_number_of_the_server() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make replicas")
    from kvad.server.replicas import EngineReplica

    class Encoder:
        _next_number = 6

        async def embed_ids(self, inputs: list, *, adapter: str, cache_salt: str) -> list:
            return inputs

    replica = EngineReplica("model", {})
    replica._llm = Encoder()
    assert asyncio.run(replica.embed({"key": "", "number": 40}, [[1], [2]], "", "")) == [[1], [2]]
    reply = rename_requests({"sequences": [{"request": 7}, {"request": 8}]}, replica._numbers)
    assert reply == {"sequences": [{"request": 40}] * 2}


def test_two_replicas_answer_like_one(tmp_path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make replicas")
    from kvad.llm import LLM
    from kvad.server.replicas import ReplicatedLLM
    from tests.support.server import write_model

    model = write_model(tmp_path / "model")
    prompts = [[number, *range(3, 40)] for number in range(8)]
    with LLM.load(model) as llm:
        expected = [each.tokens for each in llm.generate(prompts, max_tokens=12, temperature=0)]

    async def run() -> None:
        async with await ReplicatedLLM.load_replicas(model, 2, max_num_seqs=4) as llm:
            for _ in range(2):
                results = await asyncio.gather(*(llm.generate(p, max_tokens=12, temperature=0) for p in prompts))
                assert [each.tokens for each in results] == expected
            assert all(each.usage.num_cached_tokens > 0 for each in results), "the same replica answers again"
            state = await llm.call("blocks")
            assert [each["request"] for each in state["prompts"]] == list(range(16, 0, -1)), "numbers of the server"
            assert {each["replica"] for each in state["prompts"]} == {0, 1}
            assert len(state["pools"]) == 2 and all("c" in pool for pool in state["pools"]), "both were used"
            async for _ in llm.stream(prompts[0], max_tokens=200, ignore_eos=True):
                break
            await asyncio.sleep(1.0)
            assert not (await llm.call("blocks"))["sequences"], "leaving the loop frees the sequence"
            await check_restart(llm)

    async def check_restart(llm: ReplicatedLLM) -> None:
        """While Ray restarts a replica, the other one answers, and is counted once."""
        total = (await llm.call("stats"))["cache"]["total"]
        workers = [each for each in psutil.Process().children(recursive=True) if "ServeReplica" in each.name()]
        assert len(workers) == len(total) == 2
        workers[0].kill()
        workers[0].wait(10)
        for prompt, answer in zip(prompts, expected, strict=True):
            with suppress(EngineError):  # sent before the end of the replica is known
                assert (await llm.generate(prompt, max_tokens=12, temperature=0)).tokens == answer
        assert (await llm.call("stats"))["cache"]["total"] == total[1:]

    asyncio.run(run())
