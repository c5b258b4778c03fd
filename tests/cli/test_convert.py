"""kvad import and kvad export: the plan, the folder, there and back; what is never overwritten or half-written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad.checkpoint import export
from kvad.checkpoint.conversion import HFConfigReader, write_tensors
from kvad.checkpoint.families import find_family
from kvad.checkpoint.loader import open_checkpoint
from kvad.llm import LLM
from kvad.text.tokenizer import train_tokenizer
from tests.cli.test_main import kvad_process
from tests.support.cli_checkpoints import run, write_model
from tests.support.random_models import build

CONFIGS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "eos_token_id": 1,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 300,
        "n_positions": 64, "eos_token_id": 0,
    },
}  # fmt: skip
GENERATION = {"eos_token_id": 1, "num_beams": 3, "max_new_tokens": 7, "no_repeat_ngram_size": 2, "length_penalty": 0.5}


def write_foreign(folder, name, *, dtype=torch.float32, tokenizer=True):
    """A Hugging Face folder of random weights; its tensors."""
    content = {"model_type": name, **CONFIGS[name]}
    family = find_family(name)
    config = family.read(HFConfigReader(content, "config.json"))
    ours = {key: tensor.to(dtype) for key, tensor in build(config).state_dict().items()}
    tensors = {key: tensor.clone() for key, tensor in write_tensors(family, config, ours)}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if tokenizer:
        train_tokenizer("bpe", ["def f(x): return x\n"] * 9, vocab_size=290).save(folder)
    return tensors


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments: run(capsys, *arguments, monkeypatch=monkeypatch)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_every_tensor_is_the_same(kvad, tmp_path, name):
    tensors = write_foreign(tmp_path / "theirs", name)
    ran = kvad("import", tmp_path / "theirs", tmp_path / "ours")
    assert ran.code == 0 and ran.err == "" and f"written: {tmp_path / 'ours'}" in ran.out
    assert open_checkpoint(tmp_path / "ours").origin == name
    ran = kvad("export", tmp_path / "ours", tmp_path / "back", "--format", "hf")
    reader = CONFIGS[name]["architectures"][0]
    assert ran.code == 0 and ran.err == "" and f"transformers.{reader}.from_pretrained" in ran.out
    assert same(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    with LLM.load(tmp_path / "theirs", max_num_seqs=1) as theirs, LLM.load(tmp_path / "back", max_num_seqs=1) as back:
        assert torch.equal(theirs.logits("def f"), back.logits("def f"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours", "theirs"]


def test_the_plan_comes_first(kvad, tmp_path):
    write_foreign(tmp_path / "theirs", "llama", dtype=torch.float16)
    page = kvad("import", tmp_path / "theirs", tmp_path / "ours", "--save-dtype", "bfloat16").out.splitlines()
    assert page[0] == f"model       {tmp_path / 'theirs'}: LlamaForCausalLM (llama), a decoder"
    assert page[1].startswith("parameters  ") and page[1].endswith(" tensors")
    assert page[2].endswith(" in bfloat16, from float16")
    assert page[3] == "cache       132.81 KiB per 1,000 tokens, in bfloat16"  # 2 layers x 2 heads x 16 x 2 bytes + 8
    assert page[4].startswith("tokenizer   bpe, ")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert page[2].startswith(f"weights     {sum(t.nbytes for t in stored.values()) / 1024:.2f} KiB")


def test_the_plan_as_json(kvad, tmp_path):
    write_foreign(tmp_path / "theirs", "gpt2")
    ran = kvad("import", tmp_path / "theirs", tmp_path / "ours", "--json")
    found = json.loads(ran.out)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert ran.code == 0 and ran.out.count("\n") == 1
    assert (found["architecture"], found["origin"], found["kind"]) == ("GPT2LMHeadModel", "gpt2", "decoder")
    assert found["parameters"] == sum(tensor.numel() for tensor in stored.values()) and found["tensors"] == len(stored)
    assert found["bytes"] == 4 * found["parameters"] and (found["stored"], found["dtype"]) == ("float32", "float32")
    assert found["cache_tokens"] == 64 and found["cache"] == 64 * (2 * 4 * 12 * 4 + 8) and found["source_cache"] == 0
    assert found["out"] == str(tmp_path / "ours")


def test_a_folder_without_out_is_only_looked_at(kvad, tmp_path, monkeypatch):
    write_foreign(tmp_path / "theirs", "gpt2")
    monkeypatch.chdir(tmp_path)
    for name in ("theirs", "./theirs"):
        ran = kvad("import", name)
        assert ran.code == 0 and "nothing was written; name a folder for it" in ran.out
        assert f"kvad import {name} runs/theirs" in ran.out
    assert json.loads(kvad("import", "theirs", "--json").out)["out"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_name_on_the_hub_goes_to_a_folder_of_its_name(kvad, tmp_path, monkeypatch):
    write_foreign(tmp_path / "cached", "gpt2")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    asked = []

    def resolve(name, **options):
        asked.append((name, options))
        return tmp_path / "cached"

    monkeypatch.setattr("kvad.checkpoint.hub.resolve_model_path", resolve)
    for name in ("org/tiny", "hf://org/tiny"):
        ran = kvad("import", name, "--revision", "v1", "--offline", "--token", "secret", "--overwrite")
        assert ran.code == 0 and "written: tiny" in ran.out and "secret" not in ran.out + ran.err
    assert asked[0] == ("org/tiny", {"revision": "v1", "token": "secret", "offline": True})
    assert open_checkpoint(tmp_path / "work" / "tiny").origin == "gpt2"


def test_what_the_folder_says_of_generating_comes_with_it(kvad, tmp_path):
    write_foreign(tmp_path / "theirs", "llama")
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(GENERATION))
    assert kvad("import", tmp_path / "theirs", tmp_path / "ours").code == 0
    said = open_checkpoint(tmp_path / "ours").generation
    assert said == open_checkpoint(tmp_path / "theirs").generation
    with LLM.load(tmp_path / "theirs", max_num_seqs=3) as theirs, LLM.load(tmp_path / "ours", max_num_seqs=3) as ours:
        assert theirs.generate("def").tokens == ours.generate("def").tokens


def test_what_exists_gives_way_only_when_it_is_asked_to(kvad, tmp_path):
    tensors = write_foreign(tmp_path / "theirs", "gpt2")
    ours = write_model(tmp_path / "ours")
    before = (ours / "config.json").read_bytes()
    for arguments in (("import", tmp_path / "theirs", ours), ("export", ours, tmp_path / "theirs")):
        ran = kvad(*arguments)
        assert ran.code == 2 and ran.err.startswith(f"kvad: error: {arguments[2]} exists\nkvad: hint: --overwrite")
    assert (ours / "config.json").read_bytes() == before
    assert kvad("import", tmp_path / "theirs", ours, "--overwrite").code == 0
    assert open_checkpoint(ours).origin == "gpt2"
    assert kvad("export", ours, tmp_path / "back").code == 0
    assert kvad("export", ours, tmp_path / "back", "--overwrite", "--save-dtype", "bfloat16", "--json").code == 0
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert same(again, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_what_is_no_checkpoint_or_the_model_itself_never_gives_way(kvad, tmp_path, monkeypatch):
    write_foreign(tmp_path / "inside" / "theirs", "gpt2")
    ours = write_model(tmp_path / "ours")
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    (tmp_path / "file").write_text("x")
    (tmp_path / "inside" / "config.json").write_text("{}")
    theirs = tmp_path / "inside" / "theirs"
    for arguments, says in (
        (("import", theirs, tmp_path / "diary"), "exists and is not a checkpoint"),
        (("import", theirs, tmp_path / "file"), "cannot be a new folder"),
        (("import", theirs, theirs), "contains the source model"),
        (("import", theirs, tmp_path / "inside"), "contains the source model"),
        (("import", theirs, "."), "cannot be a new folder"),
        (("export", ours, ours), "contains the source model"),
    ):
        ran = kvad(*arguments, "--overwrite")
        assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran
    assert (tmp_path / "diary" / "monday.txt").read_text() == "dear diary"
    assert kvad("doctor", ours).code == 0 and kvad("doctor", theirs).code == 0


@pytest.mark.parametrize("command", ["import", "export"])
def test_ctrl_c_leaves_nothing_half_written(kvad, tmp_path, monkeypatch, command):
    write_foreign(tmp_path / "theirs", "gpt2")
    ours = write_model(tmp_path / "ours")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvad.checkpoint.native.save_file", interrupted)
    monkeypatch.setattr(export, "write_sharded", interrupted)
    before = (ours / "model.safetensors").read_bytes()
    if command == "import":
        assert kvad("import", tmp_path / "theirs", tmp_path / "new").code == 130
        assert kvad("import", tmp_path / "theirs", ours, "--overwrite").code == 130
    else:
        assert kvad("export", ours, tmp_path / "new").code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    assert (ours / "model.safetensors").read_bytes() == before


def test_the_class_is_said_and_what_none_can_express_refused(kvad, tmp_path):
    ours = write_model(tmp_path / "ours")
    found = json.loads(kvad("export", ours, tmp_path / "out", "--json").out)
    assert found["class"] == "LlamaForCausalLM" and found["out"] == str(tmp_path / "out") and found["format"] == "hf"
    assert not (tmp_path / "out" / "tokenizer.json").exists()  # a table of bytes is no format of theirs
    for family, says in (("gpt2", "gpt2 cannot express"), ("lama", "unknown family 'lama'")):
        ran = kvad("export", ours, tmp_path / "new", "--family", family)
        assert ran.code == 2 and says in ran.err.splitlines()[0] and not (tmp_path / "new").exists(), ran


def test_bad_input_is_one_line(kvad, tmp_path):
    ours = write_model(tmp_path / "ours")
    write_foreign(tmp_path / "theirs", "gpt2")
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"")
    write_foreign(tmp_path / "strange", "gpt2")
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "gpt9"}')
    for arguments, says in (
        (("import", ours, tmp_path / "out"), "is a kvad checkpoint already"),
        (("import", tmp_path / "absent"), "no such folder"),
        (("import", tmp_path / "theirs", tmp_path / "out"), "is truncated, or not a safetensors file"),
        (("import", tmp_path / "strange", tmp_path / "out"), "model_type 'gpt9' is not known"),
        (("import", tmp_path / "theirs", tmp_path / "out", "--revision", "v1"), "and has no revision 'v1'"),
        (("export", tmp_path / "absent", tmp_path / "out"), "no such folder"),
        (("export", ours), "Missing argument 'OUT'"),
        (("export", ours, tmp_path / "out", "--format", "gguf"), "'gguf' is not 'hf'"),
    ):
        ran = kvad(*arguments)
        assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran
        assert len(ran.err.splitlines()) <= 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["import", "export"])
def test_help_has_examples_and_does_not_import_torch(command):
    ran = kvad_process(command, "--help", code="import atexit\natexit.register(lambda: print('torch' in sys.modules))")
    assert ran.returncode == 0 and ran.stdout.endswith("False\n") and ran.stdout.count(f"kvad {command} ") >= 3, ran
