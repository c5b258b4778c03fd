"""No file makes kvad import or call what it names: a module is planted under every key that may have a name."""

import dataclasses
import importlib
import json
import shutil
import sys

import pytest

from kvad import register
from kvad.cache.policy import Window
from kvad.cache.quantization import ArraySpec
from kvad.checkpoint import native
from kvad.config import EmbeddingConfig, EncoderInputConfig
from kvad.config.layers import AttentionConfig, CustomPositionsConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.errors import ConfigError
from kvad.llm import LLM
from kvad.text.tokenizer import train_tokenizer
from tests.support.cli_checkpoints import write_model
from tests.support.random_models import build

PLANTED = "planted:Planted"
BYTES = train_tokenizer("byte", [])
MODULE = """
from pathlib import Path
Path(__file__).with_name("it-ran").touch()
Planted = FAMILY = __getattr__ = lambda *_, **__: Path(__file__).with_name("it-ran").touch()
"""


@pytest.fixture
def assert_not_run(tmp_path, monkeypatch):
    """Return a function that writes the module into a folder on the path; at the end it must not have run."""
    folders = []

    def plant(folder):
        (folder / "planted.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.chdir(folder)
        folders.append(folder)

    yield plant
    assert folders and "planted" not in sys.modules
    assert not any((folder / "it-ran").exists() for folder in folders)


def test_the_planted_module_would_be_noticed(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("planted")
    assert (tmp_path / "it-ran").exists() and sys.modules.pop("planted")


def small_config(side, attention):
    """Build the config of a small decoder, or of an encoder-decoder, with this attention on one side."""
    cross = AttentionConfig(4, 2, causal=False, position=None) if side == "encoder" else None
    layers = {"decoder": LayerConfig(AttentionConfig(4, 2), GatedMLPConfig(40), cross_attention=cross)}
    if side == "encoder":
        layers["encoder"] = LayerConfig(AttentionConfig(4, 2, causal=False), GatedMLPConfig(40))
    layers[side] = dataclasses.replace(layers[side], attention=attention)
    stacks = {name: StackConfig(1, {"L": layer}) for name, layer in layers.items()}
    source = EncoderInputConfig(96, EmbeddingConfig()) if side == "encoder" else None
    return ModelConfig(hidden_size=24, vocab_size=BYTES.vocab_size, max_seq_len=96, encoder_input=source, **stacks)


ATTENTIONS = {
    "position.name": AttentionConfig(4, 2, position=CustomPositionsConfig(PLANTED, {"filename": "x"})),
    "custom_class": AttentionConfig(4, 2, custom_class=PLANTED),
}
COMMANDS = ["plan", "inspect", "inspect --tree", "doctor", "generate", "verify", "tokenize", "bench cache-quality"]


@pytest.mark.parametrize("key", ATTENTIONS)
@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_a_class_in_config_json_is_not_imported(kvad, tmp_path, assert_not_run, key, side):
    attention = dataclasses.replace(ATTENTIONS[key], causal=side == "decoder")
    weights = build(small_config(side, AttentionConfig(4, 2, causal=side == "decoder"))).float().state_dict()
    folder = tmp_path / "model"
    native.save_checkpoint(folder, small_config(side, attention), weights, BYTES)
    assert_not_run(folder)
    refused = [command for command in COMMANDS if not may_read(kvad, command, folder)]
    assert {"plan", "generate", "verify", "bench cache-quality"} <= set(refused)
    with pytest.raises(ConfigError, match=f"{key}: '{PLANTED}' is not a registered plugin") as error:
        LLM.load(folder)
    assert f"--plugin {PLANTED}" in error.value.hint


def may_read(kvad, command, folder):
    """Run a command; return False if it refused the name as it should, True if it does not need the class."""
    more = {"generate": ["x"], "tokenize": ["x"]}.get(command, [])
    result = kvad(command, folder, *more)
    assert "bug in kvad" not in result.err and result.err.count("\n") <= 3, result
    assert result.code == 0 or f"'{PLANTED}' is not a registered plugin" in result.err, (command, result)
    return result.code == 0


class Format:
    """A format in float32."""

    def arrays(self, dim):
        return (ArraySpec("data", "slot", "float32", dim),)

    def encode(self, x):
        return (x.float(),)

    def decode(self, arrays, dtype):
        return arrays[0].to(dtype)


@pytest.mark.parametrize("option", ["--policy", "--cache-key-dtype", "--cache-value-dtype"])
@pytest.mark.parametrize("holder", ["session", "prefix"])
def test_a_policy_or_format_of_a_stored_cache_is_not_imported(
    kvad, model, tmp_path, assert_not_run, monkeypatch, option, holder
):
    monkeypatch.setattr("kvad.config.plugins._registered", {})
    register(PLANTED, Window if option == "--policy" else Format)
    value = f"{PLANTED}(16)" if option == "--policy" else PLANTED
    text = ("--prompt", "hello there, who are you?")
    place = ("trip",) if holder == "session" else ("--prefix-cache-dir", tmp_path / "store", "--name", "trip")
    written = kvad("session save" if holder == "session" else "prefix add", model, *place, *text, option, value)
    assert written.code == 0, written.err
    monkeypatch.setattr("kvad.config.plugins._registered", {})
    assert_not_run(tmp_path)
    if holder == "session":
        result = kvad("session continue", model, "trip", "--max-tokens", 2)
        assert result.code == 2 and f"'{PLANTED}' is not a registered plugin" in result.err, result
        assert kvad("session show", "trip").code == 0
    else:
        result = kvad("generate", model, "hello there, who are you? ", "--max-tokens", 2, *place[:2])
        assert result.code == 0, result.err
        assert kvad("doctor", tmp_path / "store").code == 0


def test_a_class_in_a_run_file_is_not_imported(kvad, tmp_path, assert_not_run):
    (tmp_path / "text.txt").write_text("hello there, who are you? " * 200)
    attention = "decoder.layer_types.L.attention"
    for key, value in (("custom_class", f'"{PLANTED}"'), ("position", f'{{kind = "custom", name = "{PLANTED}"}}')):
        run_file = tmp_path / "run.toml"
        run_file.write_text(f'[model]\npreset = "tiny"\n[model.set]\n"{attention}.{key}" = {value}\n')
        assert_not_run(tmp_path)
        result = kvad("train", run_file, tmp_path / "text.txt", "--out", tmp_path / "out")
        assert result.code == 2 and f"'{PLANTED}' is not a registered plugin" in result.err, result


def strings(content, path=()):
    """Yield the path of every string in a JSON value."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from strings(value, (*path, key))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from strings(value, (*path, index))
    elif isinstance(content, str):
        yield path


def replaced(content, path, value):
    if not path:
        return value
    copy = content.copy()
    copy[path[0]] = replaced(content[path[0]], path[1:], value)
    return copy


AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), PLANTED)
ADDED = {"auto_map": AUTO_MAP, "trust_remote_code": True, "custom_pipelines": {"x": {"impl": PLANTED}}}


def test_no_string_of_a_hugging_face_folder_is_imported(kvad, tmp_path, assert_not_run, monkeypatch):
    source, folder = tmp_path / "source", tmp_path / "model"
    assert kvad("export", write_model(tmp_path / "native"), source).code == 0
    (source / "manifest.json").unlink(missing_ok=True)
    shutil.copytree(source, folder)
    assert_not_run(folder)
    files = ("config.json", "generation_config.json", "tokenizer_config.json")
    contents = {name: json.loads((source / name).read_text()) for name in files if (source / name).exists()}
    cases = [(name, path, PLANTED) for name, content in contents.items() for path in strings(content)]
    cases += [(name, (), contents[name] | ADDED) for name in contents]
    assert len(cases) > 6
    for name, path, value in cases:
        (folder / name).write_text(json.dumps(replaced(contents[name], path, value)))
        for command in ("plan", "generate"):
            result = kvad(command, folder, *(["x", "--max-tokens", 1] if command == "generate" else []))
            assert "bug in kvad" not in result.err, (name, path, result)
        (folder / name).write_text(json.dumps(contents[name]))


def test_only_a_family_that_is_registered_is_imported(kvad, tmp_path, assert_not_run, monkeypatch):
    folder = tmp_path / "model"
    assert kvad("export", write_model(tmp_path / "native"), folder).code == 0
    (folder / "manifest.json").unlink(missing_ok=True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": PLANTED}))
    assert_not_run(folder)
    monkeypatch.setenv("KVAD_FAMILIES", f"{PLANTED}={PLANTED}")
    result = kvad("generate", folder, "x")
    assert result.code == 2 and f"model_type: '{PLANTED}' is not a registered plugin" in result.err, result


def test_a_plugin_may_come_with_the_command(kvad, model, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from kvad.cache.policy import Window\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = kvad("generate", model, "hello there", "--max-tokens", 8, "--temperature", 0, "--policy", "window(4)")
    for name, plugin in (("last", "last=mine:Window"), ("mine:Window", "mine:Window")):
        monkeypatch.setattr("kvad.config.plugins._registered", {})
        arguments = ("--max-tokens", 8, "--temperature", 0, "--policy", f"{name}(4)")
        assert kvad("generate", model, "hello there", *arguments).code == 2
        result = kvad("generate", model, "hello there", *arguments, "--plugin", plugin)
        assert (result.code, result.out) == (0, expected.out), result.err
    refused = kvad("generate", model, "x", "--plugin", "last=mine")
    assert refused.code == 2 and "plugin last: must name a class, got 'mine'" in refused.err


def test_an_installed_package_registers_by_its_entry_point(monkeypatch):
    from kvad.config import plugins

    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.setattr(plugins, "_entry_points", lambda: {"last": "kvad.cache.policy:Window"})
    assert plugins.load_plugin("last", "cache.policy") is Window
