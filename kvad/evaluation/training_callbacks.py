"""Callbacks that run the engine during training: exactness of the cache, samples, translation quality.

They are passed to ``kvad.train`` by the caller of a run; training itself imports neither engine nor cache. Each works
on a copy of the weights, made for the evaluation and dropped after it, so nothing here can change training: a run has
equal losses, bit for bit, with and without them. A copy needs the memory of the weights once more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch

import kvad.verify as verify  # kvad.verify is also a function
from kvad.cache import CacheConfig
from kvad.engine import PromptEncoder
from kvad.errors import UsageError
from kvad.evaluation.metrics import check_sacrebleu, compute_bleu, count_exact_matches
from kvad.llm import LLM
from kvad.model import NoCache, Transformer
from kvad.train import monitoring
from kvad.train.config import CallbacksConfig
from kvad.train.monitoring import Callback, TrainingContext


def build_callbacks(watch: CallbacksConfig) -> list[Callback]:
    """Build the callbacks of a run file's [callbacks]."""
    callbacks: list[Callback] = [CheckCache()] if watch.check_cache else []
    callbacks += [SamplePrompts(watch.prompts, watch.max_tokens, watch.temperature)] if watch.prompts else []
    return callbacks + ([] if watch.bleu_samples is None else [TranslationBleu(watch.bleu_samples)])


class _ModelCallback(Callback):
    """Stores the training context, and copies the model when it is to be run."""

    subject: TrainingContext

    def on_model(self, subject: TrainingContext) -> None:
        self.subject = subject

    def _copy(self) -> Transformer:
        return copy.deepcopy(self.subject.model).eval().requires_grad_(False)

    def _llm(self, rows: int, capacity: int) -> LLM:
        """Return the copy as an LLM, with a cache of ``rows`` sequences; the caller closes it."""
        model, config = self._copy(), self.subject.model.config
        source = 0 if config.encoder_input is None else config.encoder_input.max_seq_len
        capacity = min(config.max_seq_len, capacity)
        cache = CacheConfig(max_num_seqs=rows, max_seq_len=capacity, dtype=model.dtype_name, max_source_len=source)
        return LLM(model, self.subject.tokenizer, cache, generation=self.subject.generation)

    def _measured(self, step: int, what: str, values: dict[str, float | str], words: str) -> None:
        self.subject.log("on_callback_report", monitoring.callbacks.CallbackReport(step, what, values, words))


class CheckCache(_ModelCallback):
    """At every evaluation: compares held-out rows, token by token through a paged cache, with the uncached model.

    ``rows`` rows of at most ``tokens`` tokens. Logs the largest difference of a logit and the expected rounding
    (``verify/references.py``); a larger difference is marked. UsageError, before training, for an encoder.
    """

    handles = "check_cache"

    def __init__(self, rows: int = 2, tokens: int = 64) -> None:
        self._rows, self._tokens = rows, tokens

    def on_model(self, subject: TrainingContext) -> None:
        if subject.model.config.kind == "encoder":
            raise UsageError("callbacks.check_cache (--check-cache): an encoder keeps no cache", "leave it out")
        super().on_model(subject)

    def on_eval(self, report: monitoring.callbacks.EvalReport) -> None:
        compared, largest, tolerance = _compare_cached(self._copy(), self._held_out())
        worst, agree, count = compared.max_dlogit, compared.agree, compared.compared
        most = tolerance.max_dlogit
        values: dict[str, float | str] = {"max_dlogit": worst, "largest_logit": largest, "tolerance": most}
        values |= {"tokens": count, "greedy": agree}
        text = f"cache: {agree} of {count} greedy tokens, max |dlogit| {worst:.1e} of {largest:.3g}"
        if not tolerance.allows(compared):
            text += f": BEYOND ROUNDING ({most:.1e}); kvad verify says where"
        self._measured(report.step, "cache", values, text)

    def _held_out(self) -> list[verify.replay.ReplayStream]:
        data, most = self.subject.data, min(self._tokens, self.subject.model.config.max_seq_len - 1)
        if pairs := data.packer.examples(self._rows):
            return [_stream(target[:most], source) for source, target in pairs]
        step = next(iter(data.evaluation())).model_input
        begins = (step.positions == 0).nonzero().view(-1).tolist()  # of the documents of a packed batch
        pieces = [step.token_ids[low:high].tolist() for low, high in pairwise([*begins, len(step.token_ids)])]
        longest = sorted(pieces, key=len, reverse=True)[: self._rows]  # of equal ones, the first
        return [_stream(piece[:most]) for piece in longest]


def _stream(tokens: Sequence[int], source: Sequence[int] | None = None) -> verify.replay.ReplayStream:
    """Build a prompt whose positions are compared; the token that is generated after it is not."""
    return verify.replay.ReplayStream(tuple(tokens), ((0,),), source=None if source is None else tuple(source))


@torch.no_grad()
def _compare_cached(
    model: Transformer, rows: Sequence[verify.replay.ReplayStream]
) -> tuple[verify.report.Comparison, float, verify.references.Tolerance]:
    """Compare a cache that gets one token at a time with the float64 reference.

    Returns:
        The comparison, the largest |logit|, and the tolerance, from the plain model in the model's dtype.
    """
    cache = CacheConfig(
        max_num_seqs=len(rows),
        max_seq_len=max(row.limit for row in rows),
        dtype=model.dtype_name,
        prefill_chunk_size=1,
        enable_prefix_caching=False,
        max_source_len=max(len(row.source or ()) for row in rows),
    )
    build = verify.reference_model.reference_model
    exact, plain = build(model, torch.float64), build(model)
    with verify.replay.ReplayEngine(model, cache, rows) as replay:
        replay.run_all()
    sequences = [verify.reference_model.WholeSequence(row.prompt, row.source) for row in rows]
    no_cache = NoCache(model.config, kernel="reference")
    reference = verify.references.compute_reference(exact, plain, sequences, no_cache)
    return (
        verify.references.compare_logits(replay.result, reference.logits, tie_below=0.0),
        reference.scale,
        reference.tolerance,
    )


class SamplePrompts(_ModelCallback):
    """At every evaluation: continuations of the prompts (of an encoder-decoder: answers), at most ``tokens`` tokens.

    ``temperature`` 0 is greedy; sampled texts are equal in every run, as they are a function of the seed. UsageError,
    before training, for an encoder; RequestError for a prompt that the model cannot read.
    """

    handles = "prompts"

    def __init__(self, prompts: Sequence[str], tokens: int = 64, temperature: float = 0.0) -> None:
        self._prompts, self._most, self._temperature = tuple(prompts), tokens, temperature

    def on_model(self, subject: TrainingContext) -> None:
        config = subject.model.config
        if config.kind == "encoder":
            raise UsageError("callbacks.prompts (--prompt): an encoder continues no text", "leave it out")
        super().on_model(subject)
        texts = PromptEncoder(config, subject.tokenizer, subject.generation)
        ask = texts.encode_prompt if config.kind == "decoder" else texts.encode_source
        self._prompt_ids = [ask(prompt) for prompt in self._prompts]

    def on_eval(self, report: monitoring.callbacks.EvalReport) -> None:
        longest = max(map(len, self._prompt_ids))
        with self._llm(len(self._prompt_ids), longest + self._most + 2) as llm:
            done = llm.generate(self._prompt_ids, max_tokens=self._most, temperature=self._temperature, seed=0)
        pairs = zip(self._prompts, done, strict=True)
        samples = tuple(monitoring.callbacks.TextSample(prompt, "", each.text) for prompt, each in pairs)
        self.subject.log("on_samples", monitoring.callbacks.SamplesReport(report.step, samples))


class TranslationBleu(_ModelCallback):
    """At every evaluation: BLEU, chrF and exact match of greedy answers to the first ``pairs`` held-out sources.

    Compared with the targets as the tokenizer decodes them: if it loses something (case, unknown words), ``kvad eval``
    on the texts gives lower scores. UsageError, before training, without pairs.
    """

    handles = "bleu_samples"

    def __init__(self, pairs: int = 200, rows: int = 16) -> None:
        check_sacrebleu()
        self._pairs, self._rows = pairs, rows

    def on_model(self, subject: TrainingContext) -> None:
        self._examples = subject.data.packer.examples(self._pairs)
        if not self._examples:
            message = "callbacks.bleu_samples (--bleu-samples): only what is trained on pairs translates"
            raise UsageError(message, "leave it out")
        super().on_model(subject)

    def on_eval(self, report: monitoring.callbacks.EvalReport) -> None:
        sources = [source for source, _ in self._examples]
        most = min(self.subject.model.config.max_seq_len - 1, 8 + 2 * max(map(len, sources)))
        with self._llm(min(self._rows, len(sources)), most + 2) as llm:
            answers = [done.text for done in llm.generate(sources, max_tokens=most, num_beams=1, temperature=0.0)]
        wanted = [self.subject.tokenizer.decode(target) for _, target in self._examples]
        words, match = compute_bleu(answers, wanted), count_exact_matches(answers, wanted)
        values: dict[str, float | str] = {"bleu": words.bleu, "chrf": words.chrf, "exact_match": match.accuracy}
        values |= {"pairs": match.count, "signature": words.bleu_signature}
        text = f"BLEU {words.bleu:.2f}, chrF {words.chrf:.2f}, {match.hits} of {match.count} exact"
        self._measured(report.step, "bleu", values, f"{text}; {words.bleu_signature}")
