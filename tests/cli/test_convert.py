"""``kvad import`` and ``kvad export``: the plan, the folder, a round trip, and folders that are never overwritten."""

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
from tests.support.cli_checkpoints import write_model
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


def write_hf_folder(folder, name, *, dtype=torch.float32, tokenizer=True):
    """Write a Hugging Face folder of random weights and return its tensors."""
    content = {"model_type": name, **CONFIGS[name]}
    family = find_family(name)
    config = family.read(HFConfigReader(content, "config.json"))
    native = {key: tensor.to(dtype) for key, tensor in build(config).state_dict().items()}
    tensors = {key: tensor.clone() for key, tensor in write_tensors(family, config, native)}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if tokenizer:
        train_tokenizer("bpe", ["def f(x): return x\n"] * 9, vocab_size=290).save(folder)
    return tensors


def have_equal_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_import_and_export_keep_every_tensor(kvad, tmp_path, name):
    tensors = write_hf_folder(tmp_path / "hf", name)
    result = kvad("import", tmp_path / "hf", tmp_path / "native")
    assert result.code == 0 and result.err == "" and f"written: {tmp_path / 'native'}" in result.out
    assert open_checkpoint(tmp_path / "native").origin == name
    result = kvad("export", tmp_path / "native", tmp_path / "back", "--to", "hf")
    reader = CONFIGS[name]["architectures"][0]
    assert result.code == 0 and result.err == "" and f"transformers.{reader}.from_pretrained" in result.out
    assert have_equal_tensors(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    with LLM.load(tmp_path / "hf", max_num_seqs=1) as hf, LLM.load(tmp_path / "back", max_num_seqs=1) as back:
        assert torch.equal(hf.logits("def f"), back.logits("def f"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "native"]


def test_suffix_of_the_output_names_the_format(kvad, model, tmp_path):
    result = kvad("export", model, tmp_path / "m.gguf")
    assert result.code == 2 and "llama.cpp has no tokenizer like this one" in result.err
    assert not (tmp_path / "m.gguf").exists()
    assert kvad("export", model, tmp_path / "folder.gguf", "--to", "hf").code == 0
    assert (tmp_path / "folder.gguf" / "config.json").exists()


def test_plan_is_printed_first(kvad, tmp_path):
    write_hf_folder(tmp_path / "hf", "llama", dtype=torch.float16)
    page = kvad("import", tmp_path / "hf", tmp_path / "native", "--save-dtype", "bfloat16").out.splitlines()
    assert page[0] == f"model       {tmp_path / 'hf'}: LlamaForCausalLM (llama), a decoder"
    assert page[1].startswith("parameters  ") and page[1].endswith(" tensors")
    assert page[2].endswith(" in bfloat16, from float16")
    assert page[3] == "cache       132.81 KiB per 1,000 tokens, in bfloat16"  # 2 layers x 2 heads x 16 x 2 bytes + 8
    assert page[4].startswith("tokenizer   bpe, ")
    stored = load_file(tmp_path / "native" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert page[2].startswith(f"weights     {sum(t.nbytes for t in stored.values()) / 1024:.2f} KiB")


def test_plan_as_json(kvad, tmp_path):
    write_hf_folder(tmp_path / "hf", "gpt2")
    result = kvad("import", tmp_path / "hf", tmp_path / "native", "--json")
    record = json.loads(result.out)
    stored = load_file(tmp_path / "native" / "model.safetensors")
    assert result.code == 0 and result.out.count("\n") == 1
    assert (record["architecture"], record["origin"], record["kind"]) == ("GPT2LMHeadModel", "gpt2", "decoder")
    assert record["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert record["tensors"] == len(stored)
    assert record["bytes"] == 4 * record["parameters"] and (record["stored"], record["dtype"]) == ("float32", "float32")
    assert record["cache_tokens"] == 64 and record["cache"] == 64 * (2 * 4 * 12 * 4 + 8) and record["source_cache"] == 0
    assert record["out"] == str(tmp_path / "native")


def test_folder_without_out_prints_only_the_plan(kvad, tmp_path, monkeypatch):
    write_hf_folder(tmp_path / "hf", "gpt2")
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "./hf"):
        result = kvad("import", name)
        assert result.code == 0 and "nothing was written; name a folder for it" in result.out
        assert f"kvad import {name} runs/hf" in result.out
    assert json.loads(kvad("import", "hf", "--json").out)["out"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_hub_name_is_the_default_folder(kvad, tmp_path, monkeypatch):
    write_hf_folder(tmp_path / "cached", "gpt2")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    calls = []

    def resolve(name, **options):
        calls.append((name, options))
        return tmp_path / "cached"

    monkeypatch.setattr("kvad.checkpoint.hub.resolve_model_path", resolve)
    for name in ("org/tiny", "hf://org/tiny"):
        result = kvad("import", name, "--revision", "v1", "--offline", "--token", "secret", "--overwrite")
        assert result.code == 0 and "written: tiny" in result.out and "secret" not in result.out + result.err
    assert calls[0] == ("org/tiny", {"revision": "v1", "token": "secret", "offline": True})
    assert open_checkpoint(tmp_path / "work" / "tiny").origin == "gpt2"


def test_generation_config_is_imported(kvad, tmp_path):
    write_hf_folder(tmp_path / "hf", "llama")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(GENERATION))
    assert kvad("import", tmp_path / "hf", tmp_path / "native").code == 0
    generation = open_checkpoint(tmp_path / "native").generation
    assert generation == open_checkpoint(tmp_path / "hf").generation
    with LLM.load(tmp_path / "hf", max_num_seqs=3) as hf, LLM.load(tmp_path / "native", max_num_seqs=3) as native:
        assert hf.generate("def").tokens == native.generate("def").tokens


def test_existing_checkpoint_is_replaced_only_with_overwrite(kvad, tmp_path):
    tensors = write_hf_folder(tmp_path / "hf", "gpt2")
    native = write_model(tmp_path / "native")
    before = (native / "config.json").read_bytes()
    for arguments in (("import", tmp_path / "hf", native), ("export", native, tmp_path / "hf")):
        result = kvad(*arguments)
        assert result.code == 2
        assert result.err.startswith(f"kvad: error: {arguments[2]} exists\nkvad: hint: --overwrite")
    assert (native / "config.json").read_bytes() == before
    assert kvad("import", tmp_path / "hf", native, "--overwrite").code == 0
    assert open_checkpoint(native).origin == "gpt2"
    assert kvad("export", native, tmp_path / "back").code == 0
    assert kvad("export", native, tmp_path / "back", "--overwrite", "--save-dtype", "bfloat16", "--json").code == 0
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert have_equal_tensors(again, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_other_folders_and_the_source_are_never_replaced(kvad, tmp_path, monkeypatch):
    write_hf_folder(tmp_path / "inside" / "hf", "gpt2")
    native = write_model(tmp_path / "native")
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    (tmp_path / "file").write_text("x")
    (tmp_path / "inside" / "config.json").write_text("{}")
    hf = tmp_path / "inside" / "hf"
    for arguments, message in (
        (("import", hf, tmp_path / "diary"), "exists and is not a checkpoint"),
        (("import", hf, tmp_path / "file"), "cannot be a new folder"),
        (("import", hf, hf), "contains the source model"),
        (("import", hf, tmp_path / "inside"), "contains the source model"),
        (("import", hf, "."), "cannot be a new folder"),
        (("export", native, native), "contains the source model"),
    ):
        result = kvad(*arguments, "--overwrite")
        assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result
    assert (tmp_path / "diary" / "monday.txt").read_text() == "dear diary"
    assert kvad("doctor", native).code == 0 and kvad("doctor", hf).code == 0


@pytest.mark.parametrize("command", ["import", "export"])
def test_ctrl_c_leaves_no_partial_folder(kvad, tmp_path, monkeypatch, command):
    write_hf_folder(tmp_path / "hf", "gpt2")
    native = write_model(tmp_path / "native")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvad.checkpoint.safetensors_io.save_file", interrupted)
    monkeypatch.setattr(export, "write_sharded", interrupted)
    before = (native / "model.safetensors").read_bytes()
    if command == "import":
        assert kvad("import", tmp_path / "hf", tmp_path / "new").code == 130
        assert kvad("import", tmp_path / "hf", native, "--overwrite").code == 130
    else:
        assert kvad("export", native, tmp_path / "new").code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "native"]
    assert (native / "model.safetensors").read_bytes() == before


def test_export_names_the_class_or_rejects_the_model(kvad, tmp_path):
    native = write_model(tmp_path / "native")
    record = json.loads(kvad("export", native, tmp_path / "out", "--json").out)
    assert record["class"] == "LlamaForCausalLM" and record["out"] == str(tmp_path / "out") and record["format"] == "hf"
    assert not (tmp_path / "out" / "tokenizer.json").exists()  # transformers cannot read a byte tokenizer
    for family, message in (("gpt2", "gpt2 cannot express"), ("lama", "unknown family 'lama'")):
        result = kvad("export", native, tmp_path / "new", "--family", family)
        assert result.code == 2 and message in result.err.splitlines()[0] and not (tmp_path / "new").exists(), result


def test_invalid_input_is_one_line(kvad, tmp_path):
    native = write_model(tmp_path / "native")
    write_hf_folder(tmp_path / "hf", "gpt2")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    write_hf_folder(tmp_path / "strange", "gpt2")
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "gpt9"}')
    for arguments, message in (
        (("import", native, tmp_path / "out"), "is a kvad checkpoint already"),
        (("import", tmp_path / "absent"), "no such folder"),
        (("import", tmp_path / "hf", tmp_path / "out"), "is truncated, or not a safetensors file"),
        (("import", tmp_path / "strange", tmp_path / "out"), "model_type 'gpt9' is not known"),
        (("import", tmp_path / "hf", tmp_path / "out", "--revision", "v1"), "and has no revision 'v1'"),
        (("export", tmp_path / "absent", tmp_path / "out"), "no such folder"),
        (("export", native), "Missing argument 'OUT'"),
        (("export", native, tmp_path / "out", "--to", "onnx"), "'onnx' is not one of"),
    ):
        result = kvad(*arguments)
        assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result
        assert len(result.err.splitlines()) <= 2 and not (tmp_path / "out").exists()
