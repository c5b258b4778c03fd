"""Training from a checkpoint: all weights or adapters, bit-exact resume, refusals."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from kvad.checkpoint.adapter import merge_adapter, open_adapter
from kvad.checkpoint.export import write_merged
from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.loader import load_model, load_weights, open_checkpoint
from kvad.checkpoint.native import open_folder, save_checkpoint
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError, StorageError, UsageError
from kvad.llm import LLM
from kvad.model.lora import adapter_factors
from kvad.model.no_cache import NoCache
from kvad.model_input import ModelInput, SubBatch
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import LoraConfig, RunConfig, TokenizerConfig
from kvad.train.loop.run import read_run_config, resume_model, train_model
from kvad.train.setup.initialize import load_initial
from kvad.train.setup.memory_estimate import MemoryEstimate
from kvad.train.sources.pairs import PairCorpus, PairPaths
from tests.support.training_runs import StopAt, assert_resume_is_exact, tiny_config

TOKENS = [5, 9, 40, 100, 7, 7, 61, 30]


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    """A briefly trained byte model in Hugging Face's layout."""
    return train_model(tiny_config(steps=6, lr=1e-2), [corpus], tmp_path_factory.mktemp("base") / "run").checkpoint


@pytest.fixture
def continued_config(base):
    """``continued_config(LoraConfig(), steps=...)``: a run that starts from ``base``."""

    def make(lora=None, init=base, **settings):
        settings = {"lr": 1e-2, "steps": 4, "log_interval": 1, "eval_interval": 100, "save_interval": 100, **settings}
        return replace(tiny_config(init=init, **settings), lora=lora)

    return make


def model_input():
    positions, length = torch.arange(len(TOKENS)), len(TOKENS)
    limits = torch.full((length,), length)
    return ModelInput(torch.tensor(TOKENS), positions, (SubBatch(1, length, length),), positions, seq_lens=limits)


def logits(model):
    step = model_input()
    return model.logits(model(step, NoCache(model.config)), step.logit_indices)


def test_all_weights_continue_from_the_checkpoint(corpus, tmp_path, continued_config, base, listener):
    outcome = train_model(continued_config(eval_interval=2), [corpus], tmp_path / "run", callbacks=[listener])
    began = load_model(base)[0]
    first, last = listener.evals[0], listener.evals[-1]
    assert last.val_loss < first.val_loss < 5.0, "it did not start from the base"  # at random: ln 257 = 5.5
    tuned, opened = load_model(tmp_path / "run", verify=True)
    assert opened.config == began.config and opened.origin == open_checkpoint(base).origin
    assert all(not torch.equal(a, b) for a, b in zip(tuned.parameters(), began.parameters(), strict=True))
    expected = opened.training.state["initial_model"]
    assert expected["model"] == str(base) and len(expected["fingerprint"]) == 32
    assert read_run_config(tmp_path / "run")[0].init == str(base) and outcome.step == 4


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, target_modules="all", dropout=0.1)], ids=["whole", "lora"])
def test_resume_is_exact(corpus, tmp_path, continued_config, lora):
    config = continued_config(lora, steps=6, batch_size=2, gradient_accumulation_steps=2)
    assert_resume_is_exact(config, [corpus], tmp_path, stops=[2, 5])


def test_all_weights_resume_without_the_base(corpus, tmp_path, continued_config, base):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    train_model(continued_config(init=copy), [corpus], tmp_path / "run", callbacks=[StopAt(2)])
    shutil.rmtree(copy)
    assert resume_model(tmp_path / "run").reason == "done"


def test_every_file_of_the_base_but_the_weights_is_kept(corpus, tmp_path, continued_config, base):
    train_model(continued_config(steps=1), [corpus], tmp_path / "run")
    there = list_steps(tmp_path / "run")[-1]
    names = {path.name for path in base.iterdir()} - {"manifest.json", "model.safetensors", "training"}
    assert {"config.json", "tokenizer.json"} <= names
    for name in names:
        assert (there / name).read_bytes() == (base / name).read_bytes() or name == "config.json", name
    assert json.loads((there / "config.json").read_text()) == json.loads((base / "config.json").read_text())


def test_weights_in_bfloat16_are_trained_in_float32(corpus, tmp_path, continued_config, base):
    narrow = tmp_path / "narrow"
    opened = open_checkpoint(base)
    tensors = {name: tensor.bfloat16() for name, tensor in opened.weights()}
    save_checkpoint(narrow, opened.config, tensors, opened.tokenizer)
    train_model(continued_config(init=narrow, steps=1, lr=1e-6, min_lr=0.0, warmup_steps=0), [corpus], tmp_path / "run")
    model, tuned = load_model(tmp_path / "run")
    assert tuned.stored_dtype == torch.float32 and "kvad" in json.loads((tuned.path / "config.json").read_text())
    moved = model.decoder.layers[0].attention.q.weight - tensors["decoder.layers.0.attention.q.weight"].float()
    assert 0 < moved.abs().max() < 1e-4, "a step of 1e-6 is lost in bfloat16"


# ---------------------------------------------------------------- adapters


def test_only_adapters_are_trained_and_start_as_no_change(corpus, continued_config, base):
    start = load_initial(continued_config(LoraConfig(rank=3, target_modules=("q", "mlp"))))
    model, before = start.build(), load_model(base)[0]
    assert torch.equal(logits(model), logits(before))
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    parts = [f"decoder.layers.{i}.{part}" for i in (0, 1) for part in ("attention.q", "mlp.gate", "mlp.up", "mlp.down")]
    assert learned == {f"{part}.lora_{x}" for part in parts for x in "ab"} and start.adapted_modules == parts
    logits(model).square().sum().backward()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads == learned
    assert start.parameters[1] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert start.parameters[0] == sum(p.numel() for p in model.parameters())


def test_merged_output_equals_unmerged_output(corpus, tmp_path, continued_config, base, listener):
    config = continued_config(LoraConfig(rank=4, alpha=6.0, target_modules="all"), lr=2e-2, eval_interval=2)
    train_model(config, [corpus], tmp_path / "run", callbacks=[listener])
    assert listener.evals[-1].val_loss < listener.evals[0].val_loss
    adapted = replace(load_initial(config), run=tmp_path / "run").build().double().eval()
    run = open_checkpoint(tmp_path / "run")
    merged = load_weights(run, "float64")
    here = logits(merged)
    assert (logits(adapted) - here).abs().max() < 1e-12
    assert (logits(load_model(base, "float64")[0]) - here).abs().max() > 0.01
    packed = load_weights(run, "float64")
    packed.fuse_projections()
    assert (logits(packed) - here).abs().max() < 1e-12
    adapted.fuse_projections()  # fused weights do not contain the adapters
    assert (logits(adapted) - here).abs().max() < 1e-12
    # A tied head stays tied to the base's table.
    table = load_model(base, "float64")[0].token_embedding
    assert merged.head.weight is None and torch.equal(merged.token_embedding, table)
    out = tmp_path / "merged"
    write_merged(run, out)
    narrow = logits(load_model(out, "float64")[0])
    assert (narrow - here).abs().max() < 1e-5  # rounded once, to the base's float32
    assert open_checkpoint(out).origin == open_checkpoint(base).origin


@pytest.fixture(scope="module")
def adapter(corpus, base, tmp_path_factory):
    """A run of adapters on ``base``."""
    config = replace(tiny_config(init=base, steps=4, lr=2e-2), lora=LoraConfig(target_modules="all"))
    out = tmp_path_factory.mktemp("adapter") / "run"
    train_model(config, [corpus], out)
    return out


def test_run_and_base_with_adapter_load_as_models(adapter, base):
    with (
        LLM.load(adapter, max_num_seqs=1) as run,
        LLM.load(base, max_num_seqs=1, adapter=adapter) as adapted,
        LLM.load(base, max_num_seqs=1) as plain,
    ):
        expected = [each.generate("1 is", max_tokens=8, temperature=0).tokens for each in (run, adapted, plain)]
        assert expected[0] == expected[1] and not torch.equal(run.logits("1 is"), plain.logits("1 is"))
        names = [each.engine.cache_fingerprint("") for each in (run, adapted, plain)]
    assert names[0].digest() == names[1].digest() != names[2].digest()
    assert [line.split(":")[0] for line in names[0].differences(names[2].parts)] == ["adapter", "model"]


def test_a_session_of_another_adapter_is_refused(corpus, tmp_path, continued_config, base, adapter):
    train_model(continued_config(LoraConfig(), steps=2), [corpus], tmp_path / "other")
    with LLM.load(base, max_num_seqs=1, adapter=adapter) as llm:
        session = llm.session("notes", folder=tmp_path / "sessions")
        session.append("1 is less")
        session.save()
    for other in ({"adapter": tmp_path / "other"}, {}):
        with LLM.load(base, max_num_seqs=1, **other) as llm, pytest.raises(StorageError, match="adapter"):
            llm.session("notes", folder=tmp_path / "sessions")


def test_missing_or_changed_base_is_refused(corpus, tmp_path, continued_config, base, run_config):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    train_model(continued_config(LoraConfig(), init=copy, steps=4), [corpus], tmp_path / "run", callbacks=[StopAt(2)])
    other = train_model(run_config(steps=2), [corpus], tmp_path / "other").checkpoint
    with pytest.raises(CheckpointError, match="trained on another model than"):
        load_weights(merge_adapter(open_checkpoint(other), tmp_path / "run"))
    shutil.rmtree(copy)
    with pytest.raises(CheckpointError, match="its base cannot be opened: no such folder"):
        open_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"cannot resume.*cannot be opened"):
        resume_model(tmp_path / "run")
    shutil.copytree(other, copy)
    with pytest.raises(CheckpointError, match="trained on another model than"):
        LLM.load(tmp_path / "run", max_num_seqs=1)
    with pytest.raises(CheckpointError, match="is not the model that the run started from"):
        resume_model(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is already an adapter"):
        merge_adapter(merge_adapter(open_checkpoint(base), tmp_path / "run"), tmp_path / "run")
    with pytest.raises(CheckpointError, match="is not an adapter: it is a complete model"):
        open_adapter(base)


def test_adapters_need_less_memory_than_all_weights(corpus, tmp_path, continued_config):
    config = continued_config(batch_size=1)
    start = load_initial(config)
    little = MemoryEstimate(start.model_config, config, start.parameters[0]).total(1) - 1
    with pytest.raises(MemoryPlanError):
        train_model(config, [corpus], tmp_path / "run", available=little)
    assert not (tmp_path / "run").exists()
    train_model(
        continued_config(LoraConfig(rank=2), batch_size=1, steps=1), [corpus], tmp_path / "run", available=little
    )


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"lora": {"rank": 0}, "model": {"init": "x"}}, "lora.rank: must be at least 1, got 0"),
        ({"lora": {"alpha": 0.0}, "model": {"init": "x"}}, "lora.alpha: must be above 0"),
        ({"lora": {"dropout": 1.0}, "model": {"init": "x"}}, r"lora.dropout: must be in \[0, 1\)"),
        ({"lora": {"target_modules": []}, "model": {"init": "x"}}, "lora.target_modules: must not be empty"),
        ({"lora": {"ranks": 1}, "model": {"init": "x"}}, "unknown key lora.ranks.*'rank'"),
        ({"lora": {}}, "adapters need a trained model.*--init"),
        ({"model": {"init": "x", "preset": "tiny"}}, "model.preset: must not be given with model.init x"),
        ({"model": {"init": 3}}, "model.init: must be a checkpoint's path"),
    ],
)
def test_invalid_tables_are_refused(content, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(content)


def test_untrainable_configurations_are_refused(corpus, tmp_path, continued_config, base, adapter):
    for config, error, message in (
        (continued_config(LoraConfig(target_modules="qq")), ConfigError, r"'qq' matches no linear layer.*mean 'q'"),
        (
            continued_config(data={"seq_len": 33}),
            ConfigError,
            r"data\.seq_len: must be at most 32, the limit .*, got 33",
        ),
        (replace(continued_config(), tokenizer=TokenizerConfig("char")), ConfigError, r"\[tokenizer\].*has its own"),
        (continued_config(init=tmp_path / "none"), CheckpointError, "no such folder"),
        (continued_config(LoraConfig(), init=adapter), ConfigError, "is an adapter"),
    ):
        with pytest.raises(error, match=message):
            train_model(config, [corpus], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot resume.*lora.rank: 8 there, 4 here"):
        resume_model(adapter, config=continued_config(LoraConfig(rank=4)))
    assert not (tmp_path / "run").exists()


def test_the_models_own_tokenizer_may_be_given(corpus, tmp_path, continued_config, base):
    config = continued_config(steps=1)
    train_model(replace(config, tokenizer=TokenizerConfig(path=str(base))), [corpus], tmp_path / "run")
    train_tokenizer("char", ["abc"]).save(tmp_path / "char")
    other = replace(config, tokenizer=TokenizerConfig(path=str(tmp_path / "char")))
    with pytest.raises(ConfigError, match="must be the tokenizer of"):
        train_model(other, [corpus], tmp_path / "other")


def test_all_weights_continue_from_an_adapter(corpus, tmp_path, continued_config, adapter):
    assert not adapter_factors(load_initial(continued_config(init=adapter)).build())
    train_model(continued_config(init=adapter, steps=1), [corpus], tmp_path / "run")
    assert open_folder(tmp_path / "run").origin == "llama"


# ---------------------------------------------------------------- pairs


def test_encoder_decoder_continues_with_all_weights_and_with_adapters(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{word}\t{word[::-1]}\n" for word in ("abc", "abcd", "bca", "dcb", "cab", "dab") * 4))
    small = {"hidden_size": 32, "encoder.num_layers": 1, "decoder.num_layers": 1}
    model, data = {"preset": "transformer-tiny", "set": small}, {"seq_len": 12}
    content = tiny_config(model=model, data=data, tokenizer={"kind": "char"}, steps=2, batch_size=2).to_dict()
    base = train_model(RunConfig.from_dict(content), [pairs], tmp_path / "base").checkpoint
    generation = open_checkpoint(base).generation
    for lora in ({}, {"lora": {"target_modules": ["cross_attention", "encoder.layers.*.attention.v"]}}):
        out = tmp_path / f"run{len(lora)}"
        config = RunConfig.from_dict({**content, "model": {"init": str(base)}, "tokenizer": {}, **lora})
        train_model(config, [pairs], out)
        opened = open_checkpoint(out)
        assert opened.generation == generation and opened.config == open_checkpoint(base).config
        tokens = [(folder / "data" / "tokens-00000.bin").read_bytes() for folder in (out, tmp_path / "base")]
        assert tokens[0] == tokens[1], "sources and targets are framed as the model has learned them"
        with LLM.load(out, max_num_seqs=1) as llm:
            assert llm.generate("abc", max_tokens=4).text is not None
    cross_attention = {f"decoder.layers.0.cross_attention.{name}" for name in ("q", "k", "v", "out")}
    assert set(opened.factors) == {*cross_attention, "encoder.layers.0.attention.v"}
    assert resume_model(tmp_path / "run1").step == 2


class Framing:
    """Tokenizer that frames a text with ``first`` and ``last``."""

    source_tokenizer = None

    def __init__(self, first, last):
        self.first, self.last = first, last

    def add_special_tokens(self, ids, *, language=None):
        return [*self.first, *ids, *self.last]


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "source", "target"),
    [
        (Framing([], [1]), {"start": 0, "eos": 1}, [7, 8, 1], [0, 7, 8, 1]),  # T5, Marian
        (Framing([0], [2]), {"start": 2, "eos": 2}, [0, 7, 8, 2], [2, 0, 7, 8, 2]),  # BART
        (Framing([], []), {"start": 3, "eos": 4, "source_eos_token_id": 4}, [7, 8, 4], [3, 7, 8, 4]),  # kvad's own
    ],
    ids=["t5", "bart", "own"],
)
def test_pairs_are_framed_with_the_models_tokens(tokenizer, tokens, source, target):
    options = {key: value for key, value in tokens.items() if key not in ("start", "eos")}
    generation = GenerationConfig(decoder_start_token_id=tokens["start"], eos_token_ids=(tokens["eos"],), **options)
    frame = PairCorpus((), PairPaths(()), "strict", generation=generation).framer(tokenizer)
    assert frame(0, [7, 8]) == source and frame(1, [7, 8]) == target


# ---------------------------------------------------------------- the commands


def test_the_commands_train_merge_and_generate(corpus, tmp_path, base):
    from click.testing import CliRunner

    from kvad.cli.main import cli

    def kvad(*words):
        done = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    few = ("--steps", 2, "--batch-size", 2, "--seq-len", 32, "--precision", "fp32")
    run, greedy = tmp_path / "run", ("1 is", "--max-tokens", 6, "--temperature", 0)
    kvad("train", corpus, "--init", base, "--lora-rank", 2, "--set", "lora.target_modules=q,v,mlp", *few, "--out", run)
    assert read_run_config(run)[0].lora == LoraConfig(rank=2, target_modules="q,v,mlp")
    kvad("train", "--resume", "--out", run)
    kvad("merge", base, run, "--out", tmp_path / "merged")
    expected = [kvad("generate", *where, *greedy) for where in ([run], [base, "--adapter", run], [tmp_path / "merged"])]
    assert expected[0] == expected[1] == expected[2]
    for wrong, what in (
        (("train", corpus, "--lora-rank", 2, "--out", tmp_path / "x"), "adapters need a trained model"),
        (
            ("train", corpus, "--init", base, "--preset", "tiny", "--out", tmp_path / "x"),
            "model.preset: must not be given with model.init",
        ),
        (("train", corpus, "--init", base, "--lora-rank", 0, "--out", tmp_path / "x"), "lora.rank: must be at least 1"),
        (("merge", base, base, "--out", tmp_path / "x"), "it is a complete model"),
        (("merge", base, run, "--out", base), "exists"),
    ):
        with pytest.raises(UsageError, match=what):
            kvad(*wrong)
    assert not (tmp_path / "x").exists()
