"""Tasks of ``kvad eval``: perplexity of texts, answers to pairs, labels, and the losses of training objectives.

The numbers of ``--task masked-lm|span-corruption|chat`` are computed by ``kvad.evaluation.objectives``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvad.cli.commands.eval_report import (
    MAX_TOKENS,
    EvalOptions,
    EvalResult,
    TextLine,
    describe_cache,
    format_bleu,
    format_cache,
    format_curve,
    format_labels,
    format_labels_line,
    format_likelihood,
    format_likelihood_line,
    format_match,
    format_size,
    load_for_eval,
)
from kvad.cli.line_batches import require_tokenizer
from kvad.cli.output import ProgressLine, note
from kvad.errors import RequestError, UsageError, format_count

if TYPE_CHECKING:
    from kvad import benchmarks, evaluation
    from kvad.checkpoint import CheckpointHandle
    from kvad.llm import LLM


def eval_texts(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    from kvad import evaluation
    from kvad.train.sources import open_corpus

    unit = options.document_unit or "files"
    corpus = open_corpus(options.data, suffixes=options.suffix, errors=options.encoding_errors, lines=unit == "lines")
    curve, cache_fields = options.is_curve, options.given_cache_fields
    limit = opened.config.max_seq_len
    window = options.window if options.window is not None else limit
    _check_window(window, limit, options, cached=bool(cache_fields))
    stride = options.stride if options.stride is not None else max(1, window // 2)
    if not curve:
        evaluation.text.WindowOptions(window, stride)  # refuses invalid options before the model is loaded
    with load_for_eval(opened, options, max_num_seqs=4, max_seq_len=min(limit, window)) as llm:
        tokenizer = require_tokenizer(llm)
        first = evaluation.text.opening_token(llm)
        bos: evaluation.text.OpeningMode = options.bos or ("none" if first is None else "start")
        documents = evaluation.text.encode_documents(tokenizer, list(corpus.texts()))
        parted = None if bos == "none" else first
        if curve:
            texts = [document.tokens for document in documents]
            groups = [texts] if unit == "joined" else [[text] for text in texts]
            joined = [evaluation.extrapolation.join_texts(group, parted) for group in groups]
            return _curve(opened, llm, joined, options, progress)
        if unit == "joined":
            documents = [_join(documents, parted)]
        reader = _scorer(llm, max(limit, window - 1), cached=bool(cache_fields))
        likelihood = evaluation.text.evaluate_text(
            reader,
            documents,
            evaluation.text.WindowOptions(window, stride, bos),
            first,
            most=options.max_scored_tokens,
            unknown=tokenizer.special_tokens.unk,
            tick=lambda done, total: progress.update("reading", done, total),
        )
        stored = describe_cache(llm) if cache_fields else None
        name = "" if first is None or bos == "none" else tokenizer.token_text(first)
    read = {"documents": len(documents), "window": window, "stride": stride, "bos": bos, "opening": name or None}
    places = {"none": "no opening token", "start": f"{name} before each text", "window": f"{name} before each window"}
    name_of = "all files as one text" if unit == "joined" else format_count(len(documents), "text")
    page = [
        ("text", f"{name_of}, {format_size(likelihood)}"),
        ("read", f"windows of {window:,}, stride {stride:,}, {places[bos]}; {format_cache(stored)}"),
        *format_likelihood(likelihood, words=options.word_perplexity),
    ]
    return [{**read, "memory": stored, **format_likelihood_line(likelihood)}], page


def _scorer(llm: LLM, longest: int | None, *, cached: bool) -> benchmarks.scorers.TokenScorer:
    from kvad import benchmarks

    if cached:
        return benchmarks.scorers.CachedScorer(llm.engine)
    return benchmarks.scorers.UncachedScorer(llm.model, longest)


def _check_window(window: int, limit: int, options: EvalOptions, *, cached: bool) -> None:
    if options.exceed_max_seq_len and cached:
        raise UsageError("--exceed-max-seq-len applies without a cache", "use --endless with a cache")
    if cached and options.endless:
        return
    max_window = limit if cached else limit + 1  # the last token of a window is only scored
    if window > max_window and not options.exceed_max_seq_len:
        raise UsageError(
            f"--window {window:,}: the model's limit is {limit:,}",
            "with --endless sequences continue, by the cache's policy" if cached else "--exceed-max-seq-len allows it",
        )


def _join(documents: Sequence[Any], opening: int | None) -> Any:
    from kvad import evaluation

    texts = [document.tokens for document in documents]
    # The opening token of each text is scored within the stream, as in training; the first one is added later.
    tokens = evaluation.extrapolation.join_texts(texts, opening)[0 if opening is None else 1 :]
    sums = [sum(getattr(document, name) for document in documents) for name in ("bytes", "words", "lines")]
    return evaluation.text.EvalDocument(tokens, *sums)


def _curve(
    opened: CheckpointHandle, llm: LLM, texts: list[Any], options: EvalOptions, progress: ProgressLine
) -> EvalResult:
    from kvad import evaluation

    trained = options.trained_seq_len or _trained(opened)
    settings: dict[str, Any] = {"multiples": options.length_multiples or evaluation.extrapolation.MULTIPLES}
    if options.max_scored_tokens is not None:
        settings["most"] = options.max_scored_tokens
    curve = evaluation.extrapolation.extrapolate(llm.model, texts, trained, **settings, tick=progress.update)
    name = _name(opened.path)
    progress.clear()
    figures = _draw(curve, name, options.length_plot)
    if curve.note:
        note(f"{curve.note}")
    shared = {"what": "extrapolation", "name": name, "positions": curve.positions, "trained": curve.trained}
    shared |= {"limit": curve.limit, "rows": curve.rows}
    lines = [
        {**shared, **asdict(point), "perplexity": point.perplexity, "whole_perplexity": point.whole_perplexity}
        for point in curve.points
    ]
    return lines, format_curve(curve, figures)


def _name(path: Path) -> str:
    """Return the name of the run, not that of its last checkpoint folder."""
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def _trained(opened: CheckpointHandle) -> int:
    """Return the row length of the training run, if the checkpoint has it, else the model's limit."""
    state = {} if opened.training is None else opened.training.state
    context = state.get("run", {}).get("data", {}).get("seq_len")
    return context if isinstance(context, int) else opened.config.max_seq_len


def _draw(curve: evaluation.extrapolation.LengthCurve, name: str, files: Sequence[Path]) -> list[Path]:
    from kvad import inspection

    if not files:
        return []
    lengths = [float(point.length) for point in curve.points]
    series = [
        inspection.plot.PlotSeries(
            f"{name}: the same tokens", lengths, [point.perplexity for point in curve.points], dots=True
        ),
        inspection.plot.PlotSeries(
            "all tokens of the rows", lengths, [point.whole_perplexity for point in curve.points], dots=True
        ),
    ]
    title = f"{name} ({curve.positions}), trained on rows of {curve.trained:,} tokens"
    return inspection.plot.draw_series(
        series, files, title=title, x_label="tokens of a row", y_label="perplexity", log_x=True, log_y=True
    )


LINES_PER_BATCH = 16  # default batch of answers


def eval_pairs(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    from kvad import evaluation

    if task == "translate":
        evaluation.bleu.check_sacrebleu()
    pairs = _pairs(options)
    sampling = _sampling(opened, options)
    each = sampling.get("num_beams", 1)
    cache_fields = options.given_cache_fields
    with load_for_eval(
        opened, options, max_num_seqs=LINES_PER_BATCH * each, max_seq_len=opened.config.max_seq_len, answers=True
    ) as llm:
        require_tokenizer(llm)
        likelihood = None
        if opened.config.kind == "encoder-decoder":
            reader = _scorer(llm, None, cached=bool(cache_fields))
            likelihood = evaluation.text.evaluate_pairs(
                llm, reader, pairs, tick=lambda done, total: progress.update("scoring", done, total)
            )
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        answers = evaluation.text.generate_answers(
            llm, sources, sampling, tick=lambda done, total: progress.update("answering", done, total)
        )
        stored = describe_cache(llm)
    form = evaluation.bleu.BleuOptions(options.bleu_tokenization, options.lowercase)
    match, words = evaluation.text.evaluate_answers(answers, references, form, compare=task == "translate")
    shown = list(zip(sources, references, answers, strict=True))[: options.print_samples or 0]
    line = {"pairs": len(pairs), "search": "greedy" if each == 1 else f"{each} beams", "memory": stored}
    line |= {"max_tokens": sampling["max_tokens"], "exact_match": match.accuracy}
    line |= {} if words is None else asdict(words)
    line |= {} if likelihood is None else format_likelihood_line(likelihood)
    line |= {"shown": [{"source": a, "target": b, "text": c} for a, b, c in shown]} if shown else {}
    page = [("pairs", f"{format_count(len(pairs), 'pair')}; {line['search']}, at most {sampling['max_tokens']} tokens")]
    page += [] if likelihood is None else format_likelihood(likelihood, words=options.word_perplexity, ends=True)
    page += [] if words is None else format_bleu(words, options.bleu_tokenization)
    page += [("exact", format_match(match, lower=options.lowercase))]
    for each_shown in shown:
        page += [("", ""), *zip("<=>", (" ".join(text.split()) for text in each_shown), strict=True)]
    return [line], page


def _pairs(options: EvalOptions) -> list[tuple[str, str]]:
    from kvad.train.sources import PairPaths, open_pairs

    corpus = open_pairs(PairPaths((*((path,) for path in options.data), *options.pairs)), options.encoding_errors)
    if corpus.skipped:
        note(f"{format_count(corpus.skipped, 'pair')} with an empty side omitted")
    texts = list(corpus.texts())
    return list(zip(texts[::2], texts[1::2], strict=True))


def _sampling(opened: CheckpointHandle, options: EvalOptions) -> dict[str, Any]:
    """Choose greedy or beam search; a decoder's answer ends with its line."""
    defaults: Mapping[str, Any] = opened.generation.sampling or {}
    chosen = {name: value for name in ("max_tokens", "length_penalty") if (value := getattr(options, name)) is not None}
    chosen.setdefault("max_tokens", min(int(defaults.get("max_tokens", MAX_TOKENS)), opened.config.max_seq_len - 1))
    beams = options.num_beams or 1
    if beams > 1:
        return {**chosen, "num_beams": beams}
    if "length_penalty" in chosen:
        raise UsageError("--length-penalty needs a beam search", "add --num-beams, or omit it")
    stop = {"stop": ("\n",)} if opened.config.kind == "decoder" else {}
    return {**chosen, "num_beams": 1, "temperature": 0.0, **stop}


def eval_tags(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    from kvad import evaluation

    sentences = evaluation.metrics.read_tagged(options.data, options.encoding_errors)
    with load_for_eval(opened, options, max_num_seqs=64, max_seq_len=1) as llm:
        require_tokenizer(llm)
        words = [words for words, _ in sentences]
        predicted = evaluation.text.predict_tags(
            llm, words, tick=lambda done, total: progress.update("tagging", done, total)
        )
    scores = evaluation.text.evaluate_tags([tags for _, tags in sentences], predicted)
    size = f"{format_count(len(sentences), 'sentence')}, {format_count(scores.count, 'word')}"
    return [{"sentences": len(sentences), **format_labels_line(scores)}], format_labels(scores, _known(opened), size)


def eval_labels(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    from kvad import evaluation

    labeled, predicted = evaluation.metrics.read_labeled(options.data, options.encoding_errors), list[str]()
    with load_for_eval(opened, options, max_num_seqs=64, max_seq_len=1) as llm:
        require_tokenizer(llm)
        for low in range(0, len(labeled), evaluation.text.BATCH_LINES):
            some = [text for text, _ in labeled[low : low + evaluation.text.BATCH_LINES]]
            numbers = range(low + 1, low + 1 + len(some))
            predicted += [labels[0].label for labels in evaluation.text.answer_all(llm.classify, some, numbers)]
            progress.update("labeling", len(predicted), len(labeled))
    scores = evaluation.metrics.score_labels([label for _, label in labeled], predicted)
    return [format_labels_line(scores)], format_labels(scores, _known(opened), format_count(len(labeled), "text"))


def _known(opened: CheckpointHandle) -> Sequence[str]:
    from kvad import config as cfg

    assert isinstance(opened.config.head, cfg.ClassificationHeadConfig)
    return opened.config.head.labels


OBJECTIVE_TASKS = ("masked-lm", "span-corruption", "chat")


def eval_objective(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    """Evaluate the loss and accuracy of a training objective."""
    from kvad import checkpoint, evaluation
    from kvad.train.config import ObjectiveConfig
    from kvad.train.sources import open_corpus

    if options.adapter is not None:
        opened = checkpoint.adapter.merge_adapter(opened, options.adapter)
    limit, tokenizer = opened.config.max_seq_len, opened.tokenizer
    if opened.config.encoder_input is not None:
        limit = min(limit, opened.config.encoder_input.max_seq_len)
    window = options.window or limit
    if tokenizer is None:
        raise RequestError("the model has no tokenizer, so it cannot read texts")
    if not 2 <= window <= limit:
        raise UsageError(f"--window {window:,}: must be from 2 to the model's limit of {limit:,}")
    unit = options.document_unit or "files"
    if unit == "joined":
        raise UsageError(f"--document-unit joined: --task {task} evaluates each text separately", "use files or lines")
    run = {} if opened.training is None else opened.training.state.get("run", {}).get("objective", {})
    objective = ObjectiveConfig(**{name: run[name] for name in ("noise_density", "mean_span_length") if name in run})
    counts = [0, 0]
    if task == "chat":
        batches, counts = evaluation.objectives.chat_batches(
            tokenizer, opened.tokenizer_folder, list(options.data), window, options.encoding_errors
        )
        convention = "the assistant's tokens after everything before them; each conversation separately"
    else:
        errors = options.encoding_errors
        corpus = open_corpus(options.data, suffixes=options.suffix, errors=errors, lines=unit == "lines")
        if task == "masked-lm":
            batches = evaluation.objectives.masked_batches(tokenizer, corpus.texts(), window, objective.noise_density)
            convention = f"{objective.noise_density:.0%} of a row's tokens, 80/10/10, seed {evaluation.objectives.SEED}"
        else:
            batches = evaluation.objectives.span_batches(tokenizer, corpus.texts(), window, objective)
            convention = f"{objective.noise_density:.0%} of the tokens in spans of {objective.mean_span_length:g}, "
            convention += f"seed {evaluation.objectives.SEED}"
    model = checkpoint.loader.load_weights(opened, options.dtype)
    result = evaluation.objectives.evaluate_objective(
        model, batches, lambda rows: progress.update("reading rows", rows, rows)
    )
    line: TextLine = {"window": window, "loss": result.loss, "accuracy": result.accuracy, "targets": result.targets}
    line |= (
        {"conversations": counts[0], "left_out": counts[1]}
        if task == "chat"
        else {"seed": evaluation.objectives.SEED, **_drawn(task, objective)}
    )
    left = f"; {format_count(counts[1], 'conversation')} longer than that omitted" if counts[1] else ""
    page = [
        ("targets", convention),
        ("read", f"rows of at most {window:,} tokens, each text separately, without a cache{left}"),
        ("loss", f"{result.loss:.4f} nats per target; {format_count(result.targets, 'target')}"),
        ("accuracy", f"{result.accuracy:.4f} of the targets were predicted"),
    ]
    return [line], page


def _drawn(task: str, objective: Any) -> TextLine:
    return {"noise_density": objective.noise_density} | (
        {"mean_span_length": objective.mean_span_length} if task == "span-corruption" else {}
    )
