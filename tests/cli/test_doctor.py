"""``kvad doctor`` of checkpoints: healthy ones pass every check; each damage is found, named and has a remedy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad import ops
from kvad.checkpoint.adapter import adapter_format, base_fingerprint, save_adapter
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.loader import open_checkpoint
from kvad.checkpoint.native import save_checkpoint
from kvad.checkpoint.peft import trainable_linears
from kvad.llm import LLM
from kvad.model.lora import LoraFactors, factor_bytes
from kvad.text.tokenizer import train_tokenizer
from tests.cli.test_convert import CONFIGS, write_hf_folder
from tests.support.cli_checkpoints import write_model
from tests.support.random_models import build, model_config
from tests.support.run_steps import save_step


@pytest.fixture
def native(tmp_path):
    return write_model(tmp_path / "native")


@pytest.fixture
def hf(tmp_path):
    write_hf_folder(tmp_path / "hf", "llama")
    return tmp_path / "hf"


def problems(result):
    """Return check -> message of the problems in ``--json``."""
    record = json.loads(result.out)
    assert record["healthy"] == (result.code == 0) and result.err == "" and result.code in (0, 1)
    assert all(finding["advice"] for finding in record["findings"] if not finding["ok"])
    return {finding["check"]: finding["message"] for finding in record["findings"] if not finding["ok"]}


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


CHECKS = ["headers", "config", "tensors", "finite", "tokenizer", "generation", "kernels"]


@pytest.mark.parametrize(
    ("layout", "checks", "text"),
    [
        ("native", ["manifest", "sha256", *CHECKS], "byte, 257 ids in a vocabulary of 257"),
        ("hf", CHECKS, "llama, a decoder of"),
    ],
)
def test_healthy_checkpoint(kvad, request, layout, checks, text):
    folder = request.getfixturevalue(layout)
    result = kvad("doctor", folder)
    assert (result.code, result.err) == (0, "") and text in result.out
    assert [line.split()[:2] for line in result.out.splitlines()] == [["ok", check] for check in checks]
    assert problems(kvad("doctor", folder, "--json")) == {}


def test_doctor_says_what_runs_the_decoder(kvad, hf, native, monkeypatch):
    library = ops.native.load().library
    expected = ops.native.load().reason if library is None else f"in the native kernels ({library.variant})"
    assert expected in kvad("doctor", hf).out
    reason = "has native=False"
    monkeypatch.setattr(ops.native, "load", lambda: ops.native.library.LoadResult(None, reason))
    assert f"the decoder runs in PyTorch: {reason}" in kvad("doctor", native).out


def kernels(kvad, *arguments):
    """Return what runs the decoder on a CPU: "native", or the reason why it is PyTorch."""
    result = kvad("doctor", *arguments)
    (line,) = (line for line in result.out.splitlines() if line.split()[1] == "kernels")
    message = line.partition(";")[0]
    return "native" if "in the native kernels" in message else message.partition("runs in PyTorch: ")[2]


def engine_kernels(folder, **options):
    """Return the same of an engine that has run a step."""
    llm = LLM.load(folder, max_seq_len=32, max_num_seqs=1, **options)
    llm.generate([[5, 6, 7]], max_tokens=2)
    return llm.engine.runner.native_reason or "native"


needs_kernels = pytest.mark.skipif(ops.native.load().library is None, reason=ops.native.load().reason)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_kernels_are_those_of_the_engine_for_every_stored_dtype(kvad, tmp_path, family, dtype):
    write_hf_folder(tmp_path / "hf", family, dtype=dtype)
    expected = "weights of float64" if dtype == torch.float64 else "native"
    assert kernels(kvad, tmp_path / "hf") == engine_kernels(tmp_path / "hf") == expected


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
    "num_local_experts": 4, "tie_word_embeddings": False,
}  # fmt: skip
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 64, "rotary_pct": 0.25,
    "tie_word_embeddings": False,
}  # fmt: skip
QKV_BYTES = 2 * 3 * 4 * (32 * 32 + 32)  # of both layers: weights and biases


@needs_kernels
@pytest.mark.parametrize(("family", "dtype"), [("gpt_neox", torch.float32), ("llama", torch.float16)])
def test_large_weights_that_are_copied_when_they_are_loaded(kvad, tmp_path, monkeypatch, caplog, family, dtype):
    """GPT-NeoX stores q, k and v in one tensor, and float16 is widened; an import has neither, as the reason says."""
    monkeypatch.setitem(CONFIGS, "gpt_neox", NEOX)
    write_hf_folder(tmp_path / "hf", family, dtype=dtype)
    assert kernels(kvad, tmp_path / "hf") == engine_kernels(tmp_path / "hf") == "native"
    assert not caplog.messages
    limit_copies(monkeypatch)
    reason = engine_kernels(tmp_path / "hf")
    assert caplog.messages == [f"PyTorch serves this model: {reason}"]  # a warning, without -v
    assert kernels(kvad, tmp_path / "hf") == reason and " bytes of weights are not mapped from a file" in reason
    assert int(reason.split()[0].replace(",", "")) == QKV_BYTES or family == "llama"
    assert (
        "kvad import" in reason
        and kvad("import", tmp_path / "hf", tmp_path / "out", "--save-dtype", "float32").code == 0
    )
    assert kernels(kvad, tmp_path / "out") == engine_kernels(tmp_path / "out") == "native"


def limit_copies(monkeypatch):
    monkeypatch.setattr("kvad.engine.execution.native_program.MAX_COPIED_BYTES", 1000)
    monkeypatch.setattr("kvad.engine.engine.MAX_PACKED_BYTES", 0)  # joined weights are not in the file


@needs_kernels
def test_experts_that_are_stored_one_by_one_are_not_copied(kvad, tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS, "mixtral", MIXTRAL)
    write_hf_folder(tmp_path / "hf", "mixtral")
    limit_copies(monkeypatch)
    assert kernels(kvad, tmp_path / "hf") == engine_kernels(tmp_path / "hf") == "native"


OPTIONS = {
    "dtype": ({"dtype": "float64"}, "weights of float64"),
    "cache": ({"cache_key_dtype": "int8-channel"}, "a cache of int8-channel"),
    "int8": ({"cache_dtype": "int8"}, "native"),
    "eviction": ({"policy": "heavy-hitters(8)"}, "an eviction policy reads the attention weights"),
    "sparse": ({"policy": "quest(8)"}, "a policy reads some blocks only"),
    "sinks": ({"policy": "sinks(2, 12)"}, "native"),
    "rope": ({"rope_at": "read"}, "keys are rotated when they are read"),
    "deterministic": ({"deterministic": True}, "a kernel of PyTorch was chosen"),
    "endless": ({"endless": True}, "endless: positions are unlimited"),
}


@needs_kernels
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_are_those_of_the_engine_with_the_same_options(kvad, hf, name):
    options, expected = OPTIONS[name]
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
    flags = [flag for flag in flags if flag is not True]
    assert kernels(kvad, hf, *flags) == engine_kernels(hf, **options) == expected


def test_options_that_the_model_cannot_have(kvad, hf):
    record = problems(kvad("doctor", hf, "--overflow", "summarize", "--json"))
    assert "max_seq_len must be below the model's limit" in record["kernels"]
    assert kvad("doctor", hf, "--policy", "nonsense").code == 2


@needs_kernels
@pytest.mark.parametrize("file_type", ["bfloat16", "q8_0"])
def test_gguf_file(kvad, hf, tmp_path, file_type):
    path = tmp_path / "model.gguf"
    assert kvad("export", hf, path, "--save-dtype", file_type).code == 0
    result = kvad("doctor", path)
    assert result.code == 0 and [line.split()[1] for line in result.out.splitlines()] == CHECKS[1:]
    assert kernels(kvad, path) == engine_kernels(path) == "native"
    reason = "a cache of int8-channel"
    assert kernels(kvad, path, "--cache-key-dtype", "int8-channel") == reason
    path.write_bytes(path.read_bytes()[:-1000])
    assert kvad("doctor", path).code == 1


def test_adapters_that_requests_choose(kvad, native, hf, tmp_path):
    """An adapter of this base is described with the bytes of the plan; one of another base is a problem."""
    base = open_checkpoint(native)
    shapes = trainable_linears(base.config)
    names = [name for name in shapes if name.endswith((".q", ".v"))]
    factors = {n: LoraFactors(torch.ones(2, shapes[n][1]), torch.ones(shapes[n][0], 2), 1.0) for n in names}
    form = adapter_format(base, str(native), base_fingerprint(base))
    save_adapter(tmp_path / "lora", form, factors, rank=2, alpha=2, use_rslora=False, dropout=0.0)
    flag = f"sql={tmp_path / 'lora'}"
    result = kvad("doctor", native, "--adapter", flag)
    (line,) = (line for line in result.out.splitlines() if line.split()[1] == "adapter")
    stored = factor_bytes([factors], "float32", 0)
    assert result.code == 0 and f"sql: rank 2 on {len(names)} layers, {stored:,} bytes of factors" in line
    planned = json.loads(kvad("plan", native, "--adapter", flag, "--bandwidth", 20, "--json").out)["bytes"]["adapters"]
    assert f"at most {planned - stored:,} for a step of 2,048 tokens; on a CPU, steps with it run in" in line
    assert line.endswith("the native kernels") == (ops.native.load().library is not None)
    result = kvad("doctor", native, "--adapter", flag, "--cache-key-dtype", "int8-channel")
    assert ops.native.load().library is None or "it run in PyTorch: a cache of int8-channel" in result.out
    assert list(problems(kvad("doctor", hf, "--adapter", flag, "--json"))) == ["adapter"]
    for folder, value, message in ((native, tmp_path, "has no name"), (tmp_path / "sessions", flag, "a checkpoint")):
        (tmp_path / "sessions").mkdir(exist_ok=True)
        (tmp_path / "sessions" / "a.session").touch()
        result = kvad("doctor", folder, "--adapter", value)
        assert result.code == 2 and message in result.err


def test_run_folder_means_newest_checkpoint(kvad, tmp_path):
    model = build(model_config())
    save_step(tmp_path / "run", 3, model.config, model.state_dict(), None)
    result = kvad("doctor", tmp_path / "run")
    assert result.code == 0 and "none: prompts can only be token ids" in result.out


def test_weights_not_finite(kvad, native, hf):
    def edit(tensors):
        name = next(name for name in tensors if name.endswith(("attention.q.weight", "0.self_attn.q_proj.weight")))
        tensors[name][1, :3] = float("nan")
        tensors[name][2, 0] = float("inf")

    for folder in (native, hf):
        change(folder, edit)
        record = problems(kvad("doctor", folder, "--json"))
        assert "4 elements NaN or infinite" in record["finite"]
        assert set(record) == ({"finite", "sha256"} if folder == native else {"finite"})


def test_missing_extra_and_misshaped_tensors(kvad, native, hf):
    def edit(tensors):
        last = next(name for name in tensors if name.endswith("norm.weight"))
        table = next(name for name in tensors if name.startswith(("embedding.tokens", "model.embed_tokens")))
        del tensors[last]
        tensors["stranger"] = torch.zeros(3)
        tensors[table] = tensors[table][:-1].clone()

    for folder in (native, hf):
        change(folder, edit)
    result = kvad("doctor", native)
    assert result.code == 1
    for message in ("norm.weight [24] is missing", "stranger [3] is extra", "[256, 24], the config says [257, 24]"):
        assert f"{message}" in result.out and "problem tensors" in result.out
    assert "[299, 32] cannot be converted to" in problems(kvad("doctor", hf, "--json"))["tensors"]


def test_many_problems_are_counted(kvad, native):
    change(native, lambda tensors: [tensors.pop(name) for name in list(tensors)[:-1]])
    result = kvad("doctor", native)
    assert result.out.count("problem tensors") == 9 and " more like these" in result.out


def test_truncated_and_missing_files(kvad, native, hf):
    for folder in (native, hf):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        record = problems(kvad("doctor", folder, "--json"))
        assert "is truncated" in record["headers"] and not record.keys() - {"headers", "sha256"}
    (native / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in problems(kvad("doctor", native, "--json"))["sha256"]
    (native / "manifest.json").unlink()
    assert "manifest.json is missing" in problems(kvad("doctor", native, "--json"))["manifest"]


def test_changed_byte(kvad, native):
    path = native / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    assert "same size, other sha256" in problems(kvad("doctor", native, "--json"))["sha256"]


def test_edited_config(kvad, native):
    path = native / "config.json"
    path.write_text(path.read_text().replace('"max_seq_len": 96', '"max_seq_len": 80'))
    result = kvad("doctor", native)
    assert result.code == 1 and "config.json differs from its manifest" in result.out
    assert f"If you edited it: kvad doctor {native} --fix accepts the edit." in result.out
    assert kvad("generate", native, "a").code == 2
    fixed = kvad("doctor", native, "--fix")
    assert fixed.code == 0 and "config.json: the edit is accepted" in fixed.out
    assert kvad("doctor", native).code == 0 and kvad("generate", native, "a", "--max-tokens", 1).code == 0
    path.write_text(path.read_text().replace('"max_seq_len": 80', '"max_seq_lens": 80'))
    assert "unknown key max_seq_lens" in problems(kvad("doctor", native, "--json"))["config"]
    path.write_text("{")
    assert "is not JSON" in problems(kvad("doctor", native, "--json"))["config"]


def test_unknown_hf_config(kvad, hf):
    path = hf / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model_type": "gpt9", "auto_map": {"AutoConfig": "x.y"}}))
    record = problems(kvad("doctor", hf, "--json"))["config"]
    assert "model_type 'gpt9' is not known; code of the repository is never run" in record


def test_tokenizer_of_another_model(kvad, tmp_path, native, hf):
    big = train_tokenizer("bpe", [Path(__file__).read_text()], vocab_size=310)
    assert big.vocab_size > 300
    big.save(hf)
    assert "ids, the model" in problems(kvad("doctor", hf, "--json"))["tokenizer"]
    model = build(model_config())
    save_checkpoint(tmp_path / "wrong", model.config, model.state_dict(), big)
    assert (
        "310 ids, the vocabulary of the model 67" in problems(kvad("doctor", tmp_path / "wrong", "--json"))["tokenizer"]
    )
    (hf / "tokenizer.json").write_text("{}")
    assert "not readable by the tokenizers library" in problems(kvad("doctor", hf, "--json"))["tokenizer"]


def test_generation_tokens_outside_the_vocabulary(kvad, tmp_path):
    model = build(model_config())
    generation = GenerationConfig(decoder_start_token_id=3, eos_token_ids=(5, 67), suppress_tokens=(99,))
    save_checkpoint(tmp_path / "m", model.config, model.state_dict(), None, generation=generation)
    result = kvad("doctor", tmp_path / "m")
    assert result.code == 1
    assert "end 67 is outside the vocabulary of 67" in result.out and "banned 99 is outside" in result.out


def test_folder_without_checkpoint(kvad, tmp_path):
    for path, message in ((tmp_path / "absent", "no such folder"), (tmp_path, "is not a checkpoint")):
        result = kvad("doctor", path)
        assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0]
