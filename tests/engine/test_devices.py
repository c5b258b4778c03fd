"""The engine on each device: `make test-gpu` runs the tests on a GPU, `make test` those on the CPU.

All runs are in float64 and greedy, so tokens are equal on every device.
"""

import pytest
import torch

from kvad.cache.device.host_copy import HostCopier
from kvad.cache.device.tensors import ArrayBlocks
from kvad.errors import ConfigError
from kvad.llm import LLM
from tests.support.cli_checkpoints import write_model

PROMPTS = ["def f(x):", "class A", "import os, sys", "a b c d e f g", "x", "return 1 + 2"]
TOKENS = 40
HAS_GPU = torch.cuda.is_available()
NO_GPU = "torch finds no CUDA device"
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason=NO_GPU)])


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("devices") / "tiny")


def load(model, device="cpu", **fields):
    return LLM.load(model, device=device, dtype="float64", **{"max_num_seqs": 3, "block_size": 4, **fields})


def generate(llm):
    completions = llm.generate(PROMPTS, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return [completion.choices[0].token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(model):
    """Greedy tokens on the CPU without a cache."""
    with load(model) as llm:
        sequences = [llm.encode(prompt) for prompt in PROMPTS]
        for tokens in sequences:
            for _ in range(TOKENS):
                tokens.append(int(llm.logits(tokens)[-1].argmax()))
        return [tuple(tokens[-TOKENS:]) for tokens in sequences]


def test_streams_share_a_small_pool(model, device, expected):
    with load(model, device, num_blocks=20, max_num_batched_tokens=11) as llm:
        assert llm.engine.kv_cache.keys[0].data.device.type == device
        assert list(map(tuple, generate(llm))) == expected
        assert llm.engine.scheduler.stats().preemptions > 0
        llm.engine.scheduler.check()


@pytest.mark.parametrize("to_disk", [False, True], ids=["memory", "disk"])
def test_lossy_sequences_are_swapped(model, device, tmp_path, to_disk):
    policy = {"policy": "tiered(8, quantized=-1, interval=8)"}
    with load(model, **policy) as llm:
        expected = generate(llm)
    with load(model, device, num_blocks=24, swap_dir=tmp_path if to_disk else None, **policy) as llm:
        assert generate(llm) == expected
        stats = llm.engine.preemption.stats()
    assert (stats.to_disk if to_disk else stats.to_ram) > 0 and not stats.recomputed


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason=NO_GPU)
@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("room", [True, False], ids=["own stream", "stream of the steps"])
def test_copies_are_complete_before_they_are_used(monkeypatch, room, prefetched):
    """The copies' stream is slowed down, so that what does not wait for it is wrong."""
    copier = HostCopier(torch.device("cuda"))
    monkeypatch.setattr(copier.stream, "has_room", lambda nbytes: room)
    arrays = [torch.randn(32, 4, 16, width, device="cuda") for width in (64, 1)]
    blocks = torch.tensor([3, 9, 4], device="cuda")
    expected = [array[blocks].cpu() for array in arrays]

    def slow_down():
        with torch.cuda.stream(copier.stream._stream):
            torch.cuda._sleep(200_000_000)

    slow_down()
    copies = copier.copy_out(1, [ArrayBlocks("", array, blocks) for array in arrays])
    for array in arrays:
        array.fill_(torch.nan)  # as the next step may
    if prefetched:
        copier.prefetch(1, copies)
    slow_down()
    targets = torch.tensor([7, 30, 2], device="cuda")
    copier.copy_in(1, [ArrayBlocks("", array, targets) for array in arrays], copies)
    for array, values, copy in zip(arrays, expected, copies, strict=True):
        assert torch.equal(array[targets].cpu(), values)
        copier.wait(1)
        assert copy.is_pinned() and torch.equal(copy, values)


def test_tokens_are_offloaded(model, device, expected):
    with load(model, device, max_seq_len=16, overflow="offload", offload_ram=1 << 12) as llm:
        assert list(map(tuple, generate(llm))) == expected


def test_sessions_move_between_devices(model, device, tmp_path, expected):
    path, tokens = tmp_path / "text.kvad", []
    for place in ("cpu", device, "cpu"):
        with load(model, place) as llm:
            session = llm.session(path)
            stream = session.stream("" if tokens else PROMPTS[0], max_tokens=13, temperature=0, ignore_eos=True)
            tokens += [chunk.token_id for chunk in stream]
            session.save()
            assert len(tokens) == 13 or session.reused > 0
    assert tuple(tokens) == expected[0][:39]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason=NO_GPU)
def test_deterministic_mode_needs_the_cpu(model):
    with pytest.raises(ConfigError, match="deterministic: is not supported on cuda"):
        load(model, "cuda", deterministic=True)


def test_default_sizes_follow_from_the_memory_of_the_device(model, device):
    with LLM.load(model, device=device, memory=32 << 20) as llm:
        assert llm.memory_plan.total <= 32 << 20
        assert llm.engine.kv_cache.payload_bytes() == llm.memory_plan.payload + sum(
            group.bytes.payload - group.payload for group in llm.memory_plan.groups
        )
