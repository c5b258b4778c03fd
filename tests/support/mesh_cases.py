"""What is run on meshes: models of every position encoding, policies, formats; and what a broken mesh would do.

``python -m tests.support.mesh_cases FOLDER RANK SIZE`` is one rank of them.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvad import register
from kvad.cache.config import CacheConfig
from kvad.cache.policy import TOVA
from kvad.config import EncoderInputConfig
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput
from kvad.parallel.process_groups import ProcessGroups
from tests.support.driver import Stream
from tests.support.mesh_restore import run_swap
from tests.support.mesh_sessions import run_session
from tests.support.mesh_storage import run_storage
from tests.support.mesh_worker import Case, run_encoder, run_lost_rank, run_rank
from tests.support.random_models import bidirectional, model_config

HEADS = 8


def shaped(position: str = "rope", kv_heads: int = 4, layers: int = 2, **mixer: Any) -> ModelConfig:
    """Eight query heads; widths of 40 and 41, which two ranks share evenly or not."""
    config = model_config(position, "post" if position == "learned" else "pre", "gqa", layers)
    fields = {"num_heads": HEADS, "num_kv_heads": kv_heads, "qkv_bias": True, "out_bias": True, **mixer}
    return with_attention(config, **fields)


def with_layer(config: ModelConfig, layer: cfg.LayerConfig, **stack: Any) -> ModelConfig:
    assert config.decoder is not None
    return replace(
        config, decoder=replace(config.decoder, **{"layer_types": {**config.decoder.layer_types, "L": layer}, **stack})
    )


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    assert config.decoder is not None
    layer = config.decoder.layer_types["L"]
    return with_layer(config, replace(layer, attention=replace(layer.attention, **changes)))


def with_mlp(config: ModelConfig, mlp: cfg.PlainMLPConfig | cfg.GatedMLPConfig | cfg.MoEConfig) -> ModelConfig:
    assert config.decoder is not None
    return with_layer(config, replace(config.decoder.layer_types["L"], mlp=mlp))


def mixed(position: str = "rope") -> ModelConfig:
    """Windows in a pattern of three, so that a pipeline stage begins in the middle of a pattern."""
    config = shaped(position)
    assert config.decoder is not None
    layer = config.decoder.layer_types["L"]
    windowed = replace(layer, attention=replace(layer.attention, window=7))
    return with_layer(config, layer, layer_pattern="LWW", num_layers=4, layer_types={"L": layer, "W": windowed})


def pair(position: str = "rope", kv_heads: int = 4) -> ModelConfig:
    """An encoder-decoder whose cross-attention has a different number of KV heads."""
    config = shaped(position, kv_heads)
    assert config.decoder is not None
    layer = config.decoder.layer_types["L"]
    cross = replace(layer.attention, position=None, causal=False, window=None, num_kv_heads=HEADS)
    decoder = replace(config.decoder, layer_types={"L": replace(layer, cross_attention=cross)})
    source = EncoderInputConfig(
        64, cfg.EmbeddingConfig(scale=2.0, norm=cfg.NormConfig("layer", bias=True)), 41, hidden_size=30
    )
    side = replace(bidirectional(config.decoder), num_layers=3)
    return replace(config, decoder=decoder, encoder=side, encoder_input=source)


class DistanceBias(nn.Module):
    """Custom position encoding: logits fall with the square root of the distance, faster in later heads."""

    def __init__(self, mixer: cfg.AttentionConfig, head_dim: int) -> None:
        super().__init__()
        self.rates = torch.arange(1, mixer.num_heads + 1) / 9

    def forward(self, step: ModelInput) -> DistanceBias:
        return self

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).abs().double()
        return -self.rates.view(1, -1, 1, 1) * distance.sqrt().unsqueeze(1)


def custom_positions() -> ModelConfig:
    register("distance", DistanceBias)
    return with_attention(shaped("none"), position=cfg.CustomPositionsConfig("distance"))


def encoder() -> ModelConfig:
    """An encoder with a masked-language-model head."""
    config = shaped("alibi")
    assert config.decoder is not None
    return replace(config, decoder=None, encoder=bidirectional(config.decoder), head=cfg.LanguageHeadConfig(bias=True))


def streams(seed: int, source: bool = False, longest: int = 18) -> list[Stream]:
    """Sequences of different lengths that arrive one after the other; two share a prompt, one has two samples."""
    rng = random.Random(seed)

    def ids(count: int, limit: int = 60) -> list[int]:
        return [rng.randrange(1, limit) for _ in range(count)]

    shared = ids(19)
    stream_list = [
        Stream(shared + ids(3), [ids(8), ids(8)]),
        Stream(ids(3), [ids(longest)], arrives=1),
        Stream(ids(13), [ids(9)], arrives=2),
        Stream(shared + ids(5), [ids(7)], arrives=9),
    ]
    if source:
        stream_list = [replace(stream, source=ids(5 + 6 * at, 40)) for at, stream in enumerate(stream_list)]
    return stream_list


def tight(**changes: Any) -> CacheConfig:
    """Blocks for about two of four sequences: sequences are preempted and prefixes evicted."""
    lengths = {"max_num_seqs": 4, "max_seq_len": 44, "prefill_chunk_size": 5}
    return CacheConfig(**{"block_size": 4, "num_blocks": 17, "dtype": "float64", **lengths, **changes})  # type: ignore[arg-type]


def roomy(**fields: Any) -> CacheConfig:
    return tight(**{"num_blocks": None, **fields})


def case(name: str, mesh: str, config: ModelConfig, cache: CacheConfig, **fields: Any) -> Case:
    """Build a case; those that resemble others are ``long`` and run with the long tests."""
    rows = streams(len(name), config.encoder_input is not None)
    return Case(f"{name} {mesh}", mesh, config, cache, rows, **fields)


TIERED = "tiered(8, quantized=8, interval=4, num_sinks=4, summaries=8, ratio=2)"
LEVELS = "tiered(8, quantized=8, interval=4, summaries=8, ratio=2)"
EXPERTS = cfg.MoEConfig(
    24, 4, 2, bias=True, router_bias=True, router="sigmoid", selection_bias=True, shared_size=20, shared_gate=True
)


def cases_on_two_ranks() -> list[Case]:
    return [
        *(case("rope gqa", mesh, shaped(), tight(), texts=True) for mesh in ("2x1", "1x2")),
        case("alibi", "2x1", shaped("alibi"), tight()),
        case("alibi mha", "1x2", shaped("alibi", 8), tight(), long=True),
        case("t5", "2x1", shaped("t5"), tight()),
        case("t5 of layers", "2x1", per_layer_biases(), tight()),
        case("learned mha", "2x1", shaped("learned", 8), tight()),
        case("replicated", "2x1", shaped(kv_heads=1), tight()),
        case("norms of each head", "2x1", shaped(qk_norm="each"), tight(), long=True),
        case("norms of all heads", "2x1", shaped(qk_norm="full"), tight()),
        case("norms of all heads, replicated", "2x1", shaped("rope", 1, qk_norm="full"), tight()),
        case("sinks and softcap", "2x1", shaped(sink_logits=True, logit_softcap=3.0), tight()),
        case("values", "2x1", shaped(value_dim=6, clip_qkv=2.0), tight(), long=True),
        case("experts", "2x1", with_mlp(shaped(), EXPERTS), tight()),
        case("odd widths", "2x1", with_mlp(shaped(), cfg.GatedMLPConfig(41, bias=True)), tight()),
        case("windows", "1x2", mixed(), tight()),
        case("windows", "2x1", mixed("alibi"), tight(), long=True),
        case("copied", "2x1", shaped(), roomy(enable_prefix_caching=False)),
        case(
            "contiguous",
            "2x1",
            mixed(),
            CacheConfig(layout="contiguous", max_num_seqs=4, max_seq_len=44, prefill_chunk_size=5, dtype="float64"),
            long=True,
        ),
        case("pair", "2x1", pair(), tight(max_source_len=24), texts=True),
        case("pair t5", "1x2", pair("t5"), tight(max_source_len=24), long=True),
        case("sinks", "2x1", shaped(), roomy(policy="sinks(3, 9)"), long=True),
        case("endless", "1x2", shaped(), roomy(policy="sinks(3, 9)", endless=True, max_seq_len=20)),
        case("heavy", "2x1", shaped(), roomy(policy="0: full; heavy-hitters(8, interval=4)", num_blocks=13)),
        case("tova", "2x1", shaped(), roomy(policy="tova(8, interval=4)")),
        case("tova", "1x2", shaped("alibi"), roomy(policy="tova(8, interval=4)"), long=True),
        case("random", "2x1", shaped(), roomy(policy="random(8, interval=4)")),
        case("random", "1x2", shaped(), roomy(policy="random(8, interval=4)")),
        case("key-norm replicated", "2x1", shaped(kv_heads=1), roomy(policy="key-norm(8, interval=4)"), long=True),
        case("quest", "2x1", shaped(), tight(policy="quest(12)", rope_at="write"), long=True),
        case("int8", "2x1", shaped(), tight(dtype="int8")),
        case("int8/int4", "1x2", shaped(), tight(key_dtype="int8", value_dtype="int4"), long=True),
        case("channels", "2x1", shaped(), roomy(key_dtype="int8-channel", residual_length=8)),
        case("tiered", "2x1", shaped(), roomy(policy=TIERED), long=True),
        case("tiered", "1x2", shaped(), roomy(policy=TIERED), long=True),
        case("learned", "2x1", shaped(), roomy(policy=TIERED), learned=True),
        case("learned", "1x2", shaped(), roomy(policy=TIERED), learned=True, long=True),
        case("deserted", "2x1", shaped(), roomy(), run=run_lost_rank),
        case("own positions", "2x1", custom_positions(), tight()),
        case("encoder", "2x1", encoder(), roomy(), run=run_encoder),
        case("encoder", "1x2", encoder(), roomy(), run=run_encoder, long=True),
        case("source alone", "2x1", pair(), tight(max_source_len=64), run=run_encoder),
        case("read", "2x1", shaped(), tight(rope_at="read"), long=True),
        case("stores", "2x1", mixed(), tight(), run=run_storage),
        case(
            "stores", "1x2", shaped(kv_heads=1), tight(key_dtype="int8", value_dtype="int4"), run=run_storage, long=True
        ),
    ]


def per_layer_biases() -> ModelConfig:
    """T5 biases with one table per layer (UMT5)."""
    config = shaped("t5")
    assert config.decoder is not None
    position = config.decoder.layer_types["L"].attention.position
    assert isinstance(position, cfg.T5BiasConfig)
    return with_attention(config, position=replace(position, shared=False))


def cases_on_four_ranks() -> list[Case]:
    return [
        case("rope", "2x2", shaped(), tight(), texts=True),
        case("alibi", "4x1", shaped("alibi"), tight()),
        case("rope", "1x4", mixed(), tight(), long=True),
        case("replicated", "4x1", shaped(kv_heads=2), tight()),
        case("pair alibi", "2x2", pair("alibi"), tight(max_source_len=24)),
        case("tova int8", "2x2", shaped(), roomy(policy="tova(8, interval=4)", dtype="int8"), long=True),
        case("tiered", "4x1", shaped(), roomy(policy=LEVELS)),
        case("norms of all heads", "4x1", shaped("rope", 2, qk_norm="full"), tight(), long=True),
        *swap_cases(),
        *session_cases(),
    ]


def swap_cases() -> list[Case]:
    """Swapped sequences whose state is more than keys and values: scores, demoted blocks, summaries."""
    return [
        case("swap by rank", "2x1", shaped(), alone("0: full; heavy-hitters(8, interval=4)"), run=run_swap),
        case("swap in levels", "2x1", shaped(kv_heads=2), alone(LEVELS), run=run_swap),
        case("swap on replicas", "4x1", shaped(kv_heads=2), alone(LEVELS, dtype="int8"), run=run_swap),
    ]


def session_cases() -> list[Case]:
    """Sessions moved from mesh to mesh, with every kind of content that a file can have."""
    return [
        case("session", "4x1", mixed(), roomy(), run=run_session),
        case(
            "session by rank",
            "4x1",
            shaped(),
            roomy(policy="0: full; heavy-hitters(8, interval=4)"),
            run=run_session,
            long=True,
        ),
        case("session in levels", "4x1", shaped(layers=4), roomy(policy=TIERED, dtype="int8"), run=run_session),
        case(
            "session of bounds",
            "4x1",
            shaped(kv_heads=4),
            roomy(policy="quest(12)", rope_at="write"),
            run=run_session,
            long=True,
        ),
        case("session of a pair", "4x1", pair(), roomy(max_source_len=24), run=run_session, long=True),
    ]


def alone(policy: str, **fields: Any) -> CacheConfig:
    return roomy(policy=policy, max_num_seqs=1, enable_prefix_caching=False, **fields)


# ---------------------------------------------------------------- injected faults


def inject_bias_on_every_rank(model: Transformer, links: ProcessGroups) -> None:
    """Add the output bias on every rank instead of one."""
    full_bias = torch.full((model.config.hidden_size,), 0.3, dtype=model.token_embedding.dtype)
    assert model.decoder is not None
    for layer in model.decoder.layers:
        layer.attention.out.bias = nn.Parameter(full_bias)  # type: ignore[union-attr]


def inject_missing_sum(model: Transformer, links: ProcessGroups) -> None:
    assert model.decoder is not None
    layer = model.decoder.layers[0]
    layer.attention.out._forward_hooks.clear()  # type: ignore[union-attr]


def inject_first_rank_slopes(model: Transformer, links: ProcessGroups) -> None:
    """Give every rank the slopes of the first rank's heads."""
    assert model.decoder is not None
    for layer in model.decoder.layers:
        for hook in layer.attention._forward_pre_hooks.values():  # type: ignore[union-attr]
            hook._heads = range(len(hook._heads))


def inject_swapped_layers(model: Transformer, links: ProcessGroups) -> None:
    assert model.decoder is not None
    layers = list(model.decoder.layers)
    model.decoder.layers = nn.ModuleList(reversed(layers)) if links.mesh.stage else model.decoder.layers


def inject_local_scores(model: Transformer, links: ProcessGroups) -> None:
    """Let a policy that ranks by all heads use its rank's heads only, until this process ends."""
    TOVA.per_head_independent = True  # type: ignore[assignment,method-assign]


def fault_cases() -> list[Case]:
    return [
        case("broken bias", "2x1", shaped(), tight(), wrong=inject_bias_on_every_rank),
        case("broken sum", "2x1", shaped(), tight(), wrong=inject_missing_sum),
        case("broken slopes", "2x1", shaped("alibi"), tight(), wrong=inject_first_rank_slopes),
        case("broken layers", "1x2", shaped(layers=4), tight(), wrong=inject_swapped_layers),
        case(
            "broken ranks", "2x1", shaped(), roomy(policy="tova(8, interval=4)"), wrong=inject_local_scores
        ),  # last: it changes a class
    ]


def cases(size: int, which: str = "") -> list[Case]:
    """Return the cases of a size; ``which`` is "short", "long", a case's name, or "" for all."""
    all_cases = [*cases_on_two_ranks(), *fault_cases()] if size == 2 else cases_on_four_ranks()
    if which in ("short", "long"):
        return [each for each in all_cases if each.long == (which == "long")]
    return [each for each in all_cases if which in ("", each.name)]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), cases(int(sys.argv[3]), *sys.argv[4:]))
