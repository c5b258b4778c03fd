"""A GPU's path through the engine: kernels over block tables, the fused decoder and recorded steps.

Without a GPU, Triton interprets its kernels, and recordings are functions; without triton, only the host's part runs.
"""

import importlib.util
import itertools

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.manager import BlockAllocation
from kvad.engine.engine import Engine
from kvad.engine.execution.cuda_graphs import BatchShape, GraphCache, decoding_bucket, num_seqs_bucket
from kvad.engine.execution.fused_decoder import describe_gpu
from kvad.engine.execution.sampler import DeviceTokens, sample_outputs, sample_tokens
from kvad.engine.options import EngineConfig, ServedAdapter
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.errors import ConfigError
from kvad.model_input import PADDING_BLOCK, BlockOps, SubBatch
from tests.engine.test_adapters import random_factors
from tests.support.host_recorder import HostRecorder
from tests.support.random_models import build, model_config
from tests.support.sequences import token_sequence

HAS_GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
NUM_TOKENS = 9 if HAS_GPU else 5  # the interpreter is slow
PROMPTS = ((1, 5, 2, 8, 4, 4, 7), (3, 3), (9, 1, 1, 6, 2, 8, 5, 3, 2, 1, 7), (4,), (2, 6))[: 5 if HAS_GPU else 3]


def make_engine(graphs=0, dtype=torch.float32, adapters=None, **kinds):
    torch.manual_seed(0)
    model = build(model_config(**kinds)).to(dtype)
    if HAS_GPU:
        model = model.cuda()
    name = str(dtype).removeprefix("torch.")
    cache = CacheConfig(dtype=name, max_num_seqs=8, max_seq_len=64, block_size=4, prefill_chunk_size=8)
    engine = Engine(model, cache, EngineConfig(native=False, cuda_graphs=graphs, adapters=adapters or {}))
    if graphs and not HAS_GPU:
        engine.runner.graphs = GraphCache(engine.runner._forward, graphs, HostRecorder())
    return engine


def tokens(engine, *samplings):
    """Return the tokens of all prompts, greedy or with these options in turn."""
    choices = itertools.cycle(samplings or [{"temperature": 0}])
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3}
    adapters = itertools.cycle(["", *engine.adapters.names])
    numbers = [
        engine.add_request(list(prompt), SamplingParams(**options | next(choices)), adapter=next(adapters))
        for prompt in PROMPTS
    ]
    outputs = {number: [] for number in numbers}
    while not engine.idle:
        for chunk in engine.step():
            assert chunk.error is None
            outputs[chunk.request].append(chunk.token_id)
    return [outputs[number] for number in numbers]


@pytest.fixture
def interpreter(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def expected():
    """Tokens of the PyTorch path by kinds of the model."""
    with pytest.MonkeyPatch.context() as context:
        context.setenv("KVAD_TRITON", "off")
        return {name: tokens(make_engine(**kinds)) for name, kinds in KINDS.items()}


KINDS = {
    "rope": {},
    "partial": {"position": "rope-partial"},
    "dynamic": {"position": "rope-dynamic"},
    "alibi": {"position": "alibi"},
    "bias": {"heads": "mha"},
    "qk-norm": {"heads": "qk-norm"},
    "softcap": {"heads": "softcap"},
    "sinks": {"heads": "sinks"},
    "window": {"heads": "window-mix"},
    "value-dim": {"heads": "value-dim"},
    "sandwich": {"norm": "sandwich"},
}
UNFUSED = ("sandwich",)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("kinds", KINDS)
def test_tokens_equal_those_of_pytorch(interpreter, expected, kinds, graphs):
    engine = make_engine(graphs, **KINDS[kinds])
    assert tokens(engine) == expected[kinds]
    assert engine.runner.graphs.num_recorded > 0 or not graphs
    assert (engine.runner.fused is None) == (kinds in UNFUSED), engine.runner.fused_reason


@pytest.mark.gpu
@needs_triton
def test_drawn_tokens_equal_those_of_pytorch(interpreter, monkeypatch):
    samplings = (
        {"temperature": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 9},
    )
    engine = make_engine(graphs=8)
    drawn = tokens(engine, *samplings)
    assert engine.runner.graphs.num_recorded > 0
    monkeypatch.setenv("KVAD_TRITON", "off")
    assert tokens(make_engine(), *samplings) == drawn


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="torch finds no CUDA device")
@pytest.mark.parametrize("with_adapters", [False, True], ids=["recorded", "adapters"])
def test_the_next_step_starts_before_the_device_has_computed_this_one(monkeypatch, with_adapters):
    """PyTorch raises an error where the host waits for the device."""
    adapters = {
        "a": ServedAdapter(random_factors(model_config(), 2)),
        "b": ServedAdapter(random_factors(model_config(), 3)),
    }
    engine = make_engine(graphs=8, dtype=torch.bfloat16, adapters=adapters if with_adapters else None)
    samplings = (
        {"temperature": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"top_k": 9, "logit_bias": {3: 1.0}, "logprobs": 0},
        {"temperature": 0.0, "bad_words_ids": ((3,),)},
    )
    for _ in range(2):  # compiles and records
        expected = tokens(engine, *samplings)
    run_ahead, started = engine._run_ahead, []

    def watched(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run_ahead(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            started.append(engine.scheduler._next is not None)

    monkeypatch.setattr(engine, "_run_ahead", watched)
    assert tokens(engine, *samplings) == expected
    assert sum(started) >= NUM_TOKENS - 3


DRAWS = (
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.999999},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 1e-6},
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.0, "top_k": 5, "logit_bias": {7: 2.5, 60: -4.0}},
    {"temperature": 1.5, "top_p": 0.8, "presence_penalty": 1.0},
    {"temperature": 1.0, "bad_words_ids": tuple((token,) for token in range(3, 60)), "min_p": 0.01},
)


def draws(logits, seed, choose):
    sequences = [token_sequence(SamplingParams(**options, seed=seed), (1, 2), 2, i) for i, options in enumerate(DRAWS)]
    return choose(logits, sequences, logits.shape[1] - 3)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("vocab", [70, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_equal_those_of_the_host(interpreter, dtype, vocab):
    device = "cuda" if HAS_GPU else "cpu"
    for seed in range(40 if HAS_GPU else 6 if vocab > 100 else 20):
        generator = torch.Generator().manual_seed(seed)
        logits = (3 * torch.randn(len(DRAWS), vocab, generator=generator)).to(dtype)  # bfloat16: many are equal
        logits[:, -1] = 100.0  # padding of the embedding
        expected = draws(logits, seed, sample_tokens)
        outputs = draws(logits.to(device), seed, lambda *arguments: DeviceTokens(*arguments).wait())
        assert [output.token_id for output in outputs] == [output.token_id for output in expected], seed
        for output, other in zip(outputs, expected, strict=True):
            assert (output.logprob is None) == (other.logprob is None)
            if other.logprob is not None:
                values, others = (
                    [value for _, value in score.top_logprobs] for score in (output.logprob, other.logprob)
                )
                assert [output.logprob.logprob, *values] == pytest.approx([other.logprob.logprob, *others], abs=1e-4)


@pytest.mark.gpu
@needs_triton
def test_a_row_that_is_not_finite_is_an_error_of_its_own(interpreter):
    logits = torch.randn(4, 70, device="cuda" if HAS_GPU else "cpu")
    logits[1, 69], logits[2, 3] = torch.nan, torch.inf
    sequences = [token_sequence(SamplingParams(seed=1), (1, 2), 2, i) for i in range(4)]
    outputs = DeviceTokens(logits, sequences, 66).wait()
    assert [output.error is None for output in outputs] == [True, False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=needs_triton)])
def test_errors_of_rows_with_bans_are_those_of_the_host(interpreter, temperature):
    logits = torch.randn(4, 70)
    logits[1, 69], logits[2, 3] = torch.nan, -torch.inf
    words = [((1,),), ((1,),), ((3,),), tuple((token,) for token in range(66))]  # of the last row all are banned
    sequences = [
        token_sequence(SamplingParams(temperature=temperature, seed=1, bad_words_ids=banned), (1, 2), 2, i)
        for i, banned in enumerate(words)
    ]
    expected = [output.error for output in sample_tokens(logits, sequences, 66)]
    outputs = DeviceTokens(logits.to("cuda" if HAS_GPU else "cpu"), sequences, 66).wait()
    assert [output.error for output in outputs] == expected
    assert [error is None for error in expected] == [True, False, False, False]


def shape(*sub_batches, widths=None, num_logits=None, groups=1):
    num_seqs = sum(batch.num_seqs for batch in sub_batches)
    widths = tuple(-(-batch.num_read_slots // 16) for batch in sub_batches) if widths is None else widths
    logits = num_seqs if num_logits is None else num_logits
    return BatchShape(sub_batches, logits, (widths,) * groups, None, groups, groups)


@pytest.mark.parametrize(
    ("num_seqs", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 24), (64, 64), (65, 72)]
)
def test_number_of_sequences_is_padded(num_seqs, padded):
    assert num_seqs_bucket(num_seqs) == padded
    bucket = decoding_bucket(shape(SubBatch(num_seqs, 1, 40)))
    assert bucket.sub_batches == (SubBatch(padded, 1, 64),) and bucket.num_logits == padded


def test_sub_batches_are_joined():
    bucket = decoding_bucket(shape(SubBatch(5, 1, 48), SubBatch(1, 1, 144), groups=2))
    assert bucket == BatchShape((SubBatch(8, 1, 256),), 8, ((16,), (16,)), None, 2, 2)
    assert decoding_bucket(bucket) == bucket


@pytest.mark.parametrize(
    "other",
    [
        shape(SubBatch(2, 1, 32), SubBatch(1, 5, 32)),
        shape(SubBatch(2, 1, 32), num_logits=1),
        shape(SubBatch(2, 1, 32))._replace(cross_sub_batches=(SubBatch(2, 1, 32),)),
        shape(SubBatch(2, 1, 32), groups=2)._replace(num_token_groups=1),
    ],
    ids=["prefill", "a token without logits", "cross-attention", "a lower level"],
)
def test_other_steps_are_not_padded(other):
    assert decoding_bucket(other) is None


def recorded(limit):
    recorder = HostRecorder()
    return GraphCache(lambda step: torch.tensor([step]), limit, recorder), recorder


def test_a_shape_is_recorded_when_it_occurs_again():
    graphs, recorder = recorded(limit=2)
    for number in range(4):
        assert graphs.run("a", 1.0).item() == 1.0
        assert graphs.num_recorded == (number > 0)
    graphs.clear()
    assert len(graphs) == 0 and recorder.num_cleared == 1
    graphs.run("a", 1.0)
    assert graphs.num_recorded == 1


def test_the_least_recently_used_graph_is_dropped():
    graphs, _ = recorded(limit=2)
    for shape_name in "aabbaccaabb":
        graphs.run(shape_name, 1.0)
    assert len(graphs) == 2
    assert graphs.num_recorded == 4  # a, b, c for which b was dropped, and b again


def test_a_step_that_cannot_be_recorded_runs_as_it_is():
    graphs, _ = recorded(limit=2)
    graphs._recorder.record = lambda function: (_ for _ in ()).throw(RuntimeError("not permitted\nsecond line"))
    assert [graphs.run("a", 2.0).item() for _ in range(3)] == [2.0] * 3
    assert graphs.reason == "a step cannot be recorded: not permitted"
    assert GraphCache(lambda step: step, 0, HostRecorder()).reason == "the engine has cuda_graphs=0"
    with pytest.raises(ConfigError, match="cuda_graphs: must be at least 0, got -1"):
        EngineConfig(cuda_graphs=-1)


def test_padding_writes_to_the_padding_block(monkeypatch):
    """The padded input of a step of three sequences: one of padding, which writes there and reads nothing."""
    monkeypatch.setenv("KVAD_TRITON", "off")
    engine = make_engine()
    engine.runner.graphs = GraphCache(engine.runner._forward, 8, HostRecorder())
    inputs, fill = [], engine.runner.buffers.fill
    engine.runner.buffers.fill = lambda *arguments: inputs.append(fill(*arguments)) or inputs[-1]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt in ((1, 2, 3), (4,), (5, 6)):
        engine.add_request(list(prompt), sampling)
    engine.step()
    engine.step()
    step, block_size = inputs[-1], engine.cache.block_size
    assert step.sub_batches[0].num_seqs == 4 and len(step.token_ids) == 4
    (mapping,) = step.slot_mappings
    assert mapping.slots[3] == PADDING_BLOCK * block_size and (mapping.slots[:3] // block_size > PADDING_BLOCK).all()
    assert mapping.block_tables[0][3].abs().max() == 0 and (mapping.block_tables[0][:3, 0] > PADDING_BLOCK).all()


def test_a_step_without_sampled_tokens():
    assert (
        sample_outputs(
            SchedulerOutput((), (), BlockAllocation(BlockOps((), ()), (), ())), torch.empty(0, 7, device="meta")
        )
        == []
    )


@pytest.mark.parametrize(
    ("kinds", "options", "text"),
    [
        ({}, {}, "attention reads the cache's blocks in place, and products are fused"),
        ({}, {"dtype": "int8"}, "attention reads the cache's blocks in place, and products are fused"),
        ({"norm": "sandwich"}, {}, "in place; products are not fused: norm_position sandwich"),
        ({"norm": "post"}, {}, "products are not fused"),
        ({"position": "alibi"}, {}, "and products are fused"),
        ({"position": "t5"}, {}, "attention runs in PyTorch: a position bias other than ALiBi"),
        ({"heads": "latent"}, {}, "attention runs in PyTorch: latent attention (MLA)"),
        ({"heads": "recurrence"}, {}, "attention runs in PyTorch: layers with a recurrent state"),
        ({}, {"dtype": "int4"}, "attention runs in PyTorch: a cache of int4"),
        ({}, {"policy": "sinks(2, 8)", "rope_at": "read"}, "keys are rotated when they are read"),
    ],
)
def test_description(kinds, options, text):
    cache = CacheConfig(**{"dtype": "bfloat16", "max_seq_len": 64, "block_size": 4, **options})
    assert text in describe_gpu(model_config(**kinds), cache, "bfloat16")


def test_description_of_float64():
    cache = CacheConfig(dtype="float32", max_seq_len=64)
    assert describe_gpu(model_config(), cache, "float64") == "attention runs in PyTorch: activations of float64"
