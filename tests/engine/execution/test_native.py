"""The native CPU kernels against PyTorch, for every configuration of model and cache that they can compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling import SamplingParams
from kvad.model.transformer import Transformer
from kvad.ops.linear import Linear
from kvad.ops.native import library as native
from kvad.ops.quantized_linear import QuantizedLinear, quantize_matrix
from tests.model.test_topologies import MLPS, PLACES, case_id, named, with_axes
from tests.support.covering_array import Case, pairwise
from tests.support.random_models import HEADS, POSITIONS, VOCAB, build, model_config, pair_config

pytestmark = pytest.mark.skipif(native.load().library is None, reason=native.load().reason)
PROMPTS = [[11, 60, 2, 45, 45, 1, 66, 30, 4], [3], [5, 9, 8, 7], [21, 22, 23, 24, 25] * 8, [1, 2]]
SOURCES = [[7, 3, 12, 40, 5], [1], [0, 33, 21, 9, 9, 2, 17, 8] * 4, [4, 4, 5], [6, 7]]
CACHES: dict[str, dict[str, Any]] = {
    "paged": {"block_size": 4},
    "contiguous": {"layout": "contiguous"},
    "chunks": {"block_size": 16, "prefill_chunk_size": 7},
    "sinks": {"policy": "sinks(2, 12)", "block_size": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int4": {"key_dtype": "int8", "value_dtype": "int4"},
    "fp8": {"key_dtype": "fp8-e4m3", "value_dtype": "fp8-e5m2"},
}
LOSSY = {"bfloat16": 0.02, "float16": 0.002, "int8": 0.02, "int4": 0.3, "fp8": 0.3}  # a rounding may go either way
AXES = {"position": POSITIONS, "norm": PLACES, "heads": HEADS, "mlp": MLPS[:2], "cache": tuple(CACHES)}
CASES = pairwise(AXES, seed=5)
PAIRS = pairwise(AXES | {"norm": ("pre", "post", "sandwich"), "cache": ("paged", "contiguous", "bfloat16")}, seed=6)


def logits_of_steps(
    model: Transformer, cache: dict[str, Any], *, native: bool = True, beams: int = 1
) -> tuple[list[Tensor], str]:
    """Return the logits of every step of five requests, and why they were not computed natively."""
    sizes = {"max_seq_len": 64, "max_num_seqs": 8, "max_source_len": 40 if model.config.encoder else 0}
    config = CacheConfig(**sizes | cache)
    engine = Engine(model, config, EngineConfig(native=native, stop_tokens=frozenset({VOCAB})))
    execute, logits = engine.runner.execute, list[Tensor]()

    def recorded(output: Any) -> Tensor:
        logits.append(execute(output).float())
        return logits[-1]

    engine.runner.execute = recorded  # type: ignore[method-assign]
    sources: Sequence[Sequence[int] | None] = SOURCES if model.config.encoder else [None] * len(PROMPTS)
    for prompt, source in zip(PROMPTS, sources, strict=True):
        params = SamplingParams(max_tokens=8, temperature=0.0, n=beams)
        engine.add_request(prompt, params, encoder_token_ids=source)
    while not engine.idle:
        engine.step()
    assert (engine.runner.program is None) == bool(engine.runner.native_reason)
    return logits, engine.runner.native_reason


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference over the largest logit, up to the first step of other tokens."""
    worst = 0.0
    for own, other in zip(ours, theirs, strict=False):
        if own.shape != other.shape:
            break
        worst = max(worst, float((own - other).abs().max() / other.abs().max()))
        if not torch.equal(own.argmax(-1), other.argmax(-1)):
            break
    return worst


def compare(config: ModelConfig, case: Case, dtype: torch.dtype = torch.float32) -> str:
    model = build(config, dtype=dtype)
    ours, reason = logits_of_steps(model, CACHES[case["cache"]])
    theirs, _ = logits_of_steps(model, CACHES[case["cache"]], native=False)
    assert len(ours) == len(theirs)
    assert all(bool(step.isfinite().all()) for step in ours)
    tolerance = max(LOSSY.get(case["cache"], 0.0), 3e-5 if dtype == torch.float32 else 0.05)
    assert difference(ours, theirs) <= tolerance
    return reason


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decoder_equals_pytorch(case: Case) -> None:
    config = with_axes(model_config(named(case["position"]), case["norm"], case["heads"]), case)
    reason = compare(config, case)
    assert bool(reason) == (case["heads"] == "latent")


@pytest.mark.parametrize("case", PAIRS, ids=case_id)
def test_encoder_decoder_equals_pytorch(case: Case) -> None:
    config = with_axes(pair_config(named(case["position"]), case["norm"], case["heads"]), case)
    reason = compare(config, case)
    assert bool(reason) == (case["heads"] == "latent")


@pytest.mark.parametrize("mlp", MLPS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 2), (8, 8), (4, 2), (4, 8)])
def test_quantized_weights(bits: int, group_size: int, half: bool, dtype: torch.dtype, mlp: Any) -> None:
    case = {"position": "rope", "norm": "pre", "mlp": mlp}
    config = with_axes(model_config(named("rope"), "pre", "gqa"), case)
    model = build(config, dtype=dtype)
    assert quantize(model, bits, group_size, half) > 4
    ours, reason = logits_of_steps(model, {})
    theirs, _ = logits_of_steps(model, {}, native=False)
    assert not reason
    assert difference(ours, theirs) <= (3e-5 if dtype == torch.float32 else 0.05)


def quantize(model: Transformer, bits: int, group_size: int, half: bool) -> int:
    """Quantize the layers whose width the groups divide; return their number."""
    count = 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is Linear and layer.in_features % group_size == 0:
                matrix = quantize_matrix(layer.weight.detach(), bits, group_size)
                if half:
                    minimum = None if matrix.minimum is None else matrix.minimum.half()
                    matrix = matrix._replace(scale=matrix.scale.half(), minimum=minimum)
                setattr(module, name, QuantizedLinear(matrix, layer.bias))
                count += 1
    return count


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope", "rope-yarn"])
def test_frequencies_that_depend_on_the_length(position: str) -> None:
    assert not compare(model_config(position, layers=3), {"cache": "paged"})
