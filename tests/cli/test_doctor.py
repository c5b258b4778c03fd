"""kvad doctor: what is well says ok; each thing that is broken is found, named, and has a way out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.native import save_checkpoint, save_step
from kvad.text.tokenizer import train_tokenizer
from tests.cli.test_convert import write_foreign
from tests.cli.test_main import kvad_process
from tests.support.cli_checkpoints import run, write_model
from tests.support.random_models import build, model_config


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments: run(capsys, *arguments, monkeypatch=monkeypatch)


@pytest.fixture
def ours(tmp_path):
    return write_model(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path):
    write_foreign(tmp_path / "theirs", "llama")
    return tmp_path / "theirs"


def problems(ran):
    """check -> what was said, of the problems of ``--json``."""
    found = json.loads(ran.out)
    assert found["healthy"] == (ran.code == 0) and ran.err == "" and ran.code in (0, 1)
    assert all(finding["advice"] for finding in found["findings"] if not finding["ok"])
    return {finding["check"]: finding["message"] for finding in found["findings"] if not finding["ok"]}


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_a_healthy_checkpoint(kvad, ours):
    ran = kvad("doctor", ours)
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "") and all(line.startswith("ok ") for line in lines)
    checks = [line.split()[1] for line in lines]
    assert checks == ["manifest", "sha256", "headers", "config", "tensors", "finite", "tokenizer", "generation"]
    assert "byte, 257 ids in 257 places" in ran.out


def test_a_healthy_foreign_folder(kvad, theirs):
    ran = kvad("doctor", theirs)
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "") and all(line.startswith("ok ") for line in lines)
    checks = [line.split()[1] for line in lines]
    assert checks == ["headers", "config", "tensors", "finite", "tokenizer", "generation"]
    assert "llama, a decoder of" in ran.out and problems(kvad("doctor", theirs, "--json")) == {}


def test_a_run_stands_for_its_newest_checkpoint(kvad, tmp_path):
    model = build(model_config())
    save_step(tmp_path / "run", 3, model.config, model.state_dict(), None)
    ran = kvad("doctor", tmp_path / "run")
    assert ran.code == 0 and "none: prompts can only be token ids" in ran.out


def test_weights_that_are_not_finite(kvad, ours, theirs):
    def edit(tensors):
        name = next(name for name in tensors if name.endswith(("attention.q.weight", "0.self_attn.q_proj.weight")))
        tensors[name][1, :3] = float("nan")
        tensors[name][2, 0] = float("inf")

    for folder in (ours, theirs):
        change(folder, edit)
        found = problems(kvad("doctor", folder, "--json"))
        assert "4 elements NaN or infinite" in found["finite"]
        assert set(found) == ({"finite", "sha256"} if folder == ours else {"finite"})


def test_tensors_missing_extra_and_of_another_shape(kvad, ours, theirs):
    def edit(tensors):
        last = next(name for name in tensors if name.endswith("norm.weight"))
        table = next(name for name in tensors if name.startswith(("embedding.tokens", "model.embed_tokens")))
        del tensors[last]
        tensors["stranger"] = torch.zeros(3)
        tensors[table] = tensors[table][:-1].clone()

    for folder in (ours, theirs):
        change(folder, edit)
    ran = kvad("doctor", ours)
    assert ran.code == 1
    for says in ("norm.weight [24] is missing", "stranger [3] is extra", "[256, 24], the config says [257, 24]"):
        assert f"{says}" in ran.out and "problem tensors" in ran.out
    assert "[299, 32] cannot be converted to" in problems(kvad("doctor", theirs, "--json"))["tensors"]


def test_many_problems_are_counted(kvad, ours):
    change(ours, lambda tensors: [tensors.pop(name) for name in list(tensors)[:-1]])
    ran = kvad("doctor", ours)
    assert ran.out.count("problem tensors") == 9 and " more like these" in ran.out


def test_files_that_are_cut_off_or_gone(kvad, ours, theirs):
    for folder in (ours, theirs):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        found = problems(kvad("doctor", folder, "--json"))
        assert "is truncated" in found["headers"] and not found.keys() - {"headers", "sha256"}
    (ours / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in problems(kvad("doctor", ours, "--json"))["sha256"]
    (ours / "manifest.json").unlink()
    assert "manifest.json is missing" in problems(kvad("doctor", ours, "--json"))["manifest"]


def test_a_byte_that_changed(kvad, ours):
    path = ours / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    assert "same size, other sha256" in problems(kvad("doctor", ours, "--json"))["sha256"]


def test_a_config_edited_by_hand(kvad, ours):
    path = ours / "config.json"
    path.write_text(path.read_text().replace('"max_seq_len": 96', '"max_seq_len": 80'))
    ran = kvad("doctor", ours)
    assert ran.code == 1 and "config.json differs from its manifest" in ran.out and "unless you edited it" in ran.out
    path.write_text(path.read_text().replace('"max_seq_len": 80', '"max_seq_lens": 80'))
    assert "unknown key max_seq_lens" in problems(kvad("doctor", ours, "--json"))["config"]
    path.write_text("{")
    assert "is not JSON" in problems(kvad("doctor", ours, "--json"))["config"]


def test_a_foreign_config_that_cannot_be(kvad, theirs):
    path = theirs / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model_type": "gpt9", "auto_map": {"AutoConfig": "x.y"}}))
    found = problems(kvad("doctor", theirs, "--json"))["config"]
    assert "model_type 'gpt9' is not known; code of the repository is never run" in found


def test_a_tokenizer_that_does_not_belong_to_the_model(kvad, tmp_path, ours, theirs):
    big = train_tokenizer("bpe", [Path(__file__).read_text()], vocab_size=310)
    assert big.vocab_size > 300
    big.save(theirs)
    assert "ids, the model" in problems(kvad("doctor", theirs, "--json"))["tokenizer"]
    model = build(model_config())
    save_checkpoint(tmp_path / "wrong", model.config, model.state_dict(), big)
    assert "places for 67" in problems(kvad("doctor", tmp_path / "wrong", "--json"))["tokenizer"]
    (theirs / "tokenizer.json").write_text("{}")
    assert "not readable by the tokenizers library" in problems(kvad("doctor", theirs, "--json"))["tokenizer"]


def test_generation_with_tokens_that_are_not_there(kvad, tmp_path):
    model = build(model_config())
    said = GenerationConfig(decoder_start_token_id=3, eos_token_ids=(5, 67), suppress_tokens=(99,))
    save_checkpoint(tmp_path / "m", model.config, model.state_dict(), None, generation=said)
    ran = kvad("doctor", tmp_path / "m")
    assert ran.code == 1
    assert "end 67 is outside the vocabulary of 67" in ran.out and "banned 99 is outside" in ran.out


def test_what_is_no_checkpoint_is_bad_input(kvad, tmp_path):
    for path, says in ((tmp_path / "absent", "no such folder"), (tmp_path, "is not a checkpoint")):
        ran = kvad("doctor", path)
        assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0]


def test_help_has_examples_and_does_not_import_torch():
    ran = kvad_process("doctor", "--help", code="import atexit\natexit.register(lambda: print('torch' in sys.modules))")
    assert ran.returncode == 0 and ran.stdout.endswith("False\n") and ran.stdout.count("kvad doctor ") >= 2, ran
