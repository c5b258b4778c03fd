"""Outputs, greedy tokens and beams of a reference model. Runs in the reference's environment.

Every input is computed alone, without padding, by eager attention in float32.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from tests.hf_parity import weights
from tests.hf_parity.cases import RAGGED, Case

PROMPT, NEW, ATTEMPTS = 9, 12, 12
MARGIN = 2e-3  # of logits between the best token and the next, so that greedy tokens do not depend on rounding
BEAMS = (
    {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 4, "length_penalty": 0.4, "early_stopping": True},
)
KEY_BIAS = re.compile(r"(k_proj|key|key_proj|k_lin|\.k)\.bias$")


def inputs(case: Case, name: str, length: int, target: int) -> dict[str, np.ndarray]:
    """Return ids after the special ones (and before Marian's pad, the last id): no position counts as padding."""
    generated = {"input_ids": weights.integers(f"{name}/input_ids", length, 5, 95, case.recipe.seed)}
    if case.types:
        generated["token_type_ids"] = (np.arange(length) >= length // 2).astype(np.int64)
    if case.kind == "encdec":
        generated["decoder_input_ids"] = weights.integers(f"{name}/decoder_input_ids", target, 5, 95, case.recipe.seed)
    return generated


def forward(case: Case, model: Any, given: dict[str, np.ndarray], hidden: bool) -> dict[str, np.ndarray]:
    tensors = {key: torch.from_numpy(value)[None] for key, value in given.items()}
    got = model(**tensors, output_hidden_states=hidden, return_dict=True)
    generated = {case.output: got[case.output][0].numpy()}
    if case.output == "last_hidden_state" and got.get("pooler_output") is not None:
        generated["pooler_output"] = got["pooler_output"][0].numpy()
    if case.kind == "encdec":
        generated["encoder_last_hidden_state"] = got["encoder_last_hidden_state"][0].numpy()
    for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states") if hidden else ():
        generated.update({f"{key}/{i}": state[0].numpy() for i, state in enumerate(got.get(key) or ())})
    return generated


def runs(case: Case, model: Any, hidden: bool) -> dict[str, np.ndarray]:
    """Run the long input and the shorter ones, each alone."""
    lengths = {"long": (case.length, case.target)} | {f"ragged{i}": (n, n // 2 + 2) for i, n in enumerate(RAGGED)}
    generated = {}
    for name, (length, target) in lengths.items():
        given = inputs(case, name, length, target)
        got = forward(case, model, given, hidden)
        if name != "long":
            got.pop("encoder_last_hidden_state", None)
        generated.update({f"{name}/{key}": value for key, value in {**given, **got}.items()})
    return generated


def without_effect(case: Case, model: Any, arrays: dict[str, np.ndarray]) -> list[str]:
    """Return the names of parameters and buffers that do not affect the long output.

    These may be biases of keys, which cancel in the softmax, and fixed tables; a loader that drops any other is
    detected.
    """
    with torch.enable_grad():
        named = dict(model.named_parameters())
        named |= {name: b.requires_grad_() for name, b in model.named_buffers() if name.endswith("logits_bias")}
        tensors = {
            key: torch.from_numpy(arrays[f"long/{key}"])[None]
            for key in ("input_ids", "token_type_ids", "decoder_input_ids")
            if f"long/{key}" in arrays
        }
        got = model(**tensors, return_dict=True)
        loss = sum(
            (got[key] * torch.from_numpy(weights.noise(key, tuple(got[key].shape), 0))).sum()
            for key in (case.output, "pooler_output")
            if got.get(key) is not None
        )
        loss.backward()
    none = sorted(name for name, value in named.items() if value.grad is None or float(value.grad.abs().max()) < 1e-3)
    for value in named.values():
        value.requires_grad_(False).grad = None
    constant = (*case.fixed, "e_score_correction_bias")  # chooses experts, which has no gradient
    unseen = [name for name in none if not (KEY_BIAS.search(name) or name.endswith(constant))]
    if unseen:
        raise AssertionError(f"without effect: {unseen}")
    return none


def greedy(case: Case, model: Any, needed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Decode 12 tokens by plain argmax, with nothing banned, forced or ending, with and without the reference's
    cache.

    Of several prompts the one with the most varied output is used, because tiny random models repeat themselves.
    """
    options = {**needed, "do_sample": False, "num_beams": 1, "max_new_tokens": NEW}
    length = 21 if case.kind == "encdec" else PROMPT
    prompts = [weights.integers(f"greedy{attempt}", length, 5, 95, case.recipe.seed) for attempt in range(ATTEMPTS)]
    answers = [(prompt, generate(model, prompt, {**options, "use_cache": False})) for prompt in prompts]
    clear = [(prompt, answer) for prompt, answer in answers if answer.margin > MARGIN]
    if not clear:
        raise AssertionError("no prompt whose greedy output is clear")
    prompt, uncached = max(clear, key=lambda pair: len(set(pair[1].sequence[-NEW:].tolist())))
    cached = generate(model, prompt, options)
    same = bool(np.allclose(cached.logits, uncached.logits, atol=1e-4))
    arrays = {"greedy/input_ids": prompt, "greedy/sequence": cached.sequence, "greedy/logits": cached.logits}
    if not same:
        arrays |= {"greedy/sequence_uncached": uncached.sequence, "greedy/logits_uncached": uncached.logits}
    margin = round(min(cached.margin, uncached.margin), 4)
    return {**options, "eos_token_id": None, "margin": margin, "cache_agrees": same}, arrays


def clear_generation_config(model: Any) -> dict[str, Any]:
    """Remove the model's generation config: forced ends, banned words and default lengths.

    Returns the settings that are still needed: the padding, and the decoder's start token.
    """
    own, config = model.generation_config, model.config
    keys = ("decoder_start_token_id", "bos_token_id")
    starts = [getattr(place, key, None) for key in keys for place in (own, config)]
    start = next((token for token in starts if token is not None), None)
    model.generation_config = transformers.GenerationConfig()
    return {"pad_token_id": own.pad_token_id or 0, "decoder_start_token_id": start}


class Answer(NamedTuple):
    """Generated tokens of one prompt."""

    sequence: np.ndarray  # [L], with the prompt, or the decoder's start
    logits: np.ndarray  # [12, V], of the new tokens
    margin: float  # smallest difference of logits between the best token and the next


def generate(model: Any, prompt: np.ndarray, options: dict[str, Any]) -> Answer:
    config = transformers.GenerationConfig(**options, output_logits=True, return_dict_in_generate=True)
    ids = torch.from_numpy(prompt)[None]
    got = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    logits = torch.stack(got.logits)[:, 0]
    top = logits.topk(2).values
    return Answer(got.sequences[0].numpy(), logits.numpy(), float((top[:, 0] - top[:, 1]).min()))


def beams(model: Any, needed: dict[str, Any], prompt: np.ndarray) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return all four hypotheses of two searches, in which some end before others.

    The end token is the fourth token of the best hypothesis of a search without end token.
    """
    ids = torch.from_numpy(prompt)[None]

    def search(options: dict[str, Any]) -> Any:
        config = transformers.GenerationConfig(**options, output_scores=True, return_dict_in_generate=True)
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    common = {**needed, "do_sample": False, "num_return_sequences": 4, "max_new_tokens": NEW}
    end = int(search({**common, **BEAMS[0]}).sequences[0, -NEW + 3])
    generated = [{**common, **chosen, "eos_token_id": end} for chosen in BEAMS]
    arrays = {}
    for i, options in enumerate(generated):
        got = search(options)
        values = {"input_ids": prompt, "sequences": got.sequences.numpy(), "scores": got.sequences_scores.numpy()}
        arrays |= {f"beams{i}/{key}": value for key, value in values.items()}
    return generated, arrays
