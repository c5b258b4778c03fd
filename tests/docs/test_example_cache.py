"""``examples/cache.py``, a single file without kvad, compared with kvad on tiny checkpoints in float64."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import cache as page
from kvad.checkpoint.export import export_hf
from kvad.checkpoint.native import open_folder, save_checkpoint
from kvad.config import ModelConfig
from kvad.config import layers as cfg
from kvad.llm import LLM
from kvad.model.transformer import Transformer
from tests.support.random_models import build, model_config

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]


def decoder(tie: bool = True, head_dim: int = 8, kv_heads: int = 2, norm_position: str = "pre") -> Transformer:
    """Build a tiny model like those of ``kvad demo``, with random parameters."""
    layer = cfg.LayerConfig(
        cfg.AttentionConfig(4, kv_heads, head_dim), cfg.GatedMLPConfig(40), cfg.NormConfig(eps=1e-3)
    )
    stack = cfg.StackConfig(3, {"L": layer}, norm_position=norm_position)  # type: ignore[arg-type]
    return build(ModelConfig(24, 32, 96, stack, tie_embeddings=tie))


def save(model: Transformer, folder: Path) -> Path:
    save_checkpoint(folder, model.config, model.state_dict(), None)
    return folder


@torch.inference_mode()
def logits(model: page.Model, tokens: list[int]) -> Tensor:
    return model.forward(torch.tensor([tokens]), torch.tensor([len(tokens)]), page.Cache(model, 1, len(tokens)))[0]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(8, 2), (6, 4), (10, 1)])
@pytest.mark.parametrize("layout", ["kvad", "hf"])
def test_example_equals_kvad(layout: str, tie: bool, head_dim: int, kv_heads: int, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    save(decoder(tie, head_dim, kv_heads), checkpoints / "step-00000002")
    save(decoder(kv_heads=1), checkpoints / "step-00000001")
    if layout == "hf":  # as a training run writes it
        export_hf(open_folder(checkpoints / "step-00000002"), checkpoints / "step-00000003")
    with LLM.load(tmp_path / "run") as llm:
        kvad_logits, tokens = page.load(tmp_path / "run"), [7, 3, 31, 0, 7, 7, 12, 5, 20]
        torch.testing.assert_close(logits(kvad_logits, tokens), llm.logits(tokens), rtol=0, atol=1e-10)
        with torch.inference_mode():
            cached, _ = page.generate(kvad_logits, PROMPTS, steps=12)
        done = llm.generate(PROMPTS, temperature=0, max_tokens=12)
        assert [list(completion.tokens) for completion in done] == cached


@torch.inference_mode()
def test_cached_equals_uncached(tmp_path: Path) -> None:
    for model in (page.tiny(), page.load(save(decoder(), tmp_path / "model"))):
        (cached, a), (uncached, b) = (run(model, PROMPTS, 16) for run in (page.generate, page.without_cache))
        assert cached == uncached
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@torch.inference_mode()
def test_ragged_streams_equal_their_solo_runs() -> None:
    """Chunks of 3, 1 and 2 tokens after prompts of 7, 1 and 3: each stream has its own cursor."""
    model, chunk = page.tiny(), torch.tensor([[8, 9, 7], [2, 0, 0], [4, 4, 0]])
    cache = page.Cache(model, 3, capacity=16)
    page.prefill(model, PROMPTS, cache)
    got = model.forward(chunk, torch.tensor([3, 1, 2]), cache)
    assert cache.cursor.tolist() == [10, 2, 5]
    for row, (prompt, length) in enumerate(zip(PROMPTS, [3, 1, 2], strict=True)):
        solo = logits(model, prompt + chunk[row, :length].tolist())
        torch.testing.assert_close(got[row, :length], solo[-length:], rtol=0, atol=1e-10)
    page.prefill(model, [[1], [2], [3]], cache)  # padding is overwritten before it is read
    (step,) = page.prefill(model, [[1], [2], [3]], cache)[1:2]
    torch.testing.assert_close(step, logits(model, [*PROMPTS[1], 2, 2, 2])[-1], rtol=0, atol=1e-10)


@torch.inference_mode()
def test_cache_is_allocated_once() -> None:
    model = page.tiny()
    cache = page.Cache(model, 3, capacity=9)
    before = (cache.k.data_ptr(), cache.v.data_ptr())
    page.prefill(model, PROMPTS, cache)
    page.prefill(model, [[1], [2], [3]], cache)
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == before
    assert cache.k.shape == (2, 3, 2, 9, 8)
    assert bool((cache.k[:, 0, :, :8] != 0).all()) and bool((cache.k[:, 0, :, 8:] == 0).all())
    with pytest.raises(SystemExit, match="got 9"):
        page.prefill(model, [[1] * 2, [2], [3]], cache)


@torch.inference_mode()
@pytest.mark.parametrize("fault", ["cursor", "rotation", "mask"])
def test_faults_are_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an injected fault, cached and uncached outputs differ."""
    model = page.tiny()
    if fault == "rotation":
        monkeypatch.setattr(page.Model, "rotate", lambda self, x, positions: x * (1 + positions.max()))
    if fault == "mask":
        whole = page.Model.attend
        monkeypatch.setattr(page.Model, "attend", lambda self, q, k, v, p: whole(self, q, k, v, torch.full_like(p, 99)))
    if fault == "cursor":
        write = page.Cache.write
        monkeypatch.setattr(
            page.Cache, "write", lambda self, i, k, v, p: write(self, i, k, v, p.max(0, keepdim=True)[0].expand_as(p))
        )
    _, a = page.generate(model, PROMPTS, 4)
    _, b = page.without_cache(model, PROMPTS, 4)
    assert not math.isclose(float((a - b).abs().max()), 0, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(decoder(norm_position="post"), "'post'", id="post-norm"),
        pytest.param(build(model_config("rope-partial", "pre", "gqa")), "0.5", id="partial rotation"),
        pytest.param(build(model_config("alibi", "pre", "gqa")), "'alibi'", id="alibi"),
        pytest.param(build(model_config("rope", "pre", "window")), "7", id="window"),
        pytest.param(build(model_config("rope", "pre", "mha")), "attention.q.bias", id="bias"),
        pytest.param(build(model_config("rope", "pre", "sinks")), "attention.sink_logits", id="sinks"),
        pytest.param(build(model_config("learned", "pre", "gqa")), "embedding.positions.weight", id="learned"),
        pytest.param(build(model_config("sinusoidal", "pre", "gqa")), "'sinusoidal'", id="sinusoidal"),
        pytest.param(build(model_config("rope", "sandwich", "gqa")), "'sandwich'", id="sandwich"),
    ],
)
def test_unsupported_checkpoints_are_refused(model: Transformer, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        page.load(save(model, tmp_path / "model"))
    assert reason in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("model_type", "mistral"), ("attention_bias", True), ("mlp_bias", True)])
def test_unsupported_llamas_are_refused(key: str, value: object, tmp_path: Path) -> None:
    export_hf(open_folder(save(decoder(), tmp_path / "model")), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(SystemExit, match=str(value)):
        page.load(tmp_path / "hf")


def test_example_is_short_and_imports_no_kvad() -> None:
    text = (ROOT / "examples" / "cache.py").read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert imported == {"json", "pathlib", "safetensors", "sys", "torch"}
    assert len(text.splitlines()) <= 178


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.inference_mode():
        page.main([])
    assert "cached == uncached: True" in capsys.readouterr().out
