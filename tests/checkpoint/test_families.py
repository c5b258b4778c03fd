"""Every family against transformers, logits for logits: the goldens of ``tests/hf_parity`` (4.57.6 and 5.x).

Forward at torch's default tolerances for float32 and KL <= 1e-9; the checkpoint written back, tensor by tensor; a
config that goes to their form and comes back as the same model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader, read_tensors, resolve_config, write_tensors
from kvad.checkpoint.families import FAMILIES, find_family
from kvad.checkpoint.hf_layout import choose_family
from kvad.config.layers import StackConfig
from kvad.errors import CheckpointError, UsageError
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from kvad.verify.run import verify
from kvad.verify.scenario import ScenarioOptions, build_prompts
from tests.hf_parity import checkpoint as oracle

CASES = [
    (version, name)
    for version in oracle.ORACLES
    if (oracle.GOLDENS / version / "index.json").exists()
    for name in oracle.names(version)
]
REFUSED = {"roformer-rotary-value": "rotary_value"}  # case -> the option of it that no model of ours has
KNOWN = [case for case in CASES if oracle.load(*case)[0]["config"]["model_type"] in FAMILIES and case[1] not in REFUSED]
# Where the oracles part and we follow the other: (oracle, case) -> the test of by how much.
OTHERWISE = {("5", "t5gemma"): "test_encoder_decoders.py::test_t5gemma_of_transformers_5_sees_one_token_more"}
each_case = pytest.mark.parametrize(("version", "name"), KNOWN, ids=[f"{name}-{version}" for version, name in KNOWN])


class Read:
    """One case, as kvad reads its folder."""

    def __init__(self, version: str, name: str, folder: Path) -> None:
        self.meta, self.arrays = oracle.load(version, name)
        oracle.write(self.meta, self.arrays, folder)
        fields = HFConfigReader(self.meta["config"], "config.json")
        self.family = find_family(fields.model_type)
        self.theirs = load_file(folder / "model.safetensors")
        self.config = resolve_config(self.family, self.family.read(fields), self.theirs)
        self.ours = dict(read_tensors(self.family, self.config, self.theirs, "model.safetensors"))

    def model(self, dtype: torch.dtype = torch.float32) -> Transformer:
        model = Transformer(self.config)
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in self.ours.items()}, assign=True)
        return model.to(dtype).eval()

    def tensor(self, key: str) -> Tensor | None:
        return torch.from_numpy(self.arrays[key]) if key in self.arrays else None


def _step(tokens: Tensor, segments: Tensor | None = None, source: ModelInput | None = None) -> ModelInput:
    every, length = torch.arange(len(tokens)), len(tokens)
    limits = torch.full_like(every, length)
    return ModelInput(
        tokens,
        every,
        (SubBatch(1, length, length),),
        every,
        max_seq_lens=limits,
        encoder_input=source,
        token_type_ids=segments,
    )


@torch.inference_mode()
def outputs(read: Read, run: str, model: Transformer | None = None) -> Tensor:
    model = read.model() if model is None else model
    tokens = read.tensor(f"{run}/input_ids")
    assert tokens is not None
    if read.config.kind == "encoder-decoder":
        target = read.tensor(f"{run}/decoder_input_ids")
        assert target is not None
        step = _step(target, source=_step(tokens))
    else:
        step = _step(tokens, read.tensor(f"{run}/token_type_ids"))
    hidden = model(step, NoCache(read.config))
    if read.meta["output"] == "last_hidden_state":
        return hidden
    if read.config.pools_sequence:
        return model.pooled_outputs(hidden, step)[0]
    logits = model.logits(hidden, step.logit_indices)
    expected = read.tensor(f"{run}/{read.meta['output']}")
    return logits[:, 0] if expected is not None and expected.dim() < logits.dim() else logits


@torch.inference_mode()
def pooled(read: Read, run: str, model: Transformer) -> Tensor:
    """A base model's answer for the row."""
    tokens = read.tensor(f"{run}/input_ids")
    assert tokens is not None
    step = _step(tokens, read.tensor(f"{run}/token_type_ids"))
    return model.pooled_outputs(model(step, NoCache(read.config)), step)[0]


def kl(ours: Tensor, theirs: Tensor) -> float:
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


@each_case
def test_outputs_are_theirs(version: str, name: str, tmp_path: Path) -> None:
    if (version, name) in OTHERWISE:
        pytest.skip(OTHERWISE[version, name])
    read = Read(version, name, tmp_path)
    model = read.model()
    for run in ("long", "ragged0", "ragged1", "ragged2"):
        expected = read.tensor(f"{run}/{read.meta['output']}")
        assert expected is not None
        ours = outputs(read, run, model)
        torch.testing.assert_close(ours, expected)
        assert kl(ours, expected) <= 1e-9
        if (vector := read.tensor(f"{run}/pooler_output")) is not None:
            torch.testing.assert_close(pooled(read, run, model), vector)


@each_case
def test_written_back_it_is_the_same_checkpoint(version: str, name: str, tmp_path: Path) -> None:
    read = Read(version, name, tmp_path)
    back = dict(write_tensors(read.family, read.config, read.ours))
    tied = {read.family.head[0]} if read.family.head and read.config.tie_embeddings else set()
    kept = {key for key in read.theirs if not _ignored(read, key)} - tied
    assert kept <= set(back), sorted(kept - set(back))[:3]
    for key, tensor in read.theirs.items():
        if key in back:
            assert torch.equal(back[key], tensor), key
    config = read.family.write(read.config)
    again = read.family.read(HFConfigReader(config, "config.json"))
    assert again == read.config


@pytest.mark.parametrize("case", [case for case in CASES if case[1] in REFUSED], ids="-".join)
def test_what_no_model_of_ours_has_is_refused_by_name(case: tuple[str, str]) -> None:
    config = oracle.load(*case)[0]["config"]
    with pytest.raises(CheckpointError, match=REFUSED[case[1]]):
        find_family(config["model_type"]).read(HFConfigReader(config, "config.json"))


def _ignored(read: Read, key: str) -> bool:
    return any(re.fullmatch(pattern, key.removeprefix(read.family.prefix)) for pattern in read.family.ignored)


def test_a_dropped_tensor_is_detected(tmp_path: Path) -> None:
    """The oracle can object: each tensor of GPT-2, changed a little, changes the logits."""
    read = Read(*next(case for case in KNOWN if case[1] == "gpt2"), tmp_path)
    expected = read.tensor("long/logits")
    for key in read.ours:
        if key.endswith("attention.k.bias"):
            continue  # softmax takes it out
        whole = read.ours[key]
        read.ours[key] = torch.zeros_like(whole)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(outputs(read, "long"), expected)
        read.ours[key] = whole


def test_every_family_has_a_case() -> None:
    tested = {oracle.load(*case)[0]["config"]["model_type"] for case in CASES}
    assert set(FAMILIES) <= tested | {"gemma3"}, sorted(set(FAMILIES) - tested)  # its text is read: gemma3_text


def test_gemma3_is_written_as_its_text_model(tmp_path: Path) -> None:
    config = Read("4.57", "gemma3", tmp_path).config
    layout = choose_family(config, "gemma3")
    assert layout.content["model_type"] == "gemma3_text"
    assert layout.family.read(HFConfigReader(layout.content, "config.json")) == config


@pytest.mark.parametrize("scale", [2.0, 0.9])
def test_a_scale_of_no_integer_scalar_is_refused(scale: float, tmp_path: Path) -> None:
    config = Read("4.57", "t5gemma", tmp_path).config
    assert config.encoder is not None and config.decoder is not None

    def scaled(stack: StackConfig) -> StackConfig:
        kinds = {
            name: replace(each, attention=replace(each.attention, softmax_scale=scale))
            for name, each in stack.layer_types.items()
        }
        return replace(stack, layer_types=kinds)

    with pytest.raises(CheckpointError, match="t5gemma cannot express"):
        choose_family(replace(config, encoder=scaled(config.encoder), decoder=scaled(config.decoder)), "t5gemma")


# ---------------------------------------------------------------- the cache, for every family

CACHED = [  # by the older oracle where both have it: the weights are equal
    case for case in KNOWN if case[0] == "4.57" or ("4.57", case[1]) not in KNOWN
]


@pytest.mark.parametrize(("version", "name"), CACHED, ids=[name for _, name in CACHED])
def test_every_cache_is_exact(version: str, name: str, tmp_path: Path) -> None:
    read = Read(version, name, tmp_path)
    if read.config.decoder is None:
        with pytest.raises(UsageError, match="encoder"):
            verify(read.model(), [[1]], ScenarioOptions())
        return
    options = ScenarioOptions(dtypes=("float64", "float32"), num_seqs=3, prefill_chunk_size=6, block_size=4, tokens=7)
    report = verify(read.model(), build_prompts(read.config, options, None), options)
    assert {memory.verdict for memory in report.cases} == {"exact"}, report.verdict()
    assert all(memory.max_dlogit <= 1e-10 for memory in report.cases if memory.dtype == "float64")
