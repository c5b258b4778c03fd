"""Callbacks that run the engine during training: exactness of the cache, samples, translation quality.

They are passed to ``kvad.train`` by the caller of a run; training itself imports neither engine nor cache. Each works
on a copy of the weights, made for the evaluation and dropped after it, so nothing here can change training: a run has
equal losses, bit for bit, with and without them. A copy needs the memory of the weights once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from kvad import benchmarks
from kvad.cache import CacheConfig
from kvad.engine import Engine, PromptEncoder
from kvad.engine.scheduling import SamplingParams
from kvad.errors import UsageError
from kvad.evaluation import bleu
from kvad.evaluation.metrics import count_exact_matches
from kvad.llm import LLM
from kvad.model import Transformer
from kvad.model_input import ModelInput
from kvad.train import monitoring
from kvad.train.config import CallbacksConfig
from kvad.train.monitoring import Callback, TrainingContext
from kvad.verify import run_uncached, tolerance


def build_callbacks(watch: CallbacksConfig) -> list[Callback]:
    """Build the callbacks of a run file's [callbacks]."""
    found: list[Callback] = [CheckCache()] if watch.check_cache else []
    found += [SamplePrompts(watch.prompts, watch.max_tokens, watch.temperature)] if watch.prompts else []
    return [*found, *([TranslationBleu(watch.bleu_samples)] if watch.bleu_samples is not None else [])]


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
        cache = CacheConfig(max_num_seqs=rows, max_seq_len=capacity, dtype=_dtype(model), max_source_len=source)
        return LLM(model, self.subject.tokenizer, cache, generation=self.subject.generation)

    def _measured(self, step: int, what: str, values: dict[str, float | str], words: str) -> None:
        self.subject.log("on_callback_report", monitoring.callbacks.CallbackReport(step, what, values, words))


# ---------------------------------------------------------------- the cache


class CheckCache(_ModelCallback):
    """At every evaluation: compares held-out rows, token by token through a paged cache, with the uncached model.

    ``rows`` rows of at most ``tokens`` tokens. Logs the largest difference of a logit and the expected rounding
    (``verify.tolerance``); a larger difference is marked. UsageError, before training, for an encoder.
    """

    handles = "check_cache"

    def __init__(self, rows: int = 2, tokens: int = 64) -> None:
        self._rows, self._tokens = rows, tokens

    def on_model(self, subject: TrainingContext) -> None:
        if subject.model.config.kind == "encoder":
            raise UsageError("callbacks.check_cache (--check-cache): an encoder keeps no cache", "leave it out")
        super().on_model(subject)

    def on_eval(self, report: monitoring.callbacks.EvalReport) -> None:
        rows = self._held_out()
        worst, largest, agree, count = _compare_cached(self._copy(), rows)
        most = tolerance(_dtype(self.subject.model), largest, 0.0)
        values: dict[str, float | str] = {"max_dlogit": worst, "largest_logit": largest, "tolerance": most}
        values |= {"tokens": count, "greedy": agree}
        text = f"cache: {agree} of {count} greedy tokens, max |dlogit| {worst:.1e} of {largest:.3g}"
        if not worst <= most:
            text += f": BEYOND ROUNDING ({most:.1e}); kvad verify says where"
        self._measured(report.step, "cache", values, text)

    def _held_out(self) -> list[benchmarks.scorers.ScoredRow]:
        data, most = self.subject.data, min(self._tokens, self.subject.model.config.max_seq_len - 1)
        if pairs := data.packer.examples(self._rows):
            return [
                benchmarks.scorers.ScoredRow(torch.tensor(target[:most]), torch.tensor(source))
                for source, target in pairs
            ]
        pieces = _pieces(next(iter(data.evaluation())).model_input)
        longest = sorted(pieces, key=len, reverse=True)[: self._rows]  # of equal ones, the first
        return [benchmarks.scorers.ScoredRow(piece[:most].cpu()) for piece in longest]


def _pieces(step: ModelInput) -> Iterator[Tensor]:
    """Yield the documents of a packed batch: a position of 0 begins one."""
    begins = (step.positions == 0).nonzero().view(-1).tolist()
    for low, high in zip(begins, [*begins[1:], len(step.token_ids)], strict=True):
        yield step.token_ids[low:high]


@torch.no_grad()
def _compare_cached(model: Transformer, rows: Sequence[benchmarks.scorers.ScoredRow]) -> tuple[float, float, int, int]:
    """Compare a cache that gets one token at a time with the model without a cache.

    Returns (largest |difference| of a logit, largest |logit|, number of equal greedy tokens, tokens). NaN counts as an
    infinite difference.
    """
    cache = CacheConfig(
        max_num_seqs=len(rows),
        max_seq_len=max(len(row.tokens) for row in rows) + 1,
        dtype=_dtype(model),
        prefill_chunk_size=1,
        enable_prefix_caching=False,
        max_source_len=max((len(row.source) for row in rows if row.source is not None), default=0),
    )
    requests: dict[int, list[Tensor]] = {}
    with closing(Engine(model, cache)) as engine:
        benchmarks.engine_runs.attach_logit_hook(
            engine, lambda request, _first, logits: requests[request].append(logits.clone())
        )
        sampling_params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        for row in rows:
            source = None if row.source is None else row.source.tolist()
            requests[engine.add_request(row.tokens.tolist(), sampling_params, encoder_token_ids=source)] = []
        benchmarks.engine_runs.run_engine(engine)
    worst, largest, agree, count = 0.0, 0.0, 0, 0
    for row, parts in zip(rows, requests.values(), strict=True):
        source = None if row.source is None else row.source.tolist()
        limit = len(row.tokens) + 1  # a sequence in the cache may be one token longer
        true = run_uncached(model, row.tokens.tolist(), limit, source=source).double()
        have = torch.cat(parts)[: len(true)].double()
        assert len(have) == len(true), "every position was computed"
        worst = max(worst, float((have - true).abs().nan_to_num(nan=torch.inf).max()))
        largest = max(largest, float(true.abs().max()))
        agree, count = agree + int((have.argmax(-1) == true.argmax(-1)).sum()), count + len(true)
    return worst, largest, agree, count


def _dtype(model: Transformer) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


# ---------------------------------------------------------------- samples


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
            done = llm.generate(self._prompt_ids, max_tokens=self._most, temperature=self._temperature)
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
        bleu.check_sacrebleu()
        self._pairs, self._rows = pairs, rows

    def on_model(self, subject: TrainingContext) -> None:
        self._examples = subject.data.packer.examples(self._pairs)
        if not self._examples:
            raise UsageError(
                "callbacks.bleu_samples (--bleu-samples): only what is trained on pairs translates", "leave it out"
            )
        super().on_model(subject)

    def on_eval(self, report: monitoring.callbacks.EvalReport) -> None:
        sources = [source for source, _ in self._examples]
        most = min(self.subject.model.config.max_seq_len - 1, 8 + 2 * max(map(len, sources)))
        with self._llm(min(self._rows, len(sources)), most + 2) as llm:
            answers = [done.text for done in llm.generate(sources, max_tokens=most, num_beams=1, temperature=0.0)]
        wanted = [self.subject.tokenizer.decode(target) for _, target in self._examples]
        words, match = bleu.compute_bleu(answers, wanted), count_exact_matches(answers, wanted)
        values: dict[str, float | str] = {"bleu": words.bleu, "chrf": words.chrf, "exact_match": match.accuracy}
        values |= {"pairs": match.count, "signature": words.bleu_signature}
        text = f"BLEU {words.bleu:.2f}, chrF {words.chrf:.2f}, {match.hits} of {match.count} exact"
        self._measured(report.step, "bleu", values, f"{text}; {words.bleu_signature}")
