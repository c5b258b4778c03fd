"""kvad inspect: what a checkpoint holds, read from headers; and the drawings of --attention."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad.checkpoint.handle import TrainingState
from kvad.checkpoint.hf_layout import HFCheckpoint
from kvad.checkpoint.safetensors_header import read_headers, stored_dtype
from kvad.cli.main import main
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import CheckpointError, RequestError
from kvad.inspection import checkpoint as lab
from kvad.inspection import encoder_attention
from kvad.inspection.attention_plot import AttentionMap, attention_to_json, attention_to_text
from kvad.inspection.checkpoint import AttentionSummary, outline_values, summarize_checkpoint
from kvad.llm import LLM
from kvad.model.no_cache import NoCache
from kvad.text.tokenizer import train_tokenizer
from tests.hf_parity import checkpoint as oracle
from tests.support.lab_models import CONFIGS, ENCODERS, EVERY, PAIRS, tiny, write_checkpoint, write_foreign

ROOT = Path(__file__).parents[2]
CONFIG = CONFIGS["pattern"]


def run(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_a_summary(checkpoint):
    found = summarize_checkpoint(checkpoint)
    assert {tensor.name: tensor.shape for tensor in found.tensors} == weight_shapes(CONFIG)
    assert found.config == CONFIG and found.problems == () and found.training is None
    assert found.plan.weights == sum(tensor.bytes for tensor in found.tensors) == 4 * found.num_parameters
    assert found.tokenizer.kind == "char" and "<|endofdoc|>" in found.tokenizer.specials


def test_the_page(checkpoint, capsys):
    code, out, err = run(capsys, checkpoint)
    assert (code, err) == (0, "")
    found = summarize_checkpoint(checkpoint)
    assert f"{found.num_parameters:,} parameters in {len(found.tensors)} tensors, float32" in out
    assert "decoder.layer_pattern" in out and '"LLG"' in out and "tokenizer: char" in out and "group 1:" in out
    for part, count in found.parameters.items():
        assert not count or f"{part:<12}{count:>16,}" in out
    assert "decoder.layers.0.attention.q.weight" not in out


def test_tensors_are_listed(checkpoint, capsys):
    code, out, _ = run(capsys, checkpoint, "--tensors")
    assert code == 0
    for name, shape in weight_shapes(CONFIG).items():
        line = next(line for line in out.splitlines() if line.strip().startswith(f"{name} "))
        assert "float32" in line and str(shape) in line


def test_json(checkpoint, capsys):
    code, out, _ = run(capsys, checkpoint, "--json")
    found = json.loads(out)
    assert code == 0 and found["config"] == CONFIG.to_dict() and found["problems"] == []
    assert found["memory"]["bytes"]["weights"] == sum(tensor["bytes"] for tensor in found["tensors"])
    assert {tensor["part"] for tensor in found["tensors"]} == {"embedding", "attention", "mlp", "norms"}


def test_a_bare_checkpoint_and_one_in_training(tmp_path, capsys):
    bare = write_checkpoint(tmp_path / "bare", CONFIG, dtype=torch.bfloat16, tokenizer=False)
    assert stored_dtype(bare / "model.safetensors") == "bfloat16" and summarize_checkpoint(bare).tokenizer is None
    state = TrainingState(
        {"w.m": torch.zeros(3), "w.v": torch.zeros(3)}, {"step": 200, "loss": {"validation_fraction": 2.5}}
    )
    busy = write_checkpoint(tmp_path / "busy" / "checkpoints" / "step-00000200", CONFIG, training=state)
    assert summarize_checkpoint(tmp_path / "busy").path == busy
    assert summarize_checkpoint(busy).training == {**state.state, "tensors": 2, "tensor_bytes": 24}
    _, out, _ = run(capsys, tmp_path / "busy")
    assert "loss.validation" in out and "2.5" in out
    _, out, _ = run(capsys, bare)
    assert "tokenizer: none" in out and "training: not recorded in the checkpoint" in out


def test_problems_are_named_and_the_code_is_1(tmp_path, capsys):
    gone, other = "decoder.layers.1.mlp.up.weight", "decoder.layers.0.attention.k.weight"
    change = {other: torch.zeros(3, 24), "extra": torch.zeros(2)}
    folder = write_checkpoint(tmp_path / "run", CONFIG, drop=(gone,), change=change)
    code, out, _ = run(capsys, folder)
    assert code == 1
    assert f"problem: {gone} [40, 24] is missing" in out
    assert f"problem: {other} is [3, 24], the config says [12, 24]" in out
    assert "problem: extra [2] is extra: the config has no place for it" in out


def flip(path):
    """Another file of the same length."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_check_reads_every_file(checkpoint, capsys):
    code, out, _ = run(capsys, checkpoint)
    assert code == 0 and "manifest: 3 files; --check compares their sha256" in out
    code, out, _ = run(capsys, checkpoint, "--check")
    assert code == 0 and "manifest: 3 files; every sha256 agrees" in out
    flip(checkpoint / "model.safetensors")
    assert run(capsys, checkpoint)[0] == 0  # headers do not see it
    code, out, err = run(capsys, checkpoint, "--check")
    assert (code, out) == (2, "")
    assert "model.safetensors differs from its manifest: same size" in err and "truncated" not in err


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_the_manifest_in_json(checkpoint, capsys, flags):
    found = json.loads(run(capsys, checkpoint, "--json", *flags)[1])
    assert found["manifest"] == {"files": 3, "checked": bool(flags)}


def test_without_a_manifest_it_says_so(checkpoint, capsys):
    (checkpoint / "manifest.json").unlink()
    code, out, _ = run(capsys, checkpoint)
    assert code == 1 and "problem: manifest.json is missing" in out and "manifest: none; " in out
    code, out, _ = run(capsys, checkpoint, "--json")
    found = json.loads(out)
    assert code == 1 and found["manifest"] is None and "manifest.json is missing" in found["problems"][0]
    code, _, err = run(capsys, checkpoint, "--check")
    assert code == 2 and "manifest.json is missing" in err


def test_a_tokenizer_that_is_gone_is_a_problem_and_one_that_never_was_is_not(checkpoint, tmp_path, capsys):
    (checkpoint / "tokenizer.json").unlink()
    code, out, _ = run(capsys, checkpoint)
    assert code == 1 and f"problem: {checkpoint / 'tokenizer.json'} is missing" in out and "tokenizer: none" in out
    bare = write_checkpoint(tmp_path / "bare", CONFIG, tokenizer=False)
    code, out, _ = run(capsys, bare, "--json")
    assert code == 0 and json.loads(out)["tokenizer"] is None
    code, out, _ = run(capsys, bare)
    assert code == 0 and "tokenizer: none; prompts can only be token ids" in out


def test_a_tensor_file_that_a_load_would_refuse_is_a_problem(checkpoint, tmp_path, capsys):
    other = write_checkpoint(tmp_path / "other", CONFIG, dtype=torch.bfloat16)
    (checkpoint / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    code, out, _ = run(capsys, checkpoint)
    assert code == 1 and "model.safetensors differs from its manifest: " in out and "truncated" not in out


def test_one_token_is_not_several(capsys, tmp_path):
    folder = write_checkpoint(tmp_path / "one", tiny(limit=1))
    _, out, _ = run(capsys, folder)
    assert "memory of 8 sequences of 1 token, paged" in out


def test_no_torch_is_loaded(checkpoint):
    program = (
        "import sys\nfrom kvad.cli.main import main\n"
        f"code = main(['inspect', {str(checkpoint)!r}, '--tensors'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "parameters" in ran.stdout, ran.stderr


def test_outline_opens_objects():
    values = {"a": {"b": 1, "c": None, "d": {"e": "x"}}, "f": [], "g": [1, 2], "h": "y" * 100}
    assert [line.split()[0] for line in outline_values(values)] == ["a.b", "a.d.e", "g", "h"]
    assert outline_values(values)[-1].endswith("...")


# ---------------------------------------------------------------- every topology, Hugging Face


@pytest.mark.parametrize("name", ["pair t5", "pair of widths", "encoder", "encoder rows"])
def test_of_every_topology(name, tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "run", EVERY[name])
    code, out, err = run(capsys, folder)
    assert (code, err) == (0, "") and "encoder.layer_types.L.attention.num_heads" in out and "embedding" in out
    found = json.loads(run(capsys, folder, "--json")[1])
    assert found["config"] == EVERY[name].to_dict() and found["problems"] == [] and found["origin"] is None
    assert found["memory"]["bytes"]["weights"] == sum(tensor["bytes"] for tensor in found["tensors"])
    if EVERY[name].kind == "encoder":
        assert "8 texts of 64 tokens at once" in out and "none: an encoder has no cache" in out
    else:
        assert "8 sequences of 64 tokens, 48 of source each" in out and "cross-attention, " in out


CASES = [name for name in oracle.names("5") if name != "roformer-rotary-value"]


@pytest.mark.parametrize("name", CASES)
def test_a_foreign_folder_has_no_problems(name, tmp_path):
    """Names and shapes alone show that the file fits its config: no tensor's data is there to be read."""
    found = summarize_checkpoint(write_foreign(tmp_path / "m", name))
    assert found.problems == () and found.origin == HFCheckpoint(found.path).origin
    assert found.num_parameters == sum(math.prod(shape) for shape in weight_shapes(found.config).values())
    assert {tensor.name for tensor in found.tensors} == set(oracle.load("5", name)[0]["tensors"])
    assert found.plan.weights == 4 * found.num_parameters


def test_the_page_of_a_foreign_folder(tmp_path, capsys):
    folder = write_foreign(tmp_path / "m", "t5")
    code, out, err = run(capsys, folder, "--tensors")
    assert (code, err) == (0, "") and "Hugging Face's t5, " in out and "problem" not in out
    assert "manifest: a Hugging Face folder has none" in out and "tokenizer: none" in out
    assert re.search(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.k\.weight +float32", out)
    found = json.loads(run(capsys, folder, "--json")[1])
    assert found["origin"] == "t5" and found["manifest"] is None and {t["part"] for t in found["tensors"]} == {None}
    code, _, err = run(capsys, folder, "--check")
    assert code == 2 and "no manifest to check against" in err and "kvad doctor" in err


def test_problems_of_a_foreign_folder_are_all_named(tmp_path, capsys):
    folder = write_foreign(tmp_path / "m", "llama")
    tensors = load_file(folder / "model.safetensors")
    gone, other = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    del tensors[gone]
    tensors |= {other: torch.zeros(3, 48), "model.extra": torch.zeros(2), "model.norm.weight": torch.zeros(5)}
    save_file(tensors, folder / "model.safetensors")
    code, out, _ = run(capsys, folder)
    assert code == 1 and out.count("problem: ") == 4
    assert f"problem: {gone} is missing" in out and "problem: model.extra [2] is extra" in out
    assert f"problem: {other} [3, 48] cannot be converted to decoder.layers.0.attention.k.weight [" in out
    assert "problem: model.norm.weight [5] cannot be converted to decoder.norm.weight [" in out


def test_a_sharded_folder_is_one(tmp_path, capsys):
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
    code, _, err = run(capsys, folder)
    assert code == 2 and "is missing" in err


def test_a_foreign_folder_without_weights(tmp_path, capsys):
    code, _, err = run(capsys, write_foreign(tmp_path / "m", "llama", weights=False))
    assert code == 2 and "has no weights" in err


def test_a_tokenizer_that_does_not_fit_is_a_problem(tmp_path, capsys):
    folder = write_foreign(tmp_path / "m", "llama")
    train_tokenizer("byte", ["a"]).save(folder)
    code, out, _ = run(capsys, folder)
    assert code == 1 and "problem: " in out and "that they belong together" not in out and "tokenizer: none" in out


# ---------------------------------------------------------------- headers that do not add up


def write_header(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        ({"w": ENTRY}, b"1234", "is truncated: "),
        ({"w": {**ENTRY, "shape": [3]}}, b"12345678", "has 12 bytes, its data_offsets span 8"),
        ({"w": {**ENTRY, "data_offsets": [-8, 0]}}, b"12345678", "tensor 'w': its data_offsets must be [begin, end]"),
        ({"w": {"dtype": "F32"}}, b"", "tensor 'w': its entry must be {dtype, shape, data_offsets}"),
        ({"w": 3}, b"", "tensor 'w': its entry must be {dtype, shape, data_offsets}"),
        ({"w": {**ENTRY, "data_offsets": ["a", "b"]}}, b"", "tensor 'w': its data_offsets must be [begin, end]"),
    ],
)
def test_a_broken_header(tmp_path, header, data, says):
    with pytest.raises(CheckpointError) as caught:
        read_headers(write_header(tmp_path / "model.safetensors", header, data))
    assert says in caught.value.message and "model.safetensors" in caught.value.message


@pytest.mark.parametrize(
    "content", [b"", b"1234", (1 << 60).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"]
)
def test_a_file_that_is_no_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated, or not a safetensors file"):
        read_headers(tmp_path / "model.safetensors")


def test_a_whole_header(tmp_path):
    header = {"__metadata__": {"a": "b"}, "v": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]}, "w": ENTRY}
    found = read_headers(write_header(tmp_path / "model.safetensors", header, bytes(16)))
    assert [(t.name, t.dtype, t.shape, t.bytes) for t in found] == [("w", "float32", (2,), 8), ("v", "int64", (), 8)]


# ---------------------------------------------------------------- drawings


@pytest.fixture
def seen(monkeypatch):
    """A model that answers with the layers and heads it was asked for; the list of its calls."""
    calls = []

    def answer(folder, text, *, layers, heads, cached, target=None):
        calls.append((text, layers, heads, cached))
        weights = ((1.0, 0.0), (0.25, 0.75))
        maps = tuple(AttentionMap(i, j, weights) for i in layers or range(3) for j in heads or range(2))
        return AttentionSummary((7, 8), ("de", "f"), maps)

    monkeypatch.setattr(lab, "attention_maps", answer)
    return calls


def test_a_drawing_in_the_terminal(seen, capsys):
    code, out, err = run(capsys, "m", "--attention", "def")
    assert (code, err) == (0, "") and seen == [("def", [0], [0], False)]
    assert out.startswith("layer 0, head 0") and "1 f              ▒▒▓▓" in out and out.count("layer") == 1


def test_any_layer_and_head(seen, capsys):
    code, out, _ = run(
        capsys, "m", "--attention", "def", "--layer", "2", "--layer", "1", "--head", "all", "--use-cache"
    )
    assert code == 0 and seen == [("def", [2, 1], None, True)]
    assert [line for line in out.splitlines() if line.startswith("layer")][-1].startswith("layer 1, head 1")


def test_a_drawing_as_json(seen, capsys):
    _, first, _ = run(capsys, "m", "--attention", "def", "--format", "json")
    _, second, _ = run(capsys, "m", "--attention", "def", "--json")
    assert json.loads(first) == json.loads(second)
    assert json.loads(first)["attention"][0]["weights"] == [[1.0, 0.0], [0.25, 0.75]]


def test_a_drawing_in_a_file(seen, capsys, tmp_path):
    code, out, _ = run(
        capsys, "m", "--attention", "def", "--layer", "all", "--format", "svg", "--out", tmp_path / "a.svg"
    )
    assert (code, out) == (0, "") and "</svg>" in (tmp_path / "a.svg").read_text()
    run(capsys, "m", "--attention", "def", "--out", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text().startswith("layer 0, head 0")
    assert run(capsys, "m", "--attention", "def", "--head", "all", "--out", tmp_path / "a.png")[:2] == (0, "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, "m", "--attention", "def", "--out", tmp_path / "none" / "a.txt")
    assert code == 2 and "no such file or folder" in err


@pytest.mark.parametrize("cached", [False, True])
def test_the_drawing_is_what_the_model_does(checkpoint, cached):
    found = lab.attention_maps(checkpoint, "quick fox", layers=[4, 1], heads=[3, 0], cached=cached)
    assert "".join(found.pieces).replace("␣", " ") == "quick fox" and len(found.tokens) == 9
    assert {(one.layer, one.head) for one in found.maps} == {(4, 3), (4, 0), (1, 3), (1, 0)}
    for one in found.maps:
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in one.weights)
        assert all(weight == 0 for i, row in enumerate(one.weights) for weight in row[i + 1 :])
    windowed = next(one for one in found.maps if one.layer == 1)  # "LLG": a window of 5
    assert all(weight == 0 for i, row in enumerate(windowed.weights) for weight in row[: max(0, i - 4)])
    every = lab.attention_maps(checkpoint, "quick fox", layers=None, heads=None)
    assert len(every.maps) == 5 * 4


@pytest.mark.parametrize("name", ["pair", "pair of widths", "pair window"])
def test_an_encoder_decoder_looks_in_three_ways(name, tmp_path):
    config = PAIRS[name]
    folder = write_checkpoint(tmp_path / "run", config)
    found = lab.attention_maps(folder, "quick fox", target="the", layers=None, heads=[1])
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
    answered = lab.attention_maps(folder, "quick fox", layers=[0], heads=None)
    assert {one.layer for one in answered.maps} == {0} and len(answered.maps[-1].queries) > 1
    with pytest.raises(RequestError, match=r"layer 9 is not one of 0\.\."):
        lab.attention_maps(folder, "fox", layers=[9], heads=None)
    with pytest.raises(RequestError, match="--use-cache: an encoder has no cache"):
        lab.attention_maps(folder, "fox", layers=[0], heads=None, cached=True)


def test_cross_attention_is_what_the_decoder_reads(tmp_path):
    """Its weights by hand: the softmax of the decoder's queries times the encoder's keys."""
    config = PAIRS["pair"]
    folder = write_checkpoint(tmp_path / "run", config)
    one = next(
        m for m in lab.attention_maps(folder, "fox", target="q", layers=[0], heads=[0]).maps if m.side == "cross"
    )
    with LLM.load(folder, max_num_seqs=1, max_seq_len=16) as llm:
        layer = llm.model.decoder.layers[0]
        held = []
        hook = layer.cross_attention.register_forward_hook(lambda module, inputs, output: held.append(inputs[0]))
        source = llm.encode("fox")
        step = encoder_attention._step(llm.texts.encode_target("q"), "cpu")._replace(
            encoder_input=encoder_attention._step(source, "cpu")
        )
        with torch.no_grad():
            llm.model(step, NoCache(config))
            encoded = llm.model.encode(step.encoder_input)
            q = layer.cross_attention.q(held[0]).unflatten(
                -1, (config.decoder.layer_types["L"].cross_attention.num_heads, -1)
            )[:, 0]
            k = layer.cross_attention.k(encoded).unflatten(-1, (layer.cross_attention.kv_heads, -1))[:, 0]
            expected = (q @ k.T * q.shape[-1] ** -0.5).softmax(-1)
        hook.remove()
    assert torch.allclose(torch.tensor(one.weights), expected, atol=1e-5)


def test_an_encoder_alone_looks_at_itself(tmp_path):
    folder = write_checkpoint(tmp_path / "run", ENCODERS["encoder"])
    found = lab.attention_maps(folder, "quick fox", layers=[0], heads=[0])
    assert [one.side for one in found.maps] == ["encoder"] and found.maps[0].weights[0][-1] > 0
    assert attention_to_json(found.tokens, found.pieces, found.maps)["attention"][0]["side"] == "encoder"
    drawn = attention_to_text(found.pieces, found.maps[0])
    assert drawn.startswith("encoder, layer 0, head 0: rows are queries")
    with pytest.raises(RequestError, match="an encoder reads no target"):
        lab.attention_maps(folder, "fox", layers=[0], heads=[0], target="x")


@pytest.mark.parametrize(("option", "number"), [("--layer", "5"), ("--head", "4")])
def test_a_layer_or_head_that_is_not_there(checkpoint, capsys, option, number):
    code, out, err = run(capsys, checkpoint, "--attention", "fox", option, number)
    assert (code, out) == (2, "") and f"{option[2:]}s: must be in 0.." in err and f"got {number}" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
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
        (["--attention", "def", "--format", "mermaid"], "has no format mermaid"),
        (["--attention", "def", "--target", "x"], "a decoder has no separate target"),
        (["--target", "x"], "--target needs --attention TEXT"),
    ],
)
def test_options_that_cannot_be(checkpoint, capsys, arguments, says):
    code, out, err = run(capsys, checkpoint, *arguments)
    assert (code, out) == (2, "") and says in err


def test_a_model_on_the_hub(tmp_path, capsys, monkeypatch):
    """Of --tree no weights are fetched; what the summary reads are their headers."""
    import huggingface_hub

    folder = write_foreign(tmp_path / "theirs", "llama-tied")
    asked = []

    def download(repo, *, allow_patterns, **options):
        asked.append((repo, options["revision"], "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    of_folder = run(capsys, folder, "--tree")[1].splitlines()
    code, out, err = run(capsys, "org/theirs@v2", "--tree")
    assert (code, err) == (0, "") and out.splitlines()[1:] == of_folder[1:]
    assert asked == [("org/theirs", "v2", False)]
    assert run(capsys, "hf://org/theirs", "--json") == run(capsys, folder, "--json")
    assert asked[-1][2] is True
    assert main(["plan", "org/theirs", "--bandwidth", "10"]) == 0 and asked[-1] == ("org/theirs", None, False)


def test_not_a_checkpoint(tmp_path, capsys):
    code, _, err = run(capsys, tmp_path / "none")
    assert code == 2 and "no such folder" in err
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and "has no config.json" in err
    (tmp_path / "config.json").write_text(json.dumps({"model": CONFIG.to_dict()}))
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and "model.safetensors is missing" in err
    (tmp_path / "config.json").write_text('{"model": {"hiden_size": 3}}')
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and "config.json: unknown key hiden_size" in err and "'hidden_size'" in err
