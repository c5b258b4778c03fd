"""Run files: every key is applied or refused by name."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.hf_layout import choose_family, choose_layout
from kvad.config.layers import (
    EmbeddingConfig,
    GatedMLPConfig,
    LearnedPositionsConfig,
    NormConfig,
    PlainMLPConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
)
from kvad.config.model import canonical_config
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer
from kvad.train.config import presets
from kvad.train.config.optim import OptimConfig
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.config.run import (
    RESUMABLE_KEYS,
    DataConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
    config_differences,
)

ROOT = Path(__file__).parents[3]


def run(**tables):
    return RunConfig.from_dict(tables)


def read_recipe(name):
    return RunConfig.load(ROOT / "recipes" / f"{name}.toml")


def test_the_recipe_with_gpt2s_learned_positions():
    positions, layer = {"kind": "learned", "num_positions": 64}, "decoder.layer_types.L"
    table = read_recipe("shakespeare-char-cpu").to_dict()
    table["model"]["set"] = {"embedding.position": positions, f"{layer}.attention.position": None}
    model = RunConfig.from_dict(table).resolve(66)
    assert model.embedding.position == LearnedPositionsConfig(64)
    assert model.decoder.layer_config(0).attention.position is None


def test_an_empty_run_file_is_the_defaults():
    assert run() == RunConfig() and run().to_dict()["optim"]["lr"] == 1e-3
    assert RunConfig.from_dict(RunConfig().to_dict()) == RunConfig()
    assert TrainConfig().last_step == 1000 and TrainConfig(minutes=1).last_step is None


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_presets_with_overrides(name):
    plain = run(model={"preset": name}).resolve(300)
    assert (plain.vocab_size, plain.max_seq_len) == (300, 256)
    side = "encoder" if plain.decoder is None else "decoder"
    is_table = isinstance(plain.embedding.position, LearnedPositionsConfig)  # it has as many rows
    attention = f"{side}.layer_types.L.attention"
    table = {"preset": name, "max_seq_len": 128 if is_table else 1024, side: {"num_layers": 3}}
    table["set"] = {f"{attention}.num_heads": 24, f"{attention}.head_dim": 8}
    other = run(model=table, data={"seq_len": 128}).resolve(300)
    stack, before = (getattr(model, side) for model in (other, plain))
    assert (other.max_seq_len, stack.num_layers) == (table["max_seq_len"], 3)
    assert stack.layer_config(0).attention.num_heads == 24
    assert stack.layer_config(0).mlp == before.layer_config(0).mlp


@pytest.mark.parametrize(
    ("name", "vocab", "context", "count"),
    [("bert-base", 30_522, 512, 109_514_298), ("t5-small", 32_128, 512, 60_506_624)],
)
def test_numbers_of_parameters_of_bert_and_t5(name, vocab, context, count):
    """As transformers counts BertForMaskedLM and T5ForConditionalGeneration of google-bert/bert-base-uncased's and
    google-t5/t5-small's configs; and those classes hold them."""
    model = run(model={"preset": name}, data={"seq_len": context}).resolve(vocab)
    assert sum(math.prod(shape) for shape in weight_shapes(model).values()) == count
    reader = {"bert-base": "BertForMaskedLM", "t5-small": "T5ForConditionalGeneration"}[name]
    assert choose_family(model).hf_class == reader


# Sizes of the vocabulary and the context for which a preset's comment states its number of parameters.
COUNTED = {
    **dict.fromkeys(("tiny", "small", "medium", "base"), ((4096,), 256)),
    "demo": ((4096, 1024), 256),
    **dict.fromkeys(("transformer-tiny", "transformer-base", "transformer-big"), ((4096, 37_000), 256)),
    "shakespeare-char": ((66,), 64),
    "gpt2-124m": ((50_257,), 1024),
    "llama-small": ((32_000,), 256),
    "encoder-tiny": ((4096,), 256),
    "bert-base": ((30_522,), 512),
    "t5-tiny": ((4096,), 512),
    "t5-small": ((32_128,), 512),
}


def parameters(name, vocab, context):
    return sum(math.prod(shape) for shape in weight_shapes(MODEL_PRESETS[name](vocab, context)).values())


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_comments_of_presets_state_numbers_of_parameters(name):
    if name.startswith("marian"):
        return  # as the Transformer of the same size, but for a bias at the head
    vocabs, context = COUNTED[name]
    text = Path(presets.__file__).read_text("utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith(f'    "{name}": ') and " M" in line)
    stated = re.findall(r"(\d+\.(\d+)) M\b", line)
    assert [f"{parameters(name, vocab, context) / 1e6:.{len(digits)}f}" for vocab, (_, digits) in
            zip(vocabs, stated, strict=True)] == [number for number, _ in stated]  # fmt: skip


def test_presets_of_gpt2_and_llama():
    """As transformers counts GPT2LMHeadModel of openai-community/gpt2's config."""
    assert parameters("gpt2-124m", 50_257, 1024) == 124_439_808
    readers = {"gpt2-124m": "GPT2LMHeadModel", "llama-small": "LlamaForCausalLM"}
    for name, reader in readers.items():
        layout = choose_layout(MODEL_PRESETS[name](50_257, 1024), GenerationConfig())
        assert layout.hf_class == reader
    stated = choose_layout(MODEL_PRESETS["gpt2-124m"](50_257, 1024), GenerationConfig()).content
    assert (stated["n_layer"], stated["n_head"], stated["n_embd"], stated["n_positions"]) == (12, 12, 768, 1024)
    assert stated["activation_function"] == "gelu_new" and stated["tie_word_embeddings"]


def test_shakespeare_char_is_the_recipes_model():
    recipe = read_recipe("shakespeare-char-cpu")
    assert canonical_config(recipe.resolve(66)) == canonical_config(MODEL_PRESETS["shakespeare-char"](66, 64))


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("transformer-big", (6, 6, 1024, 16, 4096), 214_245_376),
        ("transformer-base", (6, 6, 512, 8, 2048), 63_082_496),
        ("transformer-tiny", (2, 2, 128, 4, 512), 5_661_696),
    ],
)
def test_the_original_transformer(name, shape, count):
    """Vaswani et al. 2017, table 3, "base": 65 million with a vocabulary of "about 37000"."""
    model = run(model={"preset": name}).resolve(37_000)
    decoder, encoder = model.decoder.layer_config(0), model.encoder.layer_config(0)
    layers, sizes = (model.encoder.num_layers, model.decoder.num_layers), (model.hidden_size,)
    assert (*layers, *sizes, decoder.attention.num_heads, decoder.mlp.intermediate_size) == shape
    assert model.encoder_input.vocab_size is None and model.tie_embeddings, "one table for source, target and output"
    for layer in (decoder, encoder):
        assert layer.norm == NormConfig("layer", eps=1e-6, bias=True)
        assert layer.mlp == PlainMLPConfig(shape[-1], "relu", bias=True)
    assert decoder.attention.causal and not decoder.cross_attention.causal
    assert not encoder.attention.causal and encoder.cross_attention is None
    for stack in (model.encoder, model.decoder):
        assert stack.norm_position == "post" and not stack.final_norm
    for embed in (model.embedding, model.encoder_input.embedding):
        positions = SinusoidalPositionsConfig(form="interleaved")
        assert embed == EmbeddingConfig(positions, scale=math.sqrt(model.hidden_size))
    assert (model.max_seq_len, model.encoder_input.max_seq_len) == (256, 256)
    width, layers, hidden = model.hidden_size, model.decoder.num_layers, decoder.mlp.intermediate_size
    attention, mlp, norm = 4 * (width + 1) * width, (2 * width + 1) * hidden + width, 2 * width
    assert 37_000 * width + layers * (3 * attention + 2 * mlp + 5 * norm) == count
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Transformer(model).parameters()) == count


def test_the_multi30k_recipe_is_within_the_published_size():
    config = read_recipe("multi30k-de-en-cpu")
    model = config.resolve(config.tokenizer.vocab_size)
    assert (model.kind, model.hidden_size) == ("encoder-decoder", 256)
    assert model.encoder.num_layers == model.decoder.num_layers == 3
    assert model.embedding.scale == model.encoder_input.embedding.scale == math.sqrt(model.hidden_size)
    assert (config.data.seq_len, config.optim.beta2, config.objective.label_smoothing) == (128, 0.98, 0.1)
    assert sum(parameter.numel() for parameter in Transformer(model).parameters()) == 7_066_624


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    config = RunConfig.load(path)
    if config.objective.kind != "summarizer":
        assert config.resolve(300).hidden_size >= 32


def test_a_sources_limit_follows_the_context():
    table = {"preset": "transformer-tiny", "set": {"encoder_input.max_seq_len": 64}}
    with pytest.raises(ConfigError, match=r"model.encoder_input.max_seq_len: must be at least 256, data.seq_len, got"):
        run(model=table).resolve(300)
    assert run(model=table, data={"seq_len": 32}).resolve(300).encoder_input.max_seq_len == 64


def test_a_part_of_another_kind_replaces_the_presets_part():
    table = {"preset": "tiny", "decoder": {"layer_types": {"L": {"mlp": {"kind": "plain", "intermediate_size": 64}}}}}
    assert run(model=table).resolve(300).decoder.layer_config(0).mlp == PlainMLPConfig(64)
    kept = {"preset": "tiny", "decoder": {"layer_types": {"L": {"mlp": {"intermediate_size": 64}}}}}
    assert run(model=kept).resolve(300).decoder.layer_config(0).mlp == GatedMLPConfig(64)


def test_the_shakespeare_recipe_is_the_published_one():
    config = read_recipe("shakespeare-char-cpu")
    model, train = config.resolve(66), config.train
    layer = model.decoder.layer_config(3)
    sizes = (model.decoder.num_layers, layer.attention.num_heads, model.hidden_size)
    assert sizes == (4, 4, 128) and layer.mlp == PlainMLPConfig(512, "gelu")
    assert model.embedding.position is None and isinstance(layer.attention.position, RopeConfig), "not nanoGPT's"
    assert layer.norm.kind == "layer" and not layer.norm.bias and not layer.attention.qkv_bias and model.tie_embeddings
    assert (config.data.seq_len, train.batch_size, train.gradient_accumulation_steps, train.steps) == (64, 12, 1, 2000)
    optim = config.optim
    assert (optim.lr, optim.min_lr, optim.warmup_steps) == (1e-3, 1e-4, 100)
    assert (optim.beta1, optim.beta2, optim.weight_decay, optim.max_grad_norm) == (0.9, 0.99, 0.1, 1.0)
    assert train.eval_tokens == 0, "evaluated on the whole validation split"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"trian": {}}, r"unknown table \[trian\] \(did you mean 'train'"),
        ({"train": 3}, r"train: must be a table"),
        ({"train": {"stepz": 3}}, r"unknown key train.stepz \(did you mean 'steps'"),
        ({"data": {"contxt": 3}}, r"unknown key data.contxt \(known: document_unit"),
        ({"tokenizer": {"kind": "bep"}}, r"tokenizer.kind: must be one of"),
        ({"optim": {"lr": "fast"}}, r"optim.lr: must be float"),
        ({"optim": {"lr": 0}}, r"optim.lr: must be above 0, got 0"),
        ({"train": {"steps": 0}}, r"train.steps: must be at least 1, got 0"),
        ({"train": {"batch_size": 0}}, r"train.batch_size: must be at least 1"),
        ({"optim": {"min_lr": 1.0}}, r"optim.min_lr: must be at most lr 0.001"),
        ({"optim": {"beta2": 1.0}}, r"optim.beta2: must be in \[0, 1\)"),
        ({"train": {"precision": "fp16"}}, r"fp16 must not be used on a CPU"),
        ({"data": {"seq_len": 0}}, r"data.seq_len: must be at least 1"),
        ({"data": {"validation_fraction": 1.0}}, r"data.validation_fraction: must be between 0 and 1"),
    ],
)
def test_invalid_values_are_named(tables, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(tables)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"preset": "tinny"}, r"model.preset: unknown preset 'tinny' \(did you mean 'tiny'"),
        ({"wdith": 3}, r"unknown key wdith \(known: decoder"),
        ({"set": {"decoder.layrs": 3}}, r"unknown key decoder.layrs"),
        ({"set": {"decodr.layers": 3}}, r"unknown key 'decodr' \(did you mean 'decoder'"),
        ({"max_seq_len": 64}, r"model.max_seq_len: must be at least 256, data.seq_len, got 64"),
        ({"vocab_size": 64}, r"model.vocab_size: must be at least 300, the tokenizer's vocabulary, got 64"),
    ],
)
def test_invalid_model_tables_are_named(model, message):
    with pytest.raises(ConfigError, match=message):
        run(model=model).resolve(300)


def test_unreadable_run_files_are_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("[train\n")
    for name, message in {"no.toml": "no such file", "bad.toml": r"bad.toml is not TOML"}.items():
        with pytest.raises(ConfigError, match=message):
            RunConfig.load(tmp_path / name)


def test_assignments_are_json_or_text():
    pairs = {"a": "4", "b": "1e-3", "c": "true", "d": "null", "e": "post", "f": '{"kind": "alibi"}'}
    values = {"a": 4, "b": 1e-3, "c": True, "d": None, "e": "post", "f": {"kind": "alibi"}}
    assert apply_overrides({}, pairs.items()) == {"model": {"set": values}}


def test_keys_without_a_table_belong_to_the_model():
    there = {"optim": {"lr": 1.0, "max_grad_norm": 2.0}, "model": {"set": {"hidden_size": 8}}}
    pairs = [("optim.lr", "3e-4"), ("data.seq_len", "64"), ("decoder.num_layers", "4"), ("model.hidden_size", "16")]
    made = apply_overrides(there, [*pairs, ("model.preset", "tiny")])
    assert made["optim"] == {"lr": 3e-4, "max_grad_norm": 2.0} and made["data"] == {"seq_len": 64}
    assert made["model"] == {"set": {"hidden_size": 16, "decoder.num_layers": 4}, "preset": "tiny"}
    assert there["model"] == {"set": {"hidden_size": 8}} and there["optim"]["lr"] == 1.0, "the input is unchanged"
    for key, meant in (("trian.steps", "train"), ("optm.lr", "optim"), ("decodr.layers", "decoder")):
        with pytest.raises(ConfigError, match=rf"unknown key '{key}': .* \(did you mean '{meant}'"):
            apply_overrides({}, [(key, "3")])
    with pytest.raises(ConfigError, match=r"unknown key optim.lrr \(did you mean 'lr'"):
        RunConfig.from_dict(apply_overrides({}, [("optim.lrr", "1")]))


def test_differences_ignore_keys_without_effect_on_numbers():
    there = RunConfig(optim=OptimConfig(lr=1e-3)).to_dict()
    train = TrainConfig(eval_interval=7, save_interval=9)
    here = RunConfig(optim=OptimConfig(lr=2e-3), train=train, data=DataConfig(seq_len=8)).to_dict()
    assert config_differences(there, here) == ["data.seq_len: 256 there, 8 here", "optim.lr: 0.001 there, 0.002 here"]


OTHERS = {  # other values of keys that are neither switches nor numbers
    "data.order": "windows", "data.packing": "split", "data.document_unit": "lines", "data.encoding_errors": "replace",
    "data.format": "text", "data.file_suffixes": [".txt"], "data.text_field": "body", "data.source_field": "a",
    "data.target_field": "b", "data.sources": [{"paths": ["x"], "weight": 1.0}], "data.validation_fraction": 0.2,
    "tokenizer.kind": "char", "tokenizer.path": "words", "tokenizer.special_tokens": ["<a>"],
    "objective.kind": "masked-lm", "objective.label_smoothing": 0.2, "objective.noise_density": 0.3,
    "objective.scheduled_sampling": 0.2, "objective.scheduled_sampling_schedule": "sigmoid",
    "objective.scheduled_sampling_steps": 7, "objective.chat_template": "chat.jinja",
    "objective.text_field": "a", "objective.label_field": "b", "objective.input_mask_ratio": 0.2,
    "optim.name": "muon", "optim.schedule": "linear", "optim.decay_form": "linear",
    "train.precision": "bf16", "train.device": "cuda", "summarizer.model": "other",
    "lora.target_modules": "all", "lora.dropout": 0.2,
}  # fmt: skip


def leaves(table, where=""):
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def changed(content, key):
    copy = json.loads(json.dumps(content))
    *way, last = key.split(".")
    table = copy
    for name in way:
        table = table[name]
    value = table[last]
    usual = not value if isinstance(value, bool) else (value or 0) + 1 if not isinstance(value, str | list) else "x"
    table[last] = OTHERS.get(key, usual)
    return copy


def test_differences_name_every_key():
    """Only RESUMABLE_KEYS may change on resume."""
    content = RunConfig.from_dict({"model": {"init": "base"}, "lora": {}, "data": {}}).to_dict()
    keys = [key for key, _ in leaves(content) if not key.startswith("model.")]
    tables = {"data", "tokenizer", "objective", "optim", "train", "callbacks", "summarizer", "lora"}
    assert {key.partition(".")[0] for key in keys} == tables and len(keys) > 60
    for key in keys:
        found = config_differences(content, changed(content, key))
        assert ([line.partition(":")[0] for line in found] == [key]) != (key in RESUMABLE_KEYS), (key, found)
    without = {name: table for name, table in content.items() if name != "lora"}
    assert config_differences(without, content)[0].startswith("lora: None there")
