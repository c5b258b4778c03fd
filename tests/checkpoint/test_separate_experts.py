"""Experts that a Hugging Face folder stores one by one are mapped so, and compute the same as joined ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvad import checkpoint, ops
from kvad.cache.config import CacheConfig
from kvad.checkpoint.export import import_hf
from kvad.engine.options import EngineConfig
from kvad.llm import LLM
from kvad.model.fingerprint import weights_fingerprint
from kvad.model.layers import MixtureOfExperts
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.ops.native import packed_store
from kvad.verify.reference_model import WholeSequence, reference_model
from tests.checkpoint.test_gguf_quantized import engine_logits
from tests.file_parity import cases
from tests.support.cli_checkpoints import run

ONE_BY_ONE = ("mixtral", "qwen3moe", "olmoe", "qwen2moe", "glm4moe", "dots1", "ernie4_5-moe", "deepseek2 v3")
IN_HALVES = ("granitemoe", "granitemoe shared")  # gate and up of all experts are one tensor
TOKENS = [5, 6, 7, 9, 30, 21, 2, 8]
needs_kernels = pytest.mark.skipif(ops.native.load().library is None, reason=ops.native.load().reason)


def experts(model: Transformer) -> Iterator[nn.Module | Tensor]:
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            yield from (module.gate, module.up, module.down)


def matrices(model: Transformer) -> Iterator[Tensor]:
    for part in experts(model):
        yield from part.parameters() if isinstance(part, nn.Module) else [part]


def engine(model: Transformer, **options: bool) -> LLM:
    config = CacheConfig(max_seq_len=40, max_num_seqs=1)
    return LLM(model, None, config, engine_config=EngineConfig(**options))  # type: ignore[arg-type]


def both(folder: Path, dtype: str) -> tuple[Transformer, Transformer]:
    """Return the model as it is loaded, and with joined experts."""
    separate, _ = checkpoint.loader.load_model(folder, dtype)
    assert all(isinstance(part, nn.ParameterList) for part in experts(separate))
    joined = copy.deepcopy(separate)
    joined.join_experts()
    assert all(isinstance(part, nn.Parameter) and part.dim() == 3 for part in experts(joined))
    return separate, joined


@pytest.mark.skipif(not ops.native.library.SMAPS.is_file(), reason="the system does not say what is mapped")
@pytest.mark.parametrize("case", ONE_BY_ONE + IN_HALVES)
def test_experts_are_mapped(tmp_path: Path, case: str) -> None:
    folder = cases.write_case(case, tmp_path / "hf")
    model, handle = checkpoint.loader.load_model(folder)
    files = ops.native.FileMappings()
    found = list(matrices(model))
    assert found and all(map(files.contain, found))
    assert sum(x.nbytes for x in found) == sum(
        x.nbytes for name, x in handle.weights() if "mlp." in name and x.dim() == 3
    )
    outline = checkpoint.loader.outline_model(handle)
    assert [x.shape for x in matrices(outline.model)] == [x.shape for x in found]
    assert not any(".mlp.gate" in name or ".mlp.down" in name for name in outline.copied)


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_the_model_is_that_of_joined_experts(tmp_path: Path, case: str) -> None:
    separate, joined = both(cases.write_case(case, tmp_path / "hf"), "float64")  # not mapped: as aligned as joined ones
    weights = dict(checkpoint.open_checkpoint(tmp_path / "hf").weights_as(torch.float64))
    assert all(torch.equal(x, weights[name]) for name, x in joined.state_dict().items())
    assert weights_fingerprint(separate) == weights_fingerprint(joined)
    outputs = [engine(model, native=False).logits(TOKENS) for model in (separate, joined)]
    assert torch.equal(*outputs)
    if "deepseek" not in case:  # latent attention is not deterministic
        outputs = [engine(model, deterministic=True).logits(TOKENS) for model in (separate, joined)]
        assert torch.equal(*outputs)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in ONE_BY_ONE if "deepseek" not in case])  # latent attention
def test_the_kernels_compute_the_same(tmp_path: Path, case: str, dtype: str) -> None:
    llms = [engine(model) for model in both(cases.write_case(case, tmp_path / "hf"), dtype)]
    assert torch.equal(*(engine_logits(llm, TOKENS) for llm in llms))
    assert [llm.engine.runner.native_reason for llm in llms] == ["", ""]


@needs_kernels
def test_packed_experts_are_mapped_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(tmp_path / "packed"))
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    monkeypatch.setattr("kvad.engine.engine.MAX_PACKED_BYTES", 0)
    monkeypatch.setattr("kvad.engine.execution.native_program.MAX_COPIED_BYTES", 0)
    folder, packed, pack = cases.write_case("mixtral", tmp_path / "hf"), [], ops.native.library._pack

    def record(*arguments: object) -> Tensor:
        packed.append(pack(*arguments))  # type: ignore[arg-type]
        return packed[-1]

    monkeypatch.setattr(ops.native.library, "_pack", record)
    logits = []
    for expected in (True, False):
        llm = LLM.load(folder, max_num_seqs=1, max_seq_len=48)
        logits.append(engine_logits(llm, TOKENS))
        assert llm.engine.runner.native_reason == "" and bool(packed) == expected
        packed.clear()
    assert torch.equal(*logits)


def test_an_import_has_the_same_fingerprint(tmp_path: Path) -> None:
    handle = checkpoint.open_checkpoint(cases.write_case("qwen3moe", tmp_path / "hf"))
    import_hf(handle, tmp_path / "out")
    models = [checkpoint.loader.load_model(tmp_path / name)[0] for name in ("hf", "out")]
    assert [isinstance(next(experts(model)), nn.ParameterList) for model in models] == [True, False]
    assert len({weights_fingerprint(model) for model in models}) == 1
    next(matrices(models[0])).data[-1, -1] += 1
    assert weights_fingerprint(models[0]) != weights_fingerprint(models[1])


def test_the_reference_is_that_of_joined_experts(tmp_path: Path) -> None:
    models = both(cases.write_case("mixtral", tmp_path / "hf"), "bfloat16")
    references = [reference_model(model, torch.float64) for model in models]
    before = [[x.clone() for x in matrices(reference)] for reference in references]
    sequence, cache = WholeSequence(tuple(TOKENS), None), NoCache(models[0].config, kernel="reference")
    outputs = [reference.whole_logits([sequence], cache)[0] for reference in references]
    assert outputs[0].dtype == torch.float64 and torch.equal(*outputs)
    for reference, stored in zip(references, before, strict=True):  # converted for a layer at a time only
        assert all(
            a.dtype == torch.bfloat16 and torch.equal(a, b) for a, b in zip(matrices(reference), stored, strict=True)
        )


@pytest.mark.parametrize("options", [(), ("--mesh", "2x1")])
def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    folder = cases.write_case("mixtral", tmp_path / "hf")
    result = run(capsys, "verify", folder, *options)
    assert result.code == 0 and "exact" in result.out
