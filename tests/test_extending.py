"""docs/extending.md, run as it stands: its files in a folder on the path, its models through verify."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvad.cache.weights import weight_shapes
from kvad.checkpoint.hf import write_tensors
from kvad.checkpoint.shards import write_sharded
from kvad.cli.main import main
from kvad.config import Attention, Gated, Layer, ModelConfig, OwnPositions, Stack
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text("utf-8")
FILES = dict(re.findall(r"```python\n# file: (\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_file_is_at_most_thirty_lines_of_code() -> None:
    assert set(FILES) == {"kerple.py", "gated.py", "prove.py", "parrot.py"}
    for name, text in FILES.items():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= 30, (name, len(lines))


def test_the_proof_says_exact(folder: Path) -> None:
    done = subprocess.run([sys.executable, "prove.py"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exact (paged float32, paged float64"), done.stdout


def test_weights_are_counted_without_a_model(folder: Path) -> None:
    mixer = Attention(4, 2, position=OwnPositions("kerple:Kerple"), own="gated:GatedAttention")
    config = ModelConfig(32, 61, 96, Stack(2, {"L": Layer(mixer, Gated(48))}))
    model = Transformer(config)
    assert weight_shapes(config) == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_family_of_ones_own_is_read_and_verified(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVAD_FAMILIES", "parrot=parrot:FAMILY")
    import parrot  # type: ignore[import-not-found]

    sizes = {"width": 32, "vocab": 61, "limit": 96, "layers": 2, "heads": 4, "hidden": 48}
    content = {"model_type": "parrot", **sizes}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(content))
    from kvad.checkpoint.hf import Fields

    config = parrot.FAMILY.read(Fields(content, "config.json"))
    torch.manual_seed(0)
    write_sharded(folder / "model", write_tensors(parrot.FAMILY, config, Transformer(config).state_dict()))
    assert main(["verify", str(folder / "model"), "--chunk", "8", "--block-size", "4", "--tokens", "8"]) == 0
    assert "verdict: exact" in capsys.readouterr().out
    assert parrot.FAMILY.write(config) == content


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "names no class"), ("no.such:Thing", "cannot import"), ("kerple:Missing", "has no 'Missing'")],
)
def test_a_wrong_name_is_told(folder: Path, name: str, message: str) -> None:
    mixer = Attention(4, position=OwnPositions(name))
    with pytest.raises(ConfigError, match=message):
        Transformer(ModelConfig(32, 61, 96, Stack(1, {"L": Layer(mixer, Gated(48))})))
