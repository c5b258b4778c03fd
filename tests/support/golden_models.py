"""Models of the golden files (``tests/hf_parity``) as kvad reads them, and their uncached outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader, read_tensors, resolve_config
from kvad.checkpoint.families import find_family
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from tests.hf_parity import checkpoint

CASES = [(version, name) for version in checkpoint.ORACLES for name in checkpoint.names(version)]
REFUSED = {"roformer-rotary-value": "rotary_value"}  # case -> the option that kvad does not support
META = {case: checkpoint.meta(*case) for case in CASES}
READ = [case for case in CASES if case[1] not in REFUSED]
# kvad follows the other version: (version, case) -> the test of the difference.
DIFFERENT = {("5", "t5gemma"): "test_encoder_decoders.py::test_t5gemma_of_transformers_5_sees_one_token_more"}
RUNS = ("long", "ragged0", "ragged1", "ragged2")


def case_id(case: tuple[str, str]) -> str:
    """Return the id of a parametrized test, by which ``tests/hf_parity/page.py`` finds it."""
    return f"{case[1]}-{case[0]}"


class GoldenModel:
    """One case: config, tensors of the file, and weights by kvad's names."""

    def __init__(self, case: tuple[str, str]) -> None:
        self.meta, self.arrays = checkpoint.load(*case)
        fields = HFConfigReader(self.meta["config"], "config.json")
        self.family = find_family(fields.model_type)
        tensors = checkpoint.made(self.meta, self.arrays)
        self.stored = {name: torch.from_numpy(value) for name, value in tensors.items()}
        self.config = resolve_config(self.family, self.family.read(fields), self.stored)
        self.weights = self.convert(self.stored)

    def convert(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(read_tensors(self.family, self.config, stored, "model.safetensors"))

    def model(self) -> Transformer:
        # Dynamic scaling: transformers uses the length of each input, kvad the limit, so here they are the same.
        max_seq_len = max(self.config.max_seq_len, len(self.arrays["long/input_ids"]))
        model = Transformer(replace(self.config, max_seq_len=max_seq_len))
        model.load_state_dict(self.weights, assign=True)
        return model.float().eval()

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self.arrays[key])

    def model_input(self, run: str) -> ModelInput:
        tokens, types = self.tensor(f"{run}/input_ids"), self.arrays.get(f"{run}/token_type_ids")
        encoder_input = whole_input(tokens)._replace(token_type_ids=None if types is None else torch.from_numpy(types))
        if self.config.kind != "encoder-decoder":
            return encoder_input
        return whole_input(self.tensor(f"{run}/decoder_input_ids"))._replace(encoder_input=encoder_input)

    def expected(self, run: str) -> Tensor:
        return self.tensor(f"{run}/{self.meta['output']}")

    @torch.inference_mode()
    def outputs(self, run: str, model: Transformer) -> Tensor:
        """Return what the reference returned for this input: hidden states or logits."""
        step = self.model_input(run)
        hidden = model(step, NoCache(self.config))
        if self.meta["output"] == "last_hidden_state":
            return hidden
        if self.config.pools_sequence:
            return model.pooled_outputs(hidden, step)[0]
        logits = model.logits(hidden, step.logit_indices)
        return logits[:, 0] if self.expected(run).dim() < logits.dim() else logits

    @torch.inference_mode()
    def pooled(self, run: str, model: Transformer) -> Tensor:
        step = self.model_input(run)
        return model.pooled_outputs(model(step, NoCache(self.config)), step)[0]


def whole_input(tokens: Tensor) -> ModelInput:
    """Return the input of one sequence with logits at every position."""
    indices, length = torch.arange(len(tokens)), len(tokens)
    limits = torch.full_like(indices, length)
    return ModelInput(tokens, indices, (SubBatch(1, length, length),), indices, seq_lens=limits)


def divergence(logits: Tensor, expected: Tensor) -> float:
    """Return the largest KL divergence of a position."""
    p, q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())
