"""Sizes of a cache that follow from the free memory: models as large as published ones, nothing is allocated."""

from dataclasses import replace

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.sizing.fits import MemoryBudget, describe_room, fit_plan, pool_tokens, require_memory
from kvad.cache.sizing.memory_plan import plan_memory, plan_with
from kvad.engine.options import plan_cache
from kvad.errors import ConfigError, MemoryPlanError
from kvad.planning.known_models import known_model

GIB = 1 << 30
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")


def load_plan(name, free=24 * GIB, budget=None, **fields):
    """Plan as ``LLM.load`` of a checkpoint in bfloat16 does."""
    return plan_cache(known_model(name), fields, budget or MemoryBudget(), free, weights_dtype="bfloat16")


@pytest.mark.parametrize("name", MODELS)
def test_models_are_loaded_without_a_size(name):
    plan, limit = load_plan(name), known_model(name).max_seq_len
    assert plan.total <= 0.9 * 24 * GIB
    assert plan.cache.max_seq_len == limit or (name == "llama-3.1-8b" and 32_768 < plan.cache.max_seq_len < limit)
    assert plan.cache.max_num_seqs >= 8 and pool_tokens(plan) >= plan.cache.max_seq_len
    chat = load_plan(name, budget=MemoryBudget(max_num_seqs=1))
    assert chat.cache.max_num_seqs == 1 and chat.cache.max_seq_len >= plan.cache.max_seq_len
    prompt = load_plan(name, budget=MemoryBudget(max_num_seqs=64, max_seq_len=300))
    assert (prompt.cache.max_num_seqs, prompt.cache.max_seq_len, prompt.cache.num_blocks) == (64, 300, None)


@pytest.mark.parametrize("name", [*MODELS, "gemma-2-9b", "t5-base", "bert-base"])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("gib", [20, 40])
def test_nothing_else_fits_beside_a_fitted_pool(name, layout, gib):
    config, memory = known_model(name), gib * GIB
    source = config.encoder_input.max_seq_len if config.encoder_input else 0
    cache = CacheConfig(max_num_seqs=256, max_seq_len=config.max_seq_len, max_source_len=source, layout=layout)
    largest = plan_memory(config, cache, weights_dtype="bfloat16")
    plan = fit_plan(largest, memory, ())
    assert plan.total <= memory
    if plan == largest:
        return
    more = [replace(plan.cache, max_seq_len=plan.cache.max_seq_len + 16)] if plan.cache.max_num_seqs == 1 else []
    if plan.cache.num_blocks is not None:
        more = [replace(plan.cache, num_blocks=plan.cache.num_blocks + 1)]
    elif plan.cache.max_seq_len == config.max_seq_len:
        more = [replace(plan.cache, max_num_seqs=plan.cache.max_num_seqs + 1)]
    assert all(plan_with(plan, cache).total > memory for cache in more)


def test_given_sizes_are_kept():
    plan = load_plan("llama-3.1-8b", max_num_seqs=100)
    assert plan.cache.max_num_seqs == 100 and plan.cache.max_seq_len < 131_072
    plan = load_plan("llama-3.1-8b", max_seq_len=8192)
    assert plan.cache.max_seq_len == 8192 and plan.cache.max_num_seqs > 8
    plan = load_plan("llama-3.1-8b", max_num_seqs=2, max_seq_len=4096)
    assert plan.cache.num_blocks is None and pool_tokens(plan) == 8192


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"max_num_seqs": 100, "max_seq_len": 8192}, "--max-num-seqs 1 --max-seq-len"),
        ({"max_seq_len": 131_072}, "--max-num-seqs 1 --max-seq-len"),
        ({"num_blocks": 100_000}, "--max-seq-len"),
    ],
)
def test_given_sizes_that_do_not_fit_are_refused(fields, hint):
    with pytest.raises(MemoryPlanError) as caught:
        load_plan("llama-3.1-8b", **fields)
    assert hint in caught.value.hint and "24.00 GiB is available" in caught.value.message


def test_memory_below_one_block():
    with pytest.raises(ConfigError) as caught:
        load_plan("qwen3-0.6b", budget=MemoryBudget(1 << 20))
    assert caught.value.exit_code == 2 and "1.00 MiB is allowed (--memory)" in caught.value.message


def test_memory_of_the_user():
    half, size = (load_plan("qwen3-0.6b", budget=MemoryBudget(amount)) for amount in (0.5, 8 * GIB))
    assert 11.9 * GIB < half.total <= 12 * GIB and 7.9 * GIB < size.total <= 8 * GIB
    with pytest.raises(MemoryPlanError, match=r"6.00 GiB is available"):  # less is free
        load_plan("qwen3-0.6b", 6 * GIB, MemoryBudget(8 * GIB), max_num_seqs=64, max_seq_len=1024)


def test_unknown_memory_keeps_the_limit_of_the_model():
    plan = load_plan("qwen3-0.6b", free=None)
    assert (plan.cache.max_num_seqs, plan.cache.max_seq_len) == (8, 40_960)


@pytest.mark.parametrize("amount", [0, -1, 0.0, 1.5, True, "8GiB", None])
def test_invalid_amounts(amount):
    with pytest.raises(ConfigError, match="memory: must be 'auto', bytes or a fraction"):
        MemoryBudget(amount).resolve(GIB)


def test_memory_of_a_gpu_excludes_what_is_in_host_memory():
    fields = {"swap_space": 100 * GIB, "max_seq_len": 8192, "max_num_seqs": 1}
    config, budget = known_model("llama-3.1-8b"), MemoryBudget()
    plan = plan_cache(config, fields, budget, 24 * GIB, is_host=False, weights_dtype="bfloat16")
    assert plan.total > 100 * GIB
    with pytest.raises(MemoryPlanError):
        plan_cache(config, fields, budget, 24 * GIB, weights_dtype="bfloat16")


def test_every_sequence_may_have_a_token_in_a_step():
    plan = plan_cache(
        known_model("gpt2"), {}, MemoryBudget(), 24 * GIB, weights_dtype="float32", max_num_batched_tokens=20
    )
    assert plan.cache.max_num_seqs == 20


def test_descriptions():
    config = known_model("gpt2")
    cache = CacheConfig(max_num_seqs=8, max_seq_len=1024)
    assert describe_room(plan_memory(config, cache)) == "room for 8 sequences of 1,024 tokens"
    shared = plan_memory(config, replace(cache, num_blocks=80))
    assert describe_room(shared) == "room for 8 sequences of 160 tokens; 1,024 for one"
    require_memory(shared, shared.total)
