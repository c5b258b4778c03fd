"""GGUF files: the export is read by transformers' own reader, and what kvad reads equals the model it was made from."""

import json
import random
import warnings

import numpy as np
import pytest
import torch

from kvad.checkpoint import gguf as gguf_lib
from kvad.checkpoint import open_checkpoint
from kvad.checkpoint.export import export_hf
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import save_checkpoint
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, RopeConfig, ShortConvConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.errors import CheckpointError, KvadError
from kvad.llm import LLM
from kvad.text.hf_tokenizer import train_bpe
from tests.support.random_models import build

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
load_gguf_checkpoint = pytest.importorskip("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint

TEXT = "def hello(name='x'):\n    return 12345 + 6, \"Grüße, 世界!\"\t\r\n\n  It's I'LL we've   \n"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
HEADS = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 96, "rope_theta": 5000.0}
GEMMA = {**HEADS, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CLASSES = {
    "llama": ("Llama", {**HEADS, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
    "llama with llama3 scaling": (
        "Llama", {**HEADS, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 24}}
    ),
    "llama with linear scaling": ("Llama", {**HEADS, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama with biases": ("Llama", {**HEADS, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": ("Qwen2", HEADS),
    "qwen3": ("Qwen3", {**HEADS, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_theta": 1e6}),
    "stablelm": ("StableLm", {**HEADS, "partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {**HEADS, "use_bias": True, "sliding_window": None}),
    "phi3": ("Phi3", {**HEADS, "sliding_window": None, "pad_token_id": 0}),
    "qwen3moe": (
        "Qwen3Moe",
        {
            **HEADS, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "nemotron": ("Nemotron", {**HEADS, "partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "vocab_size": 320}),
}  # fmt: skip
HF_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3": "Gemma3ForCausalLM"}
HF_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def make(name, folder):
    """Write a model of transformers with every parameter randomised, and return it."""
    kind, options = CLASSES[name]
    config = getattr(transformers, HF_CONFIGS.get(kind, f"{kind}Config"))(**options)
    torch.manual_seed(0)
    model = getattr(transformers, HF_CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", CLASSES)
def test_an_exported_file_is_the_same_model_for_transformers_and_for_kvad(tmp_path, name):
    original = make(name, tmp_path / "hf")
    file = tmp_path / "out" / "model.gguf"
    architecture = gguf_lib.export_gguf(open_checkpoint(tmp_path / "hf"), file, "float32")
    assert architecture == name.split()[0]
    tokens = [random.Random(1).randrange(320) for _ in range(40)]
    expected = logits(original, tokens)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=original)["tensors"]
    stored = original.state_dict()
    assert theirs.keys() <= stored.keys() and len(theirs) >= len(stored) - 1  # a tied head is not stored
    for key, tensor in theirs.items():
        assert (tensor - stored[key]).abs().max() < 1e-6, key  # the weights of a norm are stored plus one
    handle = open_checkpoint(file)
    with LLM.load(handle, max_num_seqs=1, max_seq_len=96) as llm:
        ours = llm.logits(tokens)
    assert (ours - expected).abs().max() < 2e-4 * max(1.0, expected.abs().max())
    assert dict(handle.weights()).keys() == dict(open_checkpoint(tmp_path / "hf").weights()).keys()


def write(path, values, tensors=(), architecture="llama"):
    """Write a GGUF file with these keys and tensors (name, array, type or None)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in values.items():
        gguf_lib.writer._add(writer, name, value)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTIZED = [
    kind
    for kind, traits in gguf.quants._type_traits.items()
    if traits.__dict__.get("dequantize_blocks") and kind.name not in ("F16", "F32")
]


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_a_tensor_of_every_quantization_is_what_the_package_dequantizes(tmp_path, kind):
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random, values = np.random.default_rng(0), np.array(np.nan)
    while not np.isfinite(values).all():  # a random scale may be infinite
        blocks = random.integers(0, 256, (3, 2 * num_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(blocks, kind)
    path = write(tmp_path / "m.gguf", {}, [("blk.0.ffn_up.weight", blocks, kind)])
    tensor = gguf_lib.reader.RawTensors(path, gguf.GGUFReader(path))["blk.0.ffn_up.weight"]
    assert tuple(tensor.shape) == (3, 2 * size)
    np.testing.assert_array_equal(tensor.float().numpy(), values)


def test_q8_0_and_bfloat16_are_stored_as_asked_and_vectors_in_float32(tmp_path):
    make("qwen3", tmp_path / "hf")
    original = dict(open_checkpoint(tmp_path / "hf").weights())
    for stored, bound in (("bfloat16", 2**-8), ("q8_0", 0.6 / 127)):
        file = tmp_path / f"{stored}.gguf"
        gguf_lib.export_gguf(open_checkpoint(tmp_path / "hf"), file, stored)
        handle = open_checkpoint(file)
        for name, tensor in handle.weights():
            scale = original[name].abs().amax()
            assert (tensor.float() - original[name]).abs().max() <= (bound if tensor.dim() > 1 else 0) * scale, name
        assert handle.stored_dtype == torch.bfloat16
        model, _ = load_model(file)
        assert model.embedding.tokens.weight.dtype == torch.bfloat16


def bpe_model(folder, split=None, limit=96):
    """Write a model with a byte-level BPE tokenizer, split like ``split`` of tokenizer.json."""
    tokenizer = train_bpe([TEXT * 20, json.dumps(CLASSES)], vocab_size=400)
    decoder = StackConfig(1, {"L": LayerConfig(AttentionConfig(4, 2, position=RopeConfig()), GatedMLPConfig(40))})
    config = ModelConfig(hidden_size=32, vocab_size=tokenizer.vocab_size + 5, max_seq_len=limit, decoder=decoder)
    save_checkpoint(folder, config, build(config).float().state_dict(), tokenizer)
    if split is not None:
        (folder / "manifest.json").unlink()
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split}))
    return folder


@pytest.mark.parametrize("name", gguf_lib.tokenizer._SPLITS)
def test_a_tokenizer_and_a_chat_template_survive_the_way_out_and_back(tmp_path, name):
    from kvad.text import load_tokenizer

    folder = bpe_model(tmp_path / "m", gguf_lib.tokenizer._SPLITS[name])
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load_tokenizer(folder)
    values = gguf_lib.tokenizer.metadata(tokenizer, folder, GenerationConfig(), 405)
    path = write(tmp_path / "m.gguf", values)
    handle = gguf_lib.GGUFCheckpoint(path)
    read = handle.tokenizer
    assert read.encode(TEXT) == tokenizer.encode(TEXT) and read.decode(read.encode(TEXT)) == TEXT
    assert values["tokenizer.ggml.pre"] == name and read.vocab_size == tokenizer.vocab_size
    assert read.special_tokens.eos == tokenizer.special_tokens.end_ids[0]
    assert "messages" in (handle.tokenizer_folder / "tokenizer_config.json").read_text()


def test_a_sentencepiece_tokenizer_encodes_like_the_library(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("the cat sat on the mat and the hat\nwhere are you going, said the cat\n" * 30)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), vocab_size=330, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    pieces = range(library.get_piece_size())
    kinds = ((library.is_unknown, 2), (library.is_control, 3), (library.is_byte, 6))
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in pieces],
        "tokenizer.ggml.scores": [float(library.get_score(i)) for i in pieces],
        "tokenizer.ggml.token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = gguf_lib.GGUFCheckpoint(write(tmp_path / "m.gguf", values)).tokenizer
    assert tokenizer.add_special_tokens([7]) == [1, 7]
    for text in ("the cat where", "  two  spaces ", "Grüße 世界 cat", "hat\nmat\n\n", "a"):
        assert tokenizer.encode(text) == library.encode(text), text
        assert tokenizer.decode(library.encode(text)) == text


def test_the_commands_read_and_write_a_file(tmp_path, capsys):
    from tests.support.cli_checkpoints import run

    folder, file = bpe_model(tmp_path / "m"), tmp_path / "m.gguf"
    written = run(capsys, "export", folder, file, "--to", "gguf", "--save-dtype", "float32")
    assert written.code == 0 and "read by: llama.cpp, as llama" in written.out, written
    greedy = ("def hello", "--max-tokens", 8, "--temperature", 0)
    expected = run(capsys, "generate", folder, *greedy)
    assert run(capsys, "generate", file, *greedy).out == expected.out and expected.code == 0
    shown = run(capsys, "inspect", file)
    assert shown.code == 0 and "problem" not in shown.out and "quantized" not in shown.out, shown
    refused = run(capsys, "inspect", file, "--check")
    assert refused.code == 2 and "a GGUF file has no manifest" in refused.err
    assert run(capsys, "plan", file).code == 0 and run(capsys, "tokenize", file, "def hello").code == 0
    assert run(capsys, "verify", file, "--max-tokens", 4, "--num-prompts", 2, "--layout", "paged").code == 0
    assert run(capsys, "import", file, tmp_path / "back").code == 0
    assert run(capsys, "generate", tmp_path / "back", *greedy).out == expected.out
    refused = run(capsys, "export", folder, file, "--to", "gguf")
    assert refused.code == 2 and "--overwrite replaces it" in refused.err
    refused = run(capsys, "export", folder, file, "--to", "gguf", "--save-dtype", "float16", "--overwrite")
    assert refused.code == 2 and "must be one of float32, bfloat16, q8_0" in refused.err
    assert run(capsys, "export", folder, tmp_path / "x", "--save-dtype", "q8_0").code == 2


def test_inspect_names_the_quantization_of_a_mixture_of_experts(tmp_path, capsys):
    from tests.file_parity.cases import write_case
    from tests.support.cli_checkpoints import run

    for case in ("mixtral", "gpt-oss"):
        file = tmp_path / f"{case}.gguf"
        gguf_lib.export_gguf(open_checkpoint(write_case(case, tmp_path / case)), file, "q8_0")
        shown = run(capsys, "inspect", file)
        assert shown.code == 0 and "problem" not in shown.out and "quantized: GGUF, Q8_0" in shown.out, shown
        original = dict(open_checkpoint(tmp_path / case).weights())
        for name, tensor in open_checkpoint(file).weights():
            assert (tensor - original[name]).abs().max() <= 0.6 / 127 * original[name].abs().max(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("blk.0.ffn_up_exps.weight"), "experts.0.w3.weight is missing"),
        (lambda parts: parts.update({"blk.0.ffn_up_exps.weight": np.zeros((5, 96, 32), np.float32)}), "Config and"),
        (lambda parts: parts.update({"blk.0.ffn_up_exps.weight": np.zeros((4, 96, 64), np.float32)}), "has 4 experts"),
        (lambda parts: parts.update({"blk.0.ffn_up_exps.weight": np.zeros((6, 96, 64), np.float32)}), "has 6 experts"),
        (lambda parts: parts.update({"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}), "Config and"),
        (lambda parts: parts.update({"blk.0.ffn_gate.0.weight": np.zeros((96, 64), np.float32)}), "is extra"),
    ],
)
def test_damaged_experts_are_refused(tmp_path, change, message):
    from tests.file_parity.cases import write_case

    handle, file = open_checkpoint(write_case("mixtral", tmp_path / "hf")), tmp_path / "m.gguf"
    layout, architecture, values = gguf_lib.writer._choose(handle)
    parts = {name: tensor.numpy() for name, tensor in gguf_lib.writer._tensors(handle, layout, architecture)}
    change(parts)
    write(file, values, [(name, np.ascontiguousarray(array), None) for name, array in parts.items()])
    with pytest.raises(CheckpointError, match=message):
        dict(open_checkpoint(file).weights())


@pytest.mark.parametrize(
    ("case", "difference"), [("starcoder2", "window is 8"), ("phi3", "window is 8"), ("smollm3", "attention.position")]
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(tmp_path, case, difference):
    from tests.support.lab_models import write_foreign

    with pytest.raises(CheckpointError, match=f"GGUF's {case} cannot express this model: .*{difference}"):
        gguf_lib.export_gguf(open_checkpoint(write_foreign(tmp_path / "m", case)), tmp_path / "m.gguf")


def test_a_hugging_face_folder_made_of_a_file_has_the_dtype_of_the_file(tmp_path):
    make("qwen3", tmp_path / "hf")
    gguf_lib.export_gguf(open_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", "q8_0")
    export_hf(open_checkpoint(tmp_path / "m.gguf"), tmp_path / "out")
    assert {tensor.dtype for _, tensor in open_checkpoint(tmp_path / "out").weights()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_damage_is_refused_or_harmless(tmp_path):
    folder, file = bpe_model(tmp_path / "m"), tmp_path / "m.gguf"
    gguf_lib.export_gguf(open_checkpoint(folder), file, "q8_0")
    good, generator = file.read_bytes(), random.Random(5)
    header = len(good) - sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
    refused = 0
    for i in range(60):
        data, at = bytearray(good), generator.randrange(header)
        if i % 3 == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif i % 3 == 1:
            del data[at:]
        else:
            data[at : at + 40] = bytes(40)
        file.write_bytes(data)
        try:
            handle = open_checkpoint(file)
            dict(handle.weights()), handle.tokenizer
        except KvadError:
            refused += 1
    assert refused >= 30


def test_damage_is_named(tmp_path):
    """A wrong start, an offset of a tensor beyond 64 bits, and a quantization block of NaN."""
    file, name = tmp_path / "m.gguf", b"blk.0.attn_q.weight"
    gguf_lib.export_gguf(open_checkpoint(bpe_model(tmp_path / "m")), file, "q8_0")
    good = file.read_bytes()
    offset = good.index(name) + len(name) + 24  # behind the number of dimensions, two of them and the type
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == name.decode())
    changes = [
        (0, b"XXXX", r"it starts with b'XXXX'"),
        (offset, b"\xff" * 8, "its header or tensors are invalid"),
        (tensor.data_offset, b"\xff\x7f", r"blk\.0\.attn_q\.weight \(Q8_0\) has a block of NaN or infinite values"),
    ]
    for at, wrong, message in changes:
        file.write_bytes(good[:at] + wrong + good[at + len(wrong) :])
        with warnings.catch_warnings(action="error"), pytest.raises(CheckpointError, match=message):
            dict(open_checkpoint(file).weights())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "general.architecture 'mamba' is not read"),
        ("llama.expert_count", 4, "llama.expert_used_count is missing"),
        ("llama.expert_shared_count", 1, "llama.expert_shared_count 1 is not supported"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count must be the head's width 8, got 4"),
        ("llama.rope.scaling.type", "su", "rope.scaling.type 'su' is not supported"),
        ("tokenizer.ggml.pre", "viking", "tokenizer.ggml.pre 'viking' is not read"),
        ("tokenizer.ggml.model", "t5", "tokenizer.ggml.model 't5' is not read"),
        ("split.count", 3, "is one of 3 parts"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(tmp_path, key, value, message):
    folder = bpe_model(tmp_path / "m")
    handle, path = open_checkpoint(folder), tmp_path / "m.gguf"
    _, _, values = gguf_lib.writer._choose(handle)
    values |= gguf_lib.tokenizer.metadata(handle.tokenizer, folder, handle.generation, handle.config.vocab_size)
    table = np.zeros((handle.config.vocab_size, 32), np.float32)
    name = value if key == "general.architecture" else "llama"
    values |= {} if key == "general.architecture" else {key: value}
    read = gguf_lib.GGUFCheckpoint(write(path, values, [("token_embd.weight", table, None)], name))
    with pytest.raises(KvadError, match=message):
        _ = read.config, read.tokenizer


@pytest.mark.parametrize("mixer", [AttentionConfig(4, 2, window=16), ShortConvConfig()])
def test_a_model_that_gguf_cannot_express_is_refused(tmp_path, mixer):
    folder = tmp_path / "m"
    config = ModelConfig(
        hidden_size=32, vocab_size=300, max_seq_len=96,
        decoder=StackConfig(1, {"L": LayerConfig(mixer, GatedMLPConfig(40))}),
    )  # fmt: skip
    save_checkpoint(folder, config, build(config).float().state_dict(), None)
    with pytest.raises(CheckpointError, match="no architecture of GGUF can hold this model"):
        gguf_lib.export_gguf(open_checkpoint(folder), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
