"""AsyncLLM: the results of LLM, cancellation by leaving the loop, errors, the end of the engine's process."""

import asyncio
import os
import re
import signal
import threading

import pytest

from kvad import AsyncLLM
from kvad.engine.scheduling import SpeculativeConfig, StructuredOutput
from kvad.errors import ConfigError, EngineError, KvadError, RequestError

PROMPTS = [f"{number} prompt" + " and more" * number for number in range(8)]
GREEDY = {"temperature": 0, "ignore_eos": True}


class Loop:
    """An event loop in a thread, with one AsyncLLM for all tests of a process."""

    def __init__(self, model):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.llm = self.run(AsyncLLM.load(model, block_size=16, max_num_seqs=8, nice=1))

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@pytest.fixture(scope="module")
def background(model):
    """Load the model; at the end its process is killed, which fails the requests that run, and only them."""
    started = Loop(model)
    yield started

    async def kill():
        llm = started.llm
        tasks = [asyncio.ensure_future(llm.generate(prompt, max_tokens=4000, **GREEDY)) for prompt in PROMPTS]
        while not llm.streams:
            await asyncio.sleep(0.01)
        llm._process.send_signal(signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results), results
        with pytest.raises(EngineError, match="has ended"):
            await llm.generate("x")
        assert await llm.close() == -signal.SIGKILL and llm.failure is not None

    started.run(kill())


def test_the_engine_has_a_lower_priority(background, model):
    assert os.getpriority(os.PRIO_PROCESS, background.llm._process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 1
    with pytest.raises(ConfigError, match="nice: must be from 0 to 19, got 20"):
        background.run(AsyncLLM.load(model, nice=20))


async def used_blocks(llm):
    return (await llm.call("stats"))["cache"]["used"]


def test_gathered_results_equal_those_of_llm(background, llm):
    async def main():
        calls = [background.llm.generate(prompt, max_tokens=24, **GREEDY, logprobs=2) for prompt in PROMPTS]
        return await asyncio.gather(*calls)

    for prompt, result in zip(PROMPTS, background.run(main()), strict=True):
        expected = llm.generate(prompt, max_tokens=24, **GREEDY, logprobs=2)
        assert (result.text, result.tokens) == (expected.text, expected.tokens)
        assert [score.logprob for score in result.logprobs] == pytest.approx(
            [score.logprob for score in expected.logprobs], abs=1e-5
        )
        assert result.usage.num_prompt_tokens == expected.usage.num_prompt_tokens


def test_stream_has_the_text_of_generate(background):
    async def main():
        settings = {"max_tokens": 20, "temperature": 0.9, "seed": 3, "n": 2}
        chunks = [chunk async for chunk in background.llm.stream("a text", **settings)]
        return chunks, await background.llm.generate("a text", **settings)

    chunks, result = background.run(main())
    for sample, choice in enumerate(result.choices):
        assert "".join(chunk.text for chunk in chunks if chunk.sample_index == sample) == choice.text
    assert len({choice.text for choice in result.choices}) == 2


@pytest.mark.parametrize("way", ["leave", "cancel", "timeout"])
def test_a_request_that_is_left_is_cancelled_before_the_next_step(background, way):
    """The reply to the next message has no sequence and no block in use: at most one step has run in between."""

    async def read(count):
        async for _ in background.llm.stream("left early", max_tokens=4000, **GREEDY):
            count -= 1
            if not count:
                return

    async def main():
        llm = background.llm
        if way == "leave":
            stream = llm.stream("left early", max_tokens=4000, **GREEDY)
            await anext(stream)
            await stream.aclose()
        elif way == "cancel":
            task = asyncio.ensure_future(read(-1))
            while not (await used_blocks(llm))[0]:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await read(-1)
        return await used_blocks(llm), len(llm.streams), (await llm.call("blocks"))["sequences"]

    assert background.run(main()) == ([0], 0, [])


def test_errors_are_those_of_llm(background, llm):
    calls = [
        ("x", {"temperature": -1}), ("x" * 5000, {}), ([99999], {}), ("x", {"logit_bias": {1: 1e9}}),
        ("x", {"temperature": "a"}),
    ]  # fmt: skip
    for prompt, settings in calls:
        with pytest.raises(KvadError) as expected:
            llm.generate(prompt, **settings)
        with pytest.raises(type(expected.value)) as caught:
            background.run(background.llm.generate(prompt, **settings))
        assert str(caught.value) == str(expected.value)
    with pytest.raises(RequestError, match="cannot be sent"):
        background.run(background.llm.generate("x", allowed_tokens_fn=lambda tokens: [1]))
    assert background.run(background.llm.generate("x", max_tokens=2, **GREEDY)).usage.num_completion_tokens == 2


def test_score_chat_and_embed_equal_those_of_llm(background, llm):
    score = background.run(background.llm.score("a scored text"))
    assert score.logprobs[1:] == pytest.approx(llm.score("a scored text").logprobs[1:], abs=1e-5)
    messages, settings = [{"role": "user", "content": "hello"}], {"max_tokens": 12, **GREEDY}
    answer = background.run(background.llm.chat(messages, **settings))
    assert answer.text == llm.chat(messages, **settings).text
    (vector,) = background.run(background.llm.embed(["embedded"]))
    assert vector == pytest.approx(llm.embed(["embedded"])[0].tolist(), abs=1e-5)


def test_drafts_and_structured_output_in_the_engines_process(model, llm):
    """Options that are objects reach the engine: the same texts as without drafts, and texts that match the regex."""
    regex = StructuredOutput("regex", "(ab){5,40}")

    async def main():
        async with await AsyncLLM.load(model, block_size=16, speculative=SpeculativeConfig(adaptive=False)) as drafting:
            calls = [drafting.generate("ab" * 30, max_tokens=40, seed=1, logit_bias={97: 3.0, 98: 3.0})]
            calls.append(drafting.generate("ab", max_tokens=60, seed=1, structured_output=regex))
            results = await asyncio.gather(*calls)
            return results, (await drafting.call("stats"))["scheduler"]

    (plain, matching), stats = asyncio.run(main())
    assert plain.tokens == llm.generate("ab" * 30, max_tokens=40, seed=1, logit_bias={97: 3.0, 98: 3.0}).tokens
    assert re.fullmatch(regex.source, matching.text) or matching.finish_reason == "length"
    assert 0 < stats["accepted_tokens"] <= stats["draft_tokens"]
