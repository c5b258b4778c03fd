"""The files of docs/contributing/extending.md, written to a folder on the path and run with its commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvad
from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups, group_bytes
from kvad.checkpoint.conversion import write_tensors
from kvad.checkpoint.native import save_checkpoint
from kvad.checkpoint.safetensors_io import write_sharded
from kvad.cli.main import main
from kvad.config.layers import AttentionConfig, CustomPositionsConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig, attention_specs
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer
from tests.support.cache_trace_models import make_looker

PAGE = (Path(__file__).parents[2] / "docs" / "contributing" / "extending.md").read_text("utf-8")
FILES = dict(re.findall(r"```python\n# file: (\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("kvad.config.plugins._registered", {})
    for plugin in ("kerple:Kerple", "gated:GatedAttention", "keydiff:KeyDiff", "log8:Log8", "parrot:FAMILY"):
        kvad.register(plugin.partition(":")[0], plugin)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_file_is_at_most_thirty_lines_of_code() -> None:
    assert set(FILES) == {"kerple.py", "gated.py", "prove.py", "parrot.py", "keydiff.py", "log8.py"}
    for name, text in FILES.items():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= 30, (name, len(lines))


def test_proof_prints_exact(folder: Path) -> None:
    done = subprocess.run([sys.executable, "prove.py"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exact (paged float32, paged float64"), done.stdout


def test_weights_are_counted_from_the_config(folder: Path) -> None:
    mixer = AttentionConfig(4, 2, position=CustomPositionsConfig("kerple"), custom_class="gated")
    config = ModelConfig(32, 61, 96, StackConfig(2, {"L": LayerConfig(mixer, GatedMLPConfig(48))}))
    model = Transformer(config)
    assert weight_shapes(config) == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert ModelConfig.from_dict(config.to_dict()) == config


COMMANDS = [shlex.split(line) for line in re.findall(r"^    kvad (.*)$", PAGE, re.MULTILINE)]


@pytest.fixture
def looker(folder: Path) -> Path:
    """Write a model that looks keys up, used in place of the page's model."""
    model, tokenizer = make_looker(limit=256)
    save_checkpoint(folder / "looker", model.config, model.state_dict(), tokenizer)
    return folder / "looker"


def run(command: str, looker: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    (printed,) = [words for words in COMMANDS if words[: len(command.split())] == command.split()]
    assert main([str(looker) if word == "runs/lookup-cpu" else word for word in printed] + [*more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_custom_policy_and_format_are_verified(looker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run("verify", looker, capsys, "--num-prompts", "3", "--max-tokens", "24")
    assert len(output["cases"]) == 4 and not output["skipped"]
    for case in output["cases"]:
        assert case["verdict"] == "lossy by design" and case["structure"] <= 1e-10
        assert case["loss"]["kl_mean"] > 0 and case["loss"]["recall"]["full"] == 1


def test_custom_format_is_planned_exactly(looker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("plan", looker, capsys)
    config = make_looker(limit=256)[0].config
    cache = CacheConfig(key_dtype="log8", value_dtype="log8", max_num_seqs=2, max_seq_len=32)
    groups = build_groups(attention_specs(config), cache)
    planned = [group_bytes(group) for group in groups]
    memory = KVCache(groups)
    assert memory.payload_bytes() == sum(each.payload for each in planned)
    assert memory.scale_bytes() == sum(each.scales for each in planned) > 0


def test_custom_policy_and_format_are_measured(looker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "--lengths 128 --samples-per-cell 2 --num-texts 1 --tasks single --depths 0.25,0.75"
    output = run("bench cache-quality", looker, capsys, *few.split())
    rows = {row["cache"]: row for row in output["summary"]}
    assert set(rows) == {"full", "keydiff", "random", "log8"}
    assert rows["full"]["recall"]["single"] == rows["log8"]["recall"]["single"] == 1
    assert rows["keydiff"]["recall"]["single"] is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("arrays = encode = None", "has no arrays"),
        ("arrays = encode = decode = lambda *_: (('scale', 'slot', 'int8', 1),)", "must be named 'data'"),
        ("arrays = encode = decode = lambda *_: (('data', 'slot', 'int3', 1),)", "dtype one of float64"),
        ("arrays = encode = decode = lambda *_: (('data', 'block', 'int8', 1),)", "granularity must be 'slot'"),
        ("loss = 'none at all'; arrays = encode = decode = len", "none, rounding or lossy"),
    ],
)
def test_invalid_formats_are_refused(folder: Path, body: str, message: str) -> None:
    (folder / "wrong.py").write_text(f"class Wrong:\n    {body}\n")
    sys.modules.pop("wrong", None)
    kvad.register("wrong", "wrong:Wrong")
    config = make_looker(limit=64)[0].config
    with pytest.raises(ConfigError, match=message):
        KVCache(build_groups(attention_specs(config), CacheConfig(key_dtype="wrong", max_num_seqs=1, max_seq_len=16)))


def test_custom_family_is_read_and_verified(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import parrot  # type: ignore[import-not-found]

    sizes = {"width": 32, "vocab": 61, "limit": 96, "layers": 2, "heads": 4, "hidden": 48}
    content = {"model_type": "parrot", **sizes}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(content))
    from kvad.checkpoint.conversion import HFConfigReader

    config = parrot.FAMILY.read(HFConfigReader(content, "config.json"))
    torch.manual_seed(0)
    write_sharded(folder / "model", write_tensors(parrot.FAMILY, config, Transformer(config).state_dict()))
    assert (
        main(["verify", str(folder / "model"), "--prefill-chunk-size", "8", "--block-size", "4", "--max-tokens", "8"])
        == 0
    )
    assert "verdict: exact" in capsys.readouterr().out
    assert parrot.FAMILY.write(config) == content


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "cannot import"), ("missing", "has no 'Missing'"), ("keydiff", "not a subclass of torch.nn.modules")],
)
def test_wrong_plugins_are_reported(folder: Path, name: str, message: str) -> None:
    kvad.register("absent", "no.such:Thing")
    kvad.register("missing", "kerple:Missing")
    mixer = AttentionConfig(4, position=CustomPositionsConfig(name))
    with pytest.raises(ConfigError, match=message):
        Transformer(ModelConfig(32, 61, 96, StackConfig(1, {"L": LayerConfig(mixer, GatedMLPConfig(48))})))
