"""Steps that start before the tokens of the step before are known, with recordings that are functions."""

import random

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine.engine import Engine
from kvad.engine.execution.cuda_graphs import GraphCache
from kvad.engine.options import EngineConfig, ServedAdapter
from kvad.engine.scheduling.request import SamplingParams
from tests.engine.test_adapters import random_factors
from tests.engine.test_swap import FixedChoice, LateStream
from tests.support.host_recorder import HostRecorder
from tests.support.random_models import build, model_config

VOCAB = 60


def make_engine(*, runs_ahead, heads="gqa", adapters=None, swaps=True, **cache):
    torch.manual_seed(0)
    options = {"dtype": "float64", "max_num_seqs": 4, "max_seq_len": 64, "block_size": 4, "prefill_chunk_size": 8}
    model = build(model_config(heads=heads)).double()
    engine = Engine(
        model,
        CacheConfig(**options | cache),
        EngineConfig(native=False, adapters=adapters or {}, cost_model=FixedChoice(swaps)),
    )
    if runs_ahead:
        engine.runner.graphs = GraphCache(engine.runner._forward, 8, HostRecorder())
    return engine


class Counted:
    """Counts the steps that are computed, those that start early, and those that use what was started."""

    def __init__(self, engine):
        self.computed = self.started = self.used = self.beside_waiting = 0
        runner = engine.runner
        compute, start, execute = runner._compute, runner.start, runner.execute

        def counted_compute(*arguments):
            self.computed += 1
            return compute(*arguments)

        def counted_start(*arguments):
            self.started += 1
            self.beside_waiting += bool(engine.scheduler.stats().waiting)
            return start(*arguments)

        def counted_execute(output):
            before = self.computed
            logits = execute(output)
            self.used += self.computed == before
            return logits

        runner._compute, runner.start, runner.execute = counted_compute, counted_start, counted_execute


EDITS = (
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.5, 9: -4.0}},
    {"min_tokens": 9, "bad_words_ids": ((5,), (7, 8))},
    {"no_repeat_ngram_size": 2},
)


def options_of(choice, name):
    """Return random options of a request whose steps start early."""
    options = dict(choice.choice(EDITS)) if name == "edits" else {}
    if name and choice.random() < 0.5:
        options["logprobs"] = choice.randrange(4)
    return options


def run(engine, seed, num_requests=14, name=""):
    """Serve requests that arrive, stop and are aborted at random; return what each gets, by request."""
    choice = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt = [choice.randrange(VOCAB) for _ in range(choice.randrange(1, 20))]
        stops = tuple(choice.sample(range(VOCAB), 2))
        greedy = bool(name) or choice.random() < 0.9  # without triton the host draws
        options = {"temperature": 0 if greedy else 1.0, "seed": 7, "stop_token_ids": stops}
        options |= {"max_tokens": choice.randrange(9 if name else 1, 40), **options_of(choice, name)}
        adapter = choice.choice(["", *engine.adapters.names])
        requests.append((choice.randrange(12), prompt, SamplingParams(**options), adapter))
    requests.sort(key=lambda request: request[0])
    outputs, waiting, aborted, arrivals = {}, list(enumerate(requests)), set(), 0
    numbers = {}
    while waiting or not engine.idle:
        while waiting and (waiting[0][1][0] <= arrivals or engine.idle):
            index, (_, prompt, sampling, adapter) = waiting.pop(0)
            numbers[engine.add_request(prompt, sampling, adapter=adapter)] = index
            outputs[index] = []
        for chunk in engine.step():
            assert chunk.error is None, chunk.error
            index = numbers[chunk.request]
            outputs[index].append((chunk.token_id, chunk.finish_reason, chunk.logprob))
            if index % 5 == 3 and len(outputs[index]) == 3 and index not in aborted:
                aborted.add(index)
                engine.abort_request(chunk.request)
        engine.scheduler.check()
        arrivals += 1
    return [outputs[index] for index in sorted(outputs)]


@pytest.mark.parametrize("heads", ["gqa", "window-mix"])
@pytest.mark.parametrize("cache", [{}, {"num_blocks": 18}], ids=["room", "preemption"])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_those_of_steps_one_after_the_other(cache, heads, seed):
    expected = run(make_engine(runs_ahead=False, heads=heads, **cache), seed)
    engine = make_engine(runs_ahead=True, heads=heads, **cache)
    counts = Counted(engine)
    assert run(engine, seed) == expected
    assert counts.used > 3 and (engine.scheduler.stats().preemptions > 0) == bool(cache)
    assert counts.used >= counts.started - 2  # a step is dropped only when all its sequences have ended


@pytest.mark.parametrize("cache", [{}, {"num_blocks": 18}], ids=["room", "preemption"])
@pytest.mark.parametrize("name", ["logprobs", "edits"])
def test_scored_and_edited_outputs_are_those_of_steps_one_after_the_other(cache, name):
    expected = run(make_engine(runs_ahead=False, **cache), 5, name=name)
    assert any(logprob is not None for output in expected for _, _, logprob in output)
    engine = make_engine(runs_ahead=True, **cache)
    counts = Counted(engine)
    assert run(engine, 5, name=name) == expected
    assert counts.used > 12


@pytest.mark.parametrize("swap_space", [None, 1 << 20], ids=["computed", "swapped"])
def test_steps_start_early_while_others_wait_for_blocks(swap_space, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    expected = run(make_engine(runs_ahead=False), 1)
    engine = make_engine(runs_ahead=True, num_blocks=18, swap_space=swap_space)
    engine.kv_cache.copier.stream = LateStream()
    counts = Counted(engine)
    assert run(engine, 1) == expected
    stats = engine.preemption.stats()
    assert (
        counts.beside_waiting > 5
        and (stats.to_ram > 0) == bool(swap_space)
        and (stats.recomputed > 0) != bool(swap_space)
    )


def test_outputs_of_adapters_are_those_of_steps_one_after_the_other():
    config = model_config(heads="gqa")
    adapters = {name: ServedAdapter(random_factors(config, rank)) for name, rank in (("a", 2), ("b", 3))}
    expected = run(make_engine(runs_ahead=False, adapters=adapters), 2)
    engine = make_engine(runs_ahead=True, adapters=adapters)
    counts = Counted(engine)
    assert run(engine, 2) == expected
    assert counts.used > 12


@pytest.mark.parametrize("options", [{"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}, {"logprobs": 2}])
def test_a_lone_sequence_starts_each_step_early(options):
    engine = make_engine(runs_ahead=True)
    counts = Counted(engine)
    (tokens,) = prompts_of(engine, (1, 2, 3), max_tokens=12, **options)
    assert (counts.computed, counts.started, counts.used) == (12, 11, 11)
    assert [tokens] == prompts_of(make_engine(runs_ahead=False), (1, 2, 3), max_tokens=12, **options)


def prompts_of(engine, *prompts, **options):
    sampling = SamplingParams(temperature=0, ignore_eos=True, **options)
    numbers = [engine.add_request(list(prompt), sampling) for prompt in prompts]
    outputs = {number: [] for number in numbers}
    while not engine.idle:
        for chunk in engine.step():
            outputs[chunk.request].append(chunk.error or chunk.token_id)
    return [outputs[number] for number in numbers]


def test_a_step_is_computed_once():
    engine = make_engine(runs_ahead=True)
    counts = Counted(engine)
    (tokens,) = prompts_of(engine, (1, 2, 3), max_tokens=12)
    assert len(tokens) == 12
    assert (counts.computed, counts.started, counts.used) == (12, 11, 11)  # the prompt, and 11 tokens that follow it


def test_blocks_are_published_as_without_it():
    hits = []
    for runs_ahead in (False, True):
        engine = make_engine(runs_ahead=runs_ahead)
        (tokens,) = prompts_of(engine, (1, 2, 3), max_tokens=14)
        number = engine.add_request([1, 2, 3, *tokens], SamplingParams(temperature=0, max_tokens=1))
        while not engine.idle:
            engine.step()
        hits.append(engine.metrics(number).num_cached_tokens)
    assert hits == [16, 16]


def test_numbers_that_are_not_finite_end_their_sequence_only():
    expected = prompts_of(make_engine(runs_ahead=False), (1, 2, 3), (4, 5), max_tokens=9)
    engine = make_engine(runs_ahead=True)
    forward, calls = engine.runner._forward, []

    def broken(model_input):
        logits = forward(model_input)
        calls.append(len(logits))
        return logits.index_fill(0, torch.tensor([1]), float("nan")) if len(calls) == 5 else logits

    engine.runner.graphs = GraphCache(broken, 8, HostRecorder())
    outputs = prompts_of(engine, (1, 2, 3), (4, 5), max_tokens=9)
    failed = [isinstance(output[-1], str) for output in outputs]
    assert sorted(failed) == [False, True]
    for output, all_tokens, has_failed in zip(outputs, expected, failed, strict=True):
        assert output[:-1] == all_tokens[:-1] if not has_failed else output[:-1] == all_tokens[: len(output) - 1]
    engine.scheduler.check()


def test_a_step_that_cannot_start_is_computed_again():
    prompts = (1, 2, 3), (4, 5)
    expected = prompts_of(make_engine(runs_ahead=False), *prompts, max_tokens=9)
    engine = make_engine(runs_ahead=True)
    start, calls = engine.runner.start, []

    def fail(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        start(*arguments)

    engine.runner.start = fail
    assert prompts_of(engine, *prompts, max_tokens=9) == expected
    engine.scheduler.check()


def test_sessions_end_with_the_tokens_before_the_step_that_was_started():
    states = []
    for runs_ahead in (False, True):
        engine = make_engine(runs_ahead=runs_ahead)
        stop = prompts_of(engine, (1, 2, 3), max_tokens=9)[0][6]
        sampling = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(stop,))
        number = engine.add_request([1, 2, 3], sampling, keep_state=True)
        while not engine.idle:
            engine.step()
        state = engine.pop_state(number)
        follow = engine.add_request([*state.tokens, 5, 6], sampling, resume=state)
        tokens = []
        while not engine.idle:
            tokens += [chunk.token_id for chunk in engine.step()]
        assert engine.metrics(follow).is_resumed
        states.append((tuple(state.tokens), tokens))
    assert states[0] == states[1]
