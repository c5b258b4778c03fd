"""Summaries within a budget: what a row really holds is never more than it was given."""

import random

import pytest
import torch

from kvad.cache.sizing import CacheConfig
from kvad.config import mixers
from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.errors import UsageError
from kvad.lab.variants import summaries, variants_of
from kvad.model.compress import Compressor
from tests.models import VOCAB, build, model_config


def test_a_worked_example():
    made = summaries(1024, 256, 8)
    assert made == {"policy": "hierarchy(136, packed=0, every=8, summaries=112, ratio=8)", "block_size": 8}


@pytest.mark.parametrize("budget", [24, 48, 60])
def test_a_row_holds_no_more_than_its_budget(budget):
    model = build(model_config(), dtype=torch.float32)
    cache = CacheConfig(rows=1, capacity=96, chunk=8, prefix=False, **summaries(96, budget, 4))
    engine, most = Engine(model, cache), 0
    draw = random.Random(0)
    engine.submit([draw.randrange(VOCAB) for _ in range(95)], Sampling(max_tokens=1))
    while not engine.idle:
        engine.step()
        held = [
            int((positions >= 0).sum(-1)[[n for n, count in enumerate(pool.refs) if count > 0]].sum())
            for positions, pool in zip(engine.memory.positions, engine.ledger.pools, strict=True)
        ]
        most = max(most, sum(held))
    assert 0.6 * budget <= most <= budget


def test_learned_is_a_name_where_there_is_a_compressor():
    compressor = Compressor(mixers(model_config()), 4)
    names = [(variant.name, variant.compressor) for variant in variants_of(["summaries", "learned"], [0.5], compressor)]
    assert names == [("full", None), ("summaries", None), ("learned", compressor)]
    with pytest.raises(UsageError, match="unknown cache 'learned'"):
        variants_of(["learned"])
