"""FLOPs of a pass compared with torch's counter, for every topology and experts; ``test_bench.py`` covers decoders."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvad.cache.config import CacheConfig
from kvad.cache.groups import group_bytes
from kvad.config import flops
from kvad.config.layers import EmbeddingConfig, HeadTransformConfig, LanguageHeadConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from tests.support.golden_models import GoldenModel
from tests.support.lab_models import CONFIGS, ENCODERS, MIXTURES, PAIRS, encoder, pair, tiny

NARROW = {
    "narrow table": tiny(
        embedding=EmbeddingConfig(embedding_size=10),
        head=LanguageHeadConfig(transform=HeadTransformConfig(None, False, output_size=10)),
    ),
    "narrow encoder": encoder(
        embedding=EmbeddingConfig(embedding_size=10),
        head=LanguageHeadConfig(transform=HeadTransformConfig(output_size=10)),
    ),
    "narrow source": pair(source_vocab=41, embedding=EmbeddingConfig(embedding_size=10), tie_embeddings=False),
}
COUNTED = [name for name in PAIRS if name not in ("pair t5", "pair umt5", "pair window")]


def step_of(tokens, source=None, num_logits=None):
    ids = torch.arange(tokens)
    at = torch.tensor([tokens - 1]) if num_logits is None else num_logits
    return ModelInput(
        ids, ids, (SubBatch(1, tokens, tokens),), at, encoder_input=None if source is None else step_of(source)
    )


def counted(work):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        work()
    return counter.get_total_flops()


def model_of(config):
    # torch's counter requires a graph for inputs that can have gradients
    return Transformer(config).eval().requires_grad_(False)


@pytest.mark.parametrize("name", [*MIXTURES, "narrow table", "latent", "latent bias"])
def test_flops_of_a_decoder(name):
    config = {**CONFIGS, **MIXTURES, **NARROW}[name]
    model, step = model_of(config), step_of(7)
    measured = counted(lambda: model.logits(model(step, NoCache(config, kernel="reference")), step.logit_indices))
    assert measured == flops.uncached_pass(config, 7).flops


def test_only_chosen_experts_count():
    config = MIXTURES["experts"]  # 8 experts, 2 active
    mlp = 3 * 24 * 40 * 4

    def read(tokens):
        return flops.uncached_pass(config, tokens).weights

    assert read(2) - read(1) == 2 * 2 * mlp and read(4) == read(5) == read(1) + 2 * 6 * mlp


@pytest.mark.parametrize("name", [*COUNTED, "narrow source"])
def test_flops_of_an_encoder_decoder_by_recomputation(name):
    config = {**PAIRS, **NARROW}[name]
    model, step = model_of(config), step_of(7, source=9)
    encoded = counted(lambda: model.encode(step.encoder_input))
    whole = counted(lambda: model.logits(model(step, NoCache(config, kernel="reference")), step.logit_indices))
    read, cross = flops.encoder_pass(config, 9), cross_attention_flops(config, 9)
    assert encoded == read.flops - uncounted_flops(config, read) - cross
    assert whole - encoded == flops.uncached_pass(config, 7, source=9).flops - read.flops + cross


def uncounted_flops(config, cost):
    """Products that torch's counter omits on a CPU: those of the fused kernel, which the encoder uses unless the
    value width differs.
    """
    mixer = config.encoder.layer_types["L"].attention
    return 0 if mixer.value_dim not in (None, mixer.head_dim) else cost.attention


def cross_attention_flops(config, source):
    """FLOPs of the encoder's keys and values that the decoder reads."""
    weights = dict(model_of(config).named_parameters())
    model = [name for name in weights if name.endswith((".cross_attention.k.weight", ".cross_attention.v.weight"))]
    return 2 * source * sum(weights[name].numel() for name in model)


@pytest.mark.parametrize("name", COUNTED)
def test_the_encoder_input_is_encoded_once_with_a_cache(name):
    config = PAIRS[name]
    cache = CacheConfig(max_num_seqs=1, max_seq_len=32, block_size=1, enable_prefix_caching=False, max_source_len=9)
    engine = Engine(model_of(config), cache, EngineConfig(kernel="reference"))
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=6, temperature=0), encoder_token_ids=list(range(9)))
    seen = []
    while not engine.idle:
        seen.append(counted(engine.step))
    read = flops.encoder_pass(config, 9)
    decoding = [flops.cached_pass(config, 5, 5, source=9).flops]
    decoding += [flops.cached_pass(config, 1, length, source=9).flops for length in range(6, 11)]
    assert seen == [read.flops - uncounted_flops(config, read), *decoding]
    assert read.flops + sum(decoding) == flops.generation_cost(config, 5, 6, source=9)[0].flops
    weight_bytes = {
        each.spec.is_cross_attention: group_bytes(each).per_token_payload for each in engine.kv_cache_manager.groups
    }
    assert read.bytes_written == 9 * weight_bytes[True]
    assert flops.cached_pass(config, 1, 10, source=9).bytes_read == 10 * weight_bytes[False] + 9 * weight_bytes[True]


@pytest.mark.parametrize("name", ["albert", "deberta-v2"])
def test_flops_of_shared_layers_and_disentangled_attention(name):
    golden = GoldenModel(("5", name))
    model, step = golden.model().requires_grad_(False), step_of(7, num_logits=torch.arange(7))
    cost = flops.uncached_pass(golden.config, 7)
    plain = cost._replace(attention=2 * 7 * 7 * 2 * golden.config.hidden_size * golden.config.stack.num_layers)
    measured = counted(lambda: model.logits(model(step, NoCache(golden.config)), step.logit_indices))
    assert measured == cost.flops - uncounted_flops(golden.config, plain)


@pytest.mark.parametrize("name", [*ENCODERS, "narrow encoder"])
def test_flops_of_an_encoder(name):
    config = {**ENCODERS, **NARROW}[name]
    model, step = model_of(config), step_of(7, num_logits=torch.arange(7))

    def encode():
        hidden = model(step, NoCache(config))
        whole = config.head.kind == "pooling" or getattr(config.head, "level", "token") == "row"
        return model.pooled_outputs(hidden, step) if whole else model.logits(hidden, step.logit_indices)

    cost = flops.uncached_pass(config, 7)
    assert counted(encode) == cost.flops - uncounted_flops(config, cost)
    assert cost.attention == 2 * 7 * 7 * 4 * 12 * config.encoder.num_layers
    assert cost.bytes_read == cost.bytes_written == 0


def test_encoder_input_requires_an_encoder_decoder():
    with pytest.raises(AssertionError, match="reads a source"):
        flops.uncached_pass(PAIRS["pair"], 3)
    with pytest.raises(AssertionError, match="no encoder"):
        flops.uncached_pass(replace(MIXTURES["experts"]), 3, source=4)


# ---------------------------------------------------------------- training


def training_flops(config, rows, length, source, num_requested):
    """Count FLOPs of a forward and a backward pass, with attention as plain products."""
    model = Transformer(config)
    torch.nn.init.normal_(model.token_embedding, std=0.1)

    def step(tokens, num_logits):
        ids = torch.arange(rows * tokens) % 7
        return ModelInput(ids, ids % tokens, (SubBatch(rows, tokens, tokens),), num_logits)

    whole = step(length, torch.arange(num_requested))
    if source:
        whole = whole._replace(encoder_input=step(source, torch.empty(0, dtype=torch.int64)))
    with FlopCounterMode(display=False) as counter:
        hidden = model(whole, NoCache(config, kernel="reference"))
        model.logits(hidden, whole.logit_indices).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [*MIXTURES, "narrow table"])
def test_training_costs_three_passes(name):
    config = {**MIXTURES, **NARROW}[name]
    if name.startswith("experts"):  # the computed experts depend on the tokens
        assert flops.training_pass(config, 2, 7, 5) > 0
        return
    assert training_flops(config, 2, 7, 0, 5) == flops.training_pass(config, 2, 7, 5)
