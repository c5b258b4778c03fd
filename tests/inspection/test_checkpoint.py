"""kvad inspect: the contents of a checkpoint, read from headers, and the attention maps of --attention."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad.checkpoint.handle import TrainingState
from kvad.checkpoint.hf_layout import HFCheckpoint
from kvad.checkpoint.safetensors_header import read_headers, stored_dtype
from kvad.cli.main import main
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import CheckpointError, RequestError
from kvad.inspection import checkpoint as checkpoint_lib
from kvad.inspection.attention_plot import AttentionMap, attention_to_json, attention_to_text
from kvad.inspection.checkpoint import AttentionSummary, outline_values, summarize_checkpoint
from kvad.llm import LLM
from kvad.model import whole_sequences
from kvad.model.no_cache import NoCache
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config import RunConfig
from tests.cli.test_main import assert_loads_no_torch
from tests.hf_parity import checkpoint as references
from tests.support.lab_models import CONFIGS, ENCODERS, EVERY, PAIRS, tiny, write_checkpoint, write_foreign

CONFIG = CONFIGS["pattern"]


def test_summary(checkpoint):
    found = summarize_checkpoint(checkpoint)
    assert {tensor.name: tensor.shape for tensor in found.tensors} == weight_shapes(CONFIG)
    assert found.config == CONFIG and found.problems == () and found.training is None
    assert found.plan.weights == sum(tensor.bytes for tensor in found.tensors) == 4 * found.num_parameters
    assert found.tokenizer.kind == "char" and "<|endofdoc|>" in found.tokenizer.specials


def test_printed_page(checkpoint, inspect):
    code, out, err = inspect(checkpoint)
    assert (code, err) == (0, "")
    found = summarize_checkpoint(checkpoint)
    assert f"{found.num_parameters:,} parameters in {len(found.tensors)} tensors, float32" in out
    assert "decoder.layer_pattern" in out and '"LLG"' in out and "tokenizer: char" in out and "group 1:" in out
    for part, count in found.parameters.items():
        assert not count or f"{part:<12}{count:>16,}" in out
    assert "decoder.layers.0.attention.q.weight" not in out
    assert "residual_scale" not in out and "config, without defaults (--json has every value)" in out


def test_experts_that_a_token_does_not_use_are_stated(tmp_path, inspect):
    folder = write_checkpoint(tmp_path / "model", EVERY["experts"])
    code, out, _ = inspect(folder)
    found = summarize_checkpoint(folder)
    assert code == 0 and f"{found.num_parameters - 2 * 6 * 3 * 40 * 24:,} parameters used by a token" in out


def test_defaults_of_a_run_are_omitted(tmp_path, inspect):
    run = {**RunConfig().to_dict(), "train": {**RunConfig().to_dict()["train"], "steps": 7}}
    training = TrainingState({"w.m": torch.zeros(3)}, {"step": 7, "run": run})
    folder = write_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000007", CONFIG, training=training)
    _, out, _ = inspect(folder)
    shown = out.partition("training, without defaults")[2]
    assert "run.train.steps" in shown and "run.optim" not in shown and "run.summarizer" not in shown


def test_tensors_option_lists_tensors(checkpoint, inspect):
    code, out, _ = inspect(checkpoint, "--tensors")
    assert code == 0
    for name, shape in weight_shapes(CONFIG).items():
        line = next(line for line in out.splitlines() if line.strip().startswith(f"{name} "))
        assert "float32" in line and str(shape) in line


def test_json_output(checkpoint, inspect):
    code, out, _ = inspect(checkpoint, "--json")
    found = json.loads(out)
    assert code == 0 and found["config"] == CONFIG.to_dict() and found["problems"] == []
    assert found["memory"]["bytes"]["weights"] == sum(tensor["bytes"] for tensor in found["tensors"])
    assert {tensor["part"] for tensor in found["tensors"]} == {"embedding", "attention", "mlp", "norms"}


def test_checkpoints_without_tokenizer_and_with_training_state(tmp_path, inspect):
    bare = write_checkpoint(tmp_path / "bare", CONFIG, dtype=torch.bfloat16, tokenizer=False)
    assert stored_dtype(bare / "model.safetensors") == "bfloat16" and summarize_checkpoint(bare).tokenizer is None
    state = TrainingState(
        {"w.m": torch.zeros(3), "w.v": torch.zeros(3)}, {"step": 200, "loss": {"validation_fraction": 2.5}}
    )
    busy = write_checkpoint(tmp_path / "busy" / "checkpoints" / "step-00000200", CONFIG, training=state)
    assert summarize_checkpoint(tmp_path / "busy").path == busy
    assert summarize_checkpoint(busy).training == {**state.state, "tensors": 2, "tensor_bytes": 24}
    _, out, _ = inspect(tmp_path / "busy")
    assert "loss.validation" in out and "2.5" in out
    _, out, _ = inspect(bare)
    assert "tokenizer: none" in out and "training: not recorded in the checkpoint" in out


def test_problems_are_listed_and_exit_1(tmp_path, inspect):
    missing, changed = "decoder.layers.1.mlp.up.weight", "decoder.layers.0.attention.k.weight"
    change = {changed: torch.zeros(3, 24), "extra": torch.zeros(2)}
    folder = write_checkpoint(tmp_path / "run", CONFIG, drop=(missing,), change=change)
    code, out, _ = inspect(folder)
    assert code == 1
    assert f"problem: {missing} [40, 24] is missing" in out
    assert f"problem: {changed} is [3, 24], the config says [12, 24]" in out
    assert "problem: extra [2] is extra: the config has no place for it" in out


def test_check_reads_every_file(checkpoint, inspect):
    code, out, _ = inspect(checkpoint)
    assert code == 0 and "manifest: 3 files; --check compares their sha256" in out
    code, out, _ = inspect(checkpoint, "--check")
    assert code == 0 and "manifest: 3 files; every sha256 agrees" in out
    for options, checked in ([], False), (["--check"], True):
        assert json.loads(inspect(checkpoint, "--json", *options).out)["manifest"] == {"files": 3, "checked": checked}
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    assert inspect(checkpoint).code == 0  # the headers are unchanged
    code, out, err = inspect(checkpoint, "--check")
    assert (code, out) == (2, "")
    assert "model.safetensors differs from its manifest: same size" in err and "truncated" not in err


def test_missing_manifest_is_a_problem(checkpoint, inspect):
    (checkpoint / "manifest.json").unlink()
    code, out, _ = inspect(checkpoint)
    assert code == 1 and "problem: manifest.json is missing" in out and "manifest: none; " in out
    code, out, _ = inspect(checkpoint, "--json")
    found = json.loads(out)
    assert code == 1 and found["manifest"] is None and "manifest.json is missing" in found["problems"][0]
    code, _, err = inspect(checkpoint, "--check")
    assert code == 2 and "manifest.json is missing" in err


def test_missing_tokenizer_is_a_problem_if_it_was_saved(checkpoint, tmp_path, inspect):
    (checkpoint / "tokenizer.json").unlink()
    code, out, _ = inspect(checkpoint)
    assert code == 1 and f"problem: {checkpoint / 'tokenizer.json'} is missing" in out and "tokenizer: none" in out
    bare = write_checkpoint(tmp_path / "bare", CONFIG, tokenizer=False)
    code, out, _ = inspect(bare, "--json")
    assert code == 0 and json.loads(out)["tokenizer"] is None
    code, out, _ = inspect(bare)
    assert code == 0 and "tokenizer: none; prompts can only be token ids" in out


def test_tensor_file_of_another_size_is_a_problem(checkpoint, tmp_path, inspect):
    other = write_checkpoint(tmp_path / "other", CONFIG, dtype=torch.bfloat16)
    (checkpoint / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    code, out, _ = inspect(checkpoint)
    assert code == 1 and "model.safetensors differs from its manifest: " in out and "truncated" not in out


def test_one_token_is_singular(inspect, tmp_path):
    folder = write_checkpoint(tmp_path / "one", tiny(limit=1))
    _, out, _ = inspect(folder)
    assert "memory of 8 sequences of 1 token, paged" in out


def test_inspect_imports_no_torch(checkpoint):
    assert_loads_no_torch("inspect", str(checkpoint), "--tensors")


def test_outline_flattens_objects():
    values = {"a": {"b": 1, "c": None, "d": {"e": "x"}}, "f": [], "g": [1, 2], "h": "y" * 100}
    assert [line.split()[0] for line in outline_values(values)] == ["a.b", "a.d.e", "g", "h"]
    assert outline_values(values)[-1].endswith("...")


# ---------------------------------------------------------------- every topology, Hugging Face


@pytest.mark.parametrize("name", ["pair t5", "pair of widths", "encoder", "encoder rows"])
def test_encoders_and_encoder_decoders(name, tmp_path, inspect):
    folder = write_checkpoint(tmp_path / "run", EVERY[name])
    code, out, err = inspect(folder)
    assert (code, err) == (0, "") and "encoder.layer_types.L.attention.num_heads" in out and "embedding" in out
    found = json.loads(inspect(folder, "--json")[1])
    assert found["config"] == EVERY[name].to_dict() and found["problems"] == [] and found["origin"] is None
    assert found["memory"]["bytes"]["weights"] == sum(tensor["bytes"] for tensor in found["tensors"])
    if EVERY[name].kind == "encoder":
        assert "8 texts of 64 tokens at once" in out and "none: an encoder has no cache" in out
    else:
        assert "8 sequences of 64 tokens, 48 of source each" in out and "cross-attention, " in out


CASES = [name for name in references.names("5") if name != "roformer-rotary-value"]


@pytest.mark.parametrize("name", CASES)
def test_hf_folders_have_no_problems(name, tmp_path):
    """The files have no tensor data: names and shapes alone show that they fit the config."""
    found = summarize_checkpoint(write_foreign(tmp_path / "m", name))
    assert found.problems == () and found.origin == HFCheckpoint(found.path).origin
    assert found.num_parameters == sum(math.prod(shape) for shape in weight_shapes(found.config).values())
    assert {tensor.name for tensor in found.tensors} == set(references.load("5", name)[0]["tensors"])
    assert found.plan.weights == 4 * found.num_parameters


def test_printed_page_of_an_hf_folder(tmp_path, inspect):
    folder = write_foreign(tmp_path / "m", "t5")
    code, out, err = inspect(folder, "--tensors")
    assert (code, err) == (0, "") and "Hugging Face's t5, " in out and "problem" not in out
    assert "manifest: a Hugging Face folder has none" in out and "tokenizer: none" in out
    assert re.search(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.k\.weight +float32", out)
    found = json.loads(inspect(folder, "--json")[1])
    assert found["origin"] == "t5" and found["manifest"] is None and {t["part"] for t in found["tensors"]} == {None}
    code, _, err = inspect(folder, "--check")
    assert code == 2 and "no manifest to check against" in err and "kvad doctor" in err


def test_problems_of_an_hf_folder_are_listed(tmp_path, inspect):
    folder = write_foreign(tmp_path / "m", "llama")
    tensors = load_file(folder / "model.safetensors")
    missing, changed = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    del tensors[missing]
    tensors |= {changed: torch.zeros(3, 48), "model.extra": torch.zeros(2), "model.norm.weight": torch.zeros(5)}
    save_file(tensors, folder / "model.safetensors")
    code, out, _ = inspect(folder)
    assert code == 1 and out.count("problem: ") == 4
    assert f"problem: {missing} is missing" in out and "problem: model.extra [2] is extra" in out
    assert f"problem: {changed} [3, 48] cannot be converted to decoder.layers.0.attention.k.weight [" in out
    assert "problem: model.norm.weight [5] cannot be converted to decoder.norm.weight [" in out


def test_sharded_hf_folder(tmp_path, inspect):
    folder = write_foreign(tmp_path / "m", "llama")
    tensors = load_file(folder / "model.safetensors")
    whole = summarize_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-0000{number}-of-00002.safetensors": names[number - 1 :: 2] for number in (1, 2)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = summarize_checkpoint(folder)
    assert sorted(found.tensors) == sorted(whole.tensors) and found.plan == whole.plan and found.problems == ()
    (folder / next(iter(files))).unlink()
    code, _, err = inspect(folder)
    assert code == 2 and "is missing" in err


def test_hf_folder_without_weights_is_refused(tmp_path, inspect):
    code, _, err = inspect(write_foreign(tmp_path / "m", "llama", weights=False))
    assert code == 2 and "has no weights" in err


def test_tokenizer_of_another_model_is_a_problem(tmp_path, inspect):
    folder = write_foreign(tmp_path / "m", "llama")
    train_tokenizer("byte", ["a"]).save(folder)
    code, out, _ = inspect(folder)
    assert code == 1 and "problem: " in out and "that they belong together" not in out and "tokenizer: none" in out


def test_headers_are_read_without_metadata(tmp_path):
    """tests/checkpoint/test_safetensors_io.py has the invalid headers."""
    header = {"__metadata__": {"a": "b"}, "v": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]}}
    header["w"] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    raw, path = json.dumps(header).encode(), tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    found = [(tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for tensor in read_headers(path)]
    assert found == [("w", "float32", (2,), 8), ("v", "int64", (), 8)]
    for content in (b"", b"1234"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="truncated, or not a safetensors file"):
            read_headers(path)


# ---------------------------------------------------------------- attention maps


@pytest.fixture
def calls(monkeypatch):
    """Replace the model by one that returns the requested layers and heads; returns the list of its calls."""
    calls = []

    def attention_maps(folder, text, *, layers, heads, cached, target=None):
        calls.append((text, layers, heads, cached))
        weights = ((1.0, 0.0), (0.25, 0.75))
        maps = tuple(AttentionMap(i, j, weights) for i in layers or range(3) for j in heads or range(2))
        return AttentionSummary((7, 8), ("de", "f"), maps)

    monkeypatch.setattr(checkpoint_lib, "attention_maps", attention_maps)
    return calls


def test_attention_in_the_terminal(calls, inspect):
    code, out, err = inspect("m", "--attention", "def")
    assert (code, err) == (0, "") and calls == [("def", [0], [0], False)]
    assert out.startswith("layer 0, head 0") and "1 f              ▒▒▓▓" in out and out.count("layer") == 1


def test_selected_layers_and_heads(calls, inspect):
    code, out, _ = inspect("m", "--attention", "def", "--layer", "2", "--layer", "1", "--head", "all", "--use-cache")
    assert code == 0 and calls == [("def", [2, 1], None, True)]
    assert [line for line in out.splitlines() if line.startswith("layer")][-1].startswith("layer 1, head 1")


def test_attention_as_json(calls, inspect):
    _, first, _ = inspect("m", "--attention", "def", "--format", "json")
    _, second, _ = inspect("m", "--attention", "def", "--json")
    assert json.loads(first) == json.loads(second)
    assert json.loads(first)["attention"][0]["weights"] == [[1.0, 0.0], [0.25, 0.75]]


def test_attention_in_a_file(calls, inspect, tmp_path):
    def write(name, *options):
        return inspect("m", "--attention", "def", *options, "--out", tmp_path / name)

    code, out, _ = write("a.svg", "--layer", "all", "--format", "svg")
    assert (code, out) == (0, "") and "</svg>" in (tmp_path / "a.svg").read_text()
    write("a.txt")
    assert (tmp_path / "a.txt").read_text().startswith("layer 0, head 0")
    assert write("a.png", "--head", "all")[:2] == (0, "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for name, option in (("a.html", "--out"), ("b.html", "--html")):
        code, out, err = inspect("m", "--attention", "def", "--layer", "all", option, tmp_path / name)
        assert (code, out) == (0, "") and err == f"kvad: {tmp_path / name}: open it in a browser\n"
        assert "layer 2, head 0" in (tmp_path / name).read_text()
    code, _, err = inspect("m", "--attention", "def", "--html", tmp_path / "c.html", "--out", tmp_path / "d.png")
    assert code == 2 and "--out and --html exclude each other" in err
    code, _, err = write("none/a.txt")
    assert code == 2 and "no such file or folder" in err


@pytest.mark.parametrize("cached", [False, True])
def test_attention_weights_of_a_decoder(checkpoint, cached):
    found = checkpoint_lib.attention_maps(checkpoint, "quick fox", layers=[4, 1], heads=[3, 0], cached=cached)
    assert "".join(found.pieces).replace("␣", " ") == "quick fox" and len(found.tokens) == 9
    assert {(one.layer, one.head) for one in found.maps} == {(4, 3), (4, 0), (1, 3), (1, 0)}
    for one in found.maps:
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in one.weights)
        assert all(weight == 0 for i, row in enumerate(one.weights) for weight in row[i + 1 :])
    windowed = next(one for one in found.maps if one.layer == 1)  # "LLG": a window of 5
    assert all(weight == 0 for i, row in enumerate(windowed.weights) for weight in row[: max(0, i - 4)])
    every = checkpoint_lib.attention_maps(checkpoint, "quick fox", layers=None, heads=None)
    assert len(every.maps) == 5 * 4


def test_too_many_weights_are_refused_in_one_line(checkpoint, monkeypatch):
    monkeypatch.setattr(checkpoint_lib, "MAX_WEIGHTS", 5 * 4 * 81 - 1)
    with pytest.raises(RequestError, match="1,620 attention weights are too many to draw, at most 1,619"):
        checkpoint_lib.attention_maps(checkpoint, "quick fox", layers=None, heads=None)
    assert len(checkpoint_lib.attention_maps(checkpoint, "quick fox", layers=[0], heads=None).maps) == 4


@pytest.mark.parametrize("name", ["pair", "pair of widths", "pair window"])
def test_encoder_decoder_has_three_kinds_of_maps(name, tmp_path):
    config = PAIRS[name]
    folder = write_checkpoint(tmp_path / "run", config)
    found = checkpoint_lib.attention_maps(folder, "quick fox", target="the", layers=None, heads=[1])
    sides = {side: [one for one in found.maps if one.side == side] for side in ("encoder", "decoder", "cross")}
    assert [len(sides[side]) for side in sides] == [config.encoder.num_layers] + [config.decoder.num_layers] * 2
    shapes = {side: {(len(one.queries), len(one.keys)) for one in maps} for side, maps in sides.items()}
    assert shapes == {"encoder": {(9, 9)}, "decoder": {(4, 4)}, "cross": {(4, 9)}}  # <opening> t h e
    for one in found.maps:
        assert [len(one.weights), len(one.weights[0])] == [len(one.queries), len(one.keys)]
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in one.weights)
        hidden = all(weight == 0 for i, row in enumerate(one.weights) for weight in row[i + 1 :])
        assert hidden == (one.side == "decoder")
    assert "".join(sides["cross"][0].queries[1:]) == "the" and found.pieces == sides["cross"][0].keys
    answered = checkpoint_lib.attention_maps(folder, "quick fox", layers=[0], heads=None)
    assert {one.layer for one in answered.maps} == {0} and len(answered.maps[-1].queries) > 1
    with pytest.raises(RequestError, match=r"layer 9 is not one of 0\.\."):
        checkpoint_lib.attention_maps(folder, "fox", layers=[9], heads=None)
    with pytest.raises(RequestError, match="--use-cache: an encoder has no cache"):
        checkpoint_lib.attention_maps(folder, "fox", layers=[0], heads=None, cached=True)


def test_cross_attention_weights_by_hand(tmp_path):
    """The softmax of the decoder's queries times the encoder's keys."""
    config = PAIRS["pair"]
    folder = write_checkpoint(tmp_path / "run", config)
    found = checkpoint_lib.attention_maps(folder, "fox", target="q", layers=[0], heads=[0])
    (cross,) = [one for one in found.maps if one.side == "cross"]
    with LLM.load(folder, max_num_seqs=1, max_seq_len=16) as llm, torch.no_grad():
        attention, inputs = llm.model.decoder.layers[0].cross_attention, []
        attention.register_forward_hook(lambda module, given, output: inputs.append(given[0]))
        source = whole_sequences([llm.encode("fox")], llm.engine.device)
        target = whole_sequences([llm.texts.encode_target("q")], llm.engine.device)
        llm.model(target._replace(encoder_input=source), NoCache(config))
        num_heads = config.decoder.layer_types["L"].cross_attention.num_heads
        q = attention.q(inputs[0]).unflatten(-1, (num_heads, -1))[:, 0]
        k = attention.k(llm.model.encode(source)).unflatten(-1, (attention.kv_heads, -1))[:, 0]
        expected = (q @ k.T * q.shape[-1] ** -0.5).softmax(-1)
    assert torch.allclose(torch.tensor(cross.weights), expected, atol=1e-5)


def test_maps_of_an_encoder(tmp_path):
    folder = write_checkpoint(tmp_path / "run", ENCODERS["encoder"])
    found = checkpoint_lib.attention_maps(folder, "quick fox", layers=[0], heads=[0])
    assert [one.side for one in found.maps] == ["encoder"] and found.maps[0].weights[0][-1] > 0
    assert attention_to_json(found.tokens, found.pieces, found.maps)["attention"][0]["side"] == "encoder"
    drawn = attention_to_text(found.pieces, found.maps[0])
    assert drawn.startswith("encoder, layer 0, head 0: rows are queries")
    with pytest.raises(RequestError, match="an encoder reads no target"):
        checkpoint_lib.attention_maps(folder, "fox", layers=[0], heads=[0], target="x")


@pytest.mark.parametrize(("option", "number"), [("--layer", "5"), ("--head", "4")])
def test_unknown_layer_or_head_is_refused(checkpoint, inspect, option, number):
    code, out, err = inspect(checkpoint, "--attention", "fox", option, number)
    assert (code, out) == (2, "") and f"{option[2:]}s: must be in 0.." in err and f"got {number}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "1"], "--layer needs --attention TEXT"),
        (["--format", "svg"], "--format needs --tree or --attention TEXT"),
        (["--out", "x"], "--out needs --tree or --attention TEXT"),
        (["--attention", "def", "--layer", "two"], "--layer two: not a number"),
        (["--attention", "def", "--head", "-1"], "--head -1: not a number"),
        (["--attention", "def", "--tensors"], "--tensors and --attention exclude each other"),
        (["--attention", "def", "--check"], "--check and --attention exclude each other"),
        (["--attention", "def", "--json", "--format", "svg"], "exclude each other"),
        (["--attention", "def", "--format", "png"], "a PNG needs a file"),
        (["--attention", "def", "--target", "x"], "a decoder has no separate target"),
        (["--target", "x"], "--target needs --attention TEXT"),
        (["--tree", "--attention", "x"], "--tree and --attention exclude each other"),
        (["--tree", "--tensors"], "--tensors and --tree exclude each other"),
        (["--tree", "--check"], "--check and --tree exclude each other"),
        (["--tree", "--layer", "1"], "--layer needs --attention TEXT"),
        (["--tree", "--format", "terminal"], "--tree has no format terminal: text, svg, mermaid, json"),
        (
            ["--attention", "x", "--format", "mermaid"],
            "--attention has no format mermaid: terminal, svg, png, html, json",
        ),
        (["--tree", "--out", "tree.png"], "tree.png: the suffix is not a known format"),
        (["--tree", "--json", "--format", "svg"], "exclude each other"),
    ],
)
def test_invalid_options_are_refused(checkpoint, inspect, arguments, message):
    code, out, err = inspect(checkpoint, *arguments)
    assert (code, out) == (2, "") and message in err


def test_model_on_the_hub(tmp_path, inspect, monkeypatch):
    """--tree downloads no weights; the summary reads their headers."""
    import huggingface_hub

    folder = write_foreign(tmp_path / "model", "llama-tied")
    downloads = []

    def download(repo, *, allow_patterns, **options):
        downloads.append((repo, options["revision"], "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    of_folder = inspect(folder, "--tree")[1].splitlines()
    code, out, err = inspect("org/model@v2", "--tree")
    assert (code, err) == (0, "") and out.splitlines()[1:] == of_folder[1:]
    assert downloads == [("org/model", "v2", False)]
    assert inspect("hf://org/model", "--json") == inspect(folder, "--json")
    assert downloads[-1][2] is True
    assert main(["plan", "org/model", "--bandwidth", "10"]) == 0 and downloads[-1] == ("org/model", None, False)


def test_other_folders_are_refused(tmp_path, inspect):
    code, _, err = inspect(tmp_path / "none")
    assert code == 2 and "no such folder" in err
    code, _, err = inspect(tmp_path)
    assert code == 2 and "has no config.json" in err
    (tmp_path / "config.json").write_text(json.dumps({"model": CONFIG.to_dict()}))
    code, _, err = inspect(tmp_path)
    assert code == 2 and "model.safetensors is missing" in err
    (tmp_path / "config.json").write_text('{"model": {"hiden_size": 3}}')
    code, _, err = inspect(tmp_path)
    assert code == 2 and "config.json: unknown key hiden_size" in err and "'hidden_size'" in err
