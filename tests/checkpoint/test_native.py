"""Checkpoint folders in kvad's layout: round trips, damaged folders, runs, failing disks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad.checkpoint.folder import accept_edit, file_digest, list_steps, locate, read_summarizer_folder
from kvad.checkpoint.handle import TrainingState
from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import open_folder, save_checkpoint
from kvad.errors import CheckpointError, ConfigError, SaveError, UsageError
from kvad.text.tokenizer import train_tokenizer
from tests.support.random_models import build, model_config
from tests.support.run_steps import save_step

ROOT = Path(__file__).parents[2]
BYTE = train_tokenizer("byte", [])


def make(folder, seed=0, dtype=torch.float32):
    model = build(model_config(), seed=seed, dtype=dtype)
    save_checkpoint(folder, model.config, model.state_dict(), BYTE)
    return model


def equal(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", ["pre", "post"])  # post: untied head, biases
def test_round_trip(tmp_path, dtype, norm):
    model = build(model_config(norm=norm), dtype=dtype)
    save_checkpoint(tmp_path / "m", model.config, model.state_dict(), BYTE)
    loaded, checkpoint = load_model(tmp_path / "m", verify=True)
    assert equal(model.state_dict(), loaded.state_dict())
    assert loaded.config == model.config == checkpoint.config
    assert next(loaded.parameters()).dtype == dtype and not loaded.training
    assert checkpoint.tokenizer.fingerprint() == BYTE.fingerprint()
    assert checkpoint.training is None


def test_the_folder_describes_itself(tmp_path):
    model = make(tmp_path / "m")
    files = json.loads((tmp_path / "m" / "manifest.json").read_text())["files"]
    assert sorted(files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert files["model.safetensors"]["bytes"] == (tmp_path / "m" / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model"] == model.config.to_dict()
    assert "head.weight" not in load_file(tmp_path / "m" / "model.safetensors")  # tied


def test_another_dtype_and_float16_only_as_storage(tmp_path):
    make(tmp_path / "m")
    assert next(load_model(tmp_path / "m", "bfloat16")[0].parameters()).dtype == torch.bfloat16
    assert next(load_model(tmp_path / "m", torch.float64)[0].parameters()).dtype == torch.float64
    with pytest.raises(UsageError, match="float16 is for storage only on a CPU"):
        load_model(tmp_path / "m", "float16")
    with pytest.raises(UsageError, match=r"unknown dtype 'float23'.*float32"):
        load_model(tmp_path / "m", "float23")
    make(tmp_path / "half", dtype=torch.float16)
    assert next(load_model(tmp_path / "half")[0].parameters()).dtype == torch.float32


def test_training_state_and_a_model_without_a_tokenizer(tmp_path):
    model = build(model_config(), dtype=torch.float32)
    state = {"step": 7, "loss": 0.1 + 0.2, "best": None}
    training = TrainingState({"exp_avg.x": torch.arange(3.0), "rng": torch.get_rng_state()}, state)
    save_checkpoint(tmp_path / "m", model.config, model.state_dict(), None, training)
    checkpoint = open_folder(tmp_path / "m", verify=True)
    assert checkpoint.tokenizer is None
    assert checkpoint.training is not None and checkpoint.training.state == state
    assert torch.equal(checkpoint.training.tensors["rng"], training.tensors["rng"])


def test_the_fingerprint_is_of_weights_config_and_tokenizer(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "b")
    make(tmp_path / "c", seed=1)
    model = build(model_config(), dtype=torch.float32)
    save_checkpoint(tmp_path / "d", model.config, model.state_dict(), None)
    prints = [open_folder(tmp_path / name).fingerprint() for name in "abcd"]
    assert prints[0] == prints[1] and len(set(prints)) == 3
    config = (tmp_path / "b" / "config.json").read_text()
    (tmp_path / "b" / "config.json").write_text(config.replace('"max_seq_len": 96', '"max_seq_len": 95'))
    accept_edit(tmp_path / "b", "config.json")
    assert open_folder(tmp_path / "b").fingerprint() != prints[0]


# ---------------------------------------------------------------- bad folders


def write_manifest(folder):
    """Write the tensor file's size and digest into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = file_digest(folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.1.norm2", None, r"tensor decoder.layers.1.norm2.weight \[24\] is missing"),
        ("layers.9.norm2", (24,), r"tensor decoder.layers.9.norm2.weight \[24\] is extra"),
        ("layers.1.norm2", (23,), r"tensor decoder.layers.1.norm2.weight has shape \[23\], the config requires \[24\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, shape, message):
    make(tmp_path / "m")
    load_model(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = {**load_file(path), f"decoder.{name}.weight": None if shape is None else torch.zeros(shape)}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    write_manifest(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_tensor_file(tmp_path, size):
    make(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    full_size = path.stat().st_size
    os.truncate(path, size if size >= 0 else full_size + size)
    with pytest.raises(CheckpointError, match=rf"model.safetensors is truncated: [\d,]+ of {full_size:,} bytes"):
        open_folder(tmp_path / "m")
    write_manifest(tmp_path / "m")  # of the truncated file
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])  # shorter, and longer
@pytest.mark.parametrize("verify", [False, True])
def test_another_whole_tensor_file_is_not_called_truncated(tmp_path, dtype, verify):
    make(tmp_path / "m")
    make(tmp_path / "other", dtype=dtype)
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    (tmp_path / "m" / "model.safetensors").write_bytes(other)
    message = rf"model.safetensors differs from its manifest: {len(other):,} bytes instead of [\d,]+"
    with pytest.raises(CheckpointError, match=message) as caught:
        open_folder(tmp_path / "m", verify=verify)
    assert "truncated" not in str(caught.value)


@pytest.mark.parametrize("header", [b"[]", b"{}", b'{"w": 3}', b'{"w": {"data_offsets": []}}', b"\xff\xff"])
def test_a_short_file_of_another_kind_is_not_called_truncated(tmp_path, header):
    make(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="differs from its manifest"):
        open_folder(tmp_path / "m")


def test_a_config_that_was_edited_differs_from_its_manifest(tmp_path):
    make(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(path.read_text().rstrip("\n"))
    open_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"config.json differs from its manifest: [\d,]+ bytes instead of"):
        open_folder(tmp_path / "m", verify=True)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
def test_a_missing_file_is_named(tmp_path, name):
    make(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        open_folder(tmp_path / "m")


def test_a_folder_that_is_not_a_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for name, message in {
        "missing": "no such folder",
        "empty": r"is not a checkpoint: it has no config.json",
        "run": "has no checkpoint yet",
        "file": "is a file",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            open_folder(tmp_path / name)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"num_heads"', '"num_headz"', r"unknown key decoder.layer_types.L.attention.num_headz \(did you mean"),
        ('"hidden_size": 24', '"hidden_size": 0', "hidden_size: must be at least 1"),
        ('"hidden_size": 24', '"hidden_size": "wide"', "hidden_size: must be int"),
        ('"model"', "model", "is not JSON"),
    ],
)
def test_an_invalid_config_names_file_and_key(tmp_path, before, after, message):
    make(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path / "m")
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "\0", '{"format": 2}', '{"format": 2, "files": {}}', '{"format": 3, "files": {}}'),
        '{"format": 2, "files": {"model.safetensors": {}}}',
    ],
)
def test_a_malformed_manifest(tmp_path, content):
    make(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest.json"):
        open_folder(tmp_path / "m")


def test_older_format_names_the_command_that_writes_it_again(tmp_path):
    make(tmp_path / "m")
    manifest = tmp_path / "m" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["format"] == 2
    manifest.write_text(json.dumps({**content, "format": 1}))
    message = r"manifest.json: format: must be 2, got 1 \(.*kvad import MODEL --out DIR"
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path / "m")
    manifest.unlink()
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "summarizer.json").write_text(json.dumps({"format": 1}))
    (folder / "summarizer.safetensors").write_bytes(b"x")
    files = {name: file_digest(folder / name) for name in ("summarizer.json", "summarizer.safetensors")}
    (folder / "manifest.json").write_text(json.dumps({"format": 2, "files": files}))
    with pytest.raises(CheckpointError, match=r"summarizer.json: format: must be 2, got 1 \(.*--objective summarizer"):
        read_summarizer_folder(folder)


# ---------------------------------------------------------------- runs: steps, and a disk that refuses


def test_a_run_is_its_newest_step_and_retains_the_last_ones(tmp_path):
    model = build(model_config(), dtype=torch.float32)
    for step in (5, 90, 100):
        save_step(tmp_path, step, model.config, model.state_dict(), BYTE, keep=2)
        assert locate(tmp_path).name == f"step-{step:08d}"
    assert [path.name for path in list_steps(tmp_path)] == ["step-00000090", "step-00000100"]
    save_step(tmp_path, 3, model.config, model.state_dict(), BYTE, keep=2, fresh=True)
    assert [path.name for path in list_steps(tmp_path)] == ["step-00000003"]
    os.truncate(tmp_path / "checkpoints" / "step-00000003" / "model.safetensors", 10)
    save_step(tmp_path, 1, model.config, model.state_dict(), BYTE, keep=2)
    with pytest.raises(CheckpointError, match=r"An older checkpoint is .*step-00000001"):
        open_folder(tmp_path)


def test_a_step_set_aside_is_opened_if_there_is_no_other(tmp_path):
    model = build(model_config(), dtype=torch.float32)
    path = save_step(tmp_path, 8, model.config, model.state_dict(), BYTE)
    path.rename(path.with_name(f".{path.name}.999999.00000000.old"))
    assert open_folder(tmp_path, verify=True).path.name == ".step-00000008.999999.00000000.old"


LIMITED = """
import resource, sys
from pathlib import Path
import torch
sys.path.insert(0, "tests")
from kvad.checkpoint.native import save_checkpoint
from kvad.errors import SaveError
from tests.support.random_models import build, model_config
model = build(model_config(), seed=1, dtype=torch.float32)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    save_checkpoint(Path(sys.argv[1]), model.config, model.state_dict(), None)
except SaveError as error:
    print(error)
"""


def test_a_failed_write_of_safetensors_leaves_the_old_checkpoint(tmp_path):
    """A limit on file size makes the library's write fail halfway."""
    make(tmp_path / "m")
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "m")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "cannot save" in finished.stdout and "too large" in finished.stdout, finished.stdout
    loaded, _ = load_model(tmp_path / "m", verify=True)
    assert equal(loaded.state_dict(), build(model_config(), seed=0, dtype=torch.float32).state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_disk_that_refuses_to_flush_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = make(tmp_path / "m")

    def refuse(_descriptor):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SaveError, match="Read-only file system"):
        make(tmp_path / "m", seed=1)
    monkeypatch.undo()
    assert equal(load_model(tmp_path / "m", verify=True)[0].state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["../other.json", "/etc/hostname", "training/../../x", "..\\x"])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name):
    from tests.support.cli_checkpoints import write_model

    folder = write_model(tmp_path / "m")
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][name] = content["files"]["config.json"]
    content.pop("checksum", None)  # whoever changes the file could also change this
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is not a file in this folder"):
        open_folder(folder)
