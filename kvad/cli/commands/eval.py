"""``kvad eval``: evaluate a model on texts, pairs and labels. The measurements are in ``kvad.evaluation``.

A task returns JSON objects, and (name, text) pairs for the page.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad import benchmarks, checkpoint, evaluation, inspection
from kvad import config as cfg
from kvad.cli.commands import eval_report as report
from kvad.cli.commands.eval_report import EvalOptions, EvalResult, load_for_eval
from kvad.cli.fields import command, flag_of, is_given
from kvad.cli.line_batches import model_capabilities, require_tokenizer
from kvad.cli.output import ProgressLine, emit_json, note, with_properties
from kvad.errors import RequestError, UsageError, format_count
from kvad.train import sources as sources_lib
from kvad.train.config import ObjectiveConfig
from kvad.train.sources import PairPaths, open_corpus, open_pairs

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.llm import LLM

LINES_PER_BATCH = 16  # default batch of answers
OBJECTIVE_TASKS = ("masked-lm", "span-corruption", "chat")
# Options by the tasks that use them.
LENGTH_OPTIONS = ("length_multiples", "length_plot", "trained_seq_len")
TEXT_OPTIONS = (
    "window", "stride", "bos", "document_unit", "max_scored_tokens", "word_perplexity", "exceed_max_seq_len",
    "suffix", *LENGTH_OPTIONS,
)  # fmt: skip
ANSWER_OPTIONS = ("num_beams", "length_penalty", "max_tokens", "lowercase", "print_samples", "pairs")
OPTIONS_BY_TASK: Mapping[str, tuple[str, ...]] = {
    "lm": TEXT_OPTIONS,
    "translate": (*ANSWER_OPTIONS, "bleu_tokenization", "word_perplexity"),
    "match": ANSWER_OPTIONS,
    "tag": (),
    "classify": (),
    "masked-lm": ("window", "document_unit", "suffix"),
    "span-corruption": ("window", "document_unit", "suffix"),
    "chat": ("window",),
}


@command("eval", EvalOptions)
def eval_command(options: EvalOptions) -> None:
    """Evaluate a model.

    The task depends on the model and on DATA:

    \b
    decoder          texts        loss, perplexity, bits per byte, accuracy per token
                     pairs        exact match of its answers
                     messages     --task chat: loss and accuracy of the assistant's tokens
    encoder-decoder  pairs        loss, BLEU, chrF, exact match
                     texts        --task span-corruption: loss and accuracy of removed spans
    encoder          words, tags  accuracy, F1 of each tag, macro-F1
                     texts, label the same for labels
                     texts        loss and accuracy of masked tokens

    Pairs are TSV files (`SOURCE<tab>TARGET`), or --pairs names two files; words and tags are `WORD<tab>TAG` lines with
    an empty line between sentences; labels are `LABEL<tab>TEXT` lines. With a cache option everything runs through
    such a cache, which measures the loss of a policy on your text.

    \b
    kvad eval runs/demo book.txt
    kvad eval gpt2 wiki.txt --window 1024 --stride 512 --bos none --word-perplexity
    kvad eval runs/demo book.txt --policy "sinks(4,60)" --cache-dtype int8
    kvad eval runs/endless-alibi texts/ --document-unit joined --length-plot alibi.svg
    kvad eval runs/de-en --pairs test.de test.en --num-beams 5
    kvad eval runs/de-en --pairs test.de test.en --bleu-tokenization words --lowercase
    kvad eval runs/tagger dev.tsv
    kvad eval runs/masked book.txt
    kvad eval runs/chat talks.jsonl --task chat
    """
    if not options.data and not options.pairs:
        raise UsageError("no data was given", "give files or folders, or --pairs SOURCE TARGET")
    has_cache = bool(options.given_cache_fields)
    opened = checkpoint.open_checkpoint(options.model, rope_scaling=options.rope_scaling)
    task = _task(opened, options)
    _check_unused_options(task, options, has_cache=has_cache)
    run = {"lm": eval_texts, "translate": eval_pairs, "match": eval_pairs, "tag": eval_labels, "classify": eval_labels}
    start = time.perf_counter()
    with ProgressLine(quiet=options.quiet) as progress:
        lines, page = run.get(task, eval_objective)(opened, task, options, progress)
    if options.as_json:
        paths = [*options.data, *(path for pair in options.pairs for path in pair)]
        first = {"task": task, "model": options.model, "data": paths}
        for line in lines:
            emit_json({**first, **line, "seconds": time.perf_counter() - start})
        return
    for name, text in page:
        click.echo(f"{name:<11}{text}" if name else text)


def _task(opened: CheckpointHandle, options: EvalOptions) -> str:
    """Choose the task by the kind of the model and the form of the data."""
    head, requested = opened.config.head, options.task
    pairs = bool(options.pairs) or any(path.suffix == ".tsv" for path in options.data)
    if opened.config.kind == "decoder":
        tasks: tuple[str, ...] = ("match", "lm", "chat") if pairs else ("lm", "match", "chat")
    elif opened.config.kind == "encoder-decoder":
        tasks = ("translate", "match", "span-corruption")
    elif isinstance(head, cfg.LanguageHeadConfig):
        tasks = ("masked-lm",)
    elif isinstance(head, cfg.ClassificationHeadConfig):
        tasks = ("tag",) if head.level == "token" else ("classify",)
    else:
        raise RequestError(f"{opened.path} is {model_capabilities(opened.config)[0]}: it has no outputs to evaluate")
    if requested not in ("auto", *tasks):
        kind = model_capabilities(opened.config)[0]
        raise RequestError(f"--task {requested}: {opened.path} is {kind}", f"its tasks: {', '.join(tasks)}")
    return tasks[0] if requested == "auto" else requested


def _check_unused_options(task: str, options: EvalOptions, *, has_cache: bool) -> None:
    others = {name for names in OPTIONS_BY_TASK.values() for name in names} - set(OPTIONS_BY_TASK[task])
    for name in sorted(others):
        if is_given(getattr(options, name)):
            raise UsageError(f"{flag_of(name)} does not apply to --task {task}", "omit it")
    if task in ("tag", "classify", "masked-lm") and has_cache:
        raise UsageError("an encoder has no cache", "omit the cache options")
    if task in OBJECTIVE_TASKS and (has_cache or options.deterministic or options.compile):
        raise UsageError(f"--task {task} runs without an engine", "omit its options")
    if task in OBJECTIVE_TASKS and options.device not in (None, "cpu"):
        raise UsageError(f"--device: --task {task} is evaluated on the CPU", "omit --device")
    if options.trained_seq_len is not None and not options.is_curve:
        raise UsageError("--trained-seq-len needs --length-multiples", "add them, or omit it")
    if options.is_curve and (has_cache or options.window or options.stride):
        raise UsageError(
            "--length-multiples evaluates its own rows without a cache", "omit --window, --stride and the cache options"
        )


def _open_texts(options: EvalOptions) -> sources_lib.documents.DocumentCorpus:
    lines = options.document_unit == "lines"
    return open_corpus(options.data, suffixes=options.suffix, errors=options.encoding_errors, lines=lines)


def eval_texts(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    corpus, joined = _open_texts(options), options.document_unit == "joined"
    is_cached, limit, trained = bool(options.given_cache_fields), opened.config.max_seq_len, _trained_seq_len(opened)
    window = options.window if options.window is not None else min(limit, trained or limit)
    _check_window(window, limit, options, cached=is_cached)
    stride = options.stride if options.stride is not None else max(1, window // 2)
    if not options.is_curve:
        evaluation.text.WindowOptions(window, stride)  # refuses invalid options before the model is loaded
        if trained is not None and window > trained + 1:
            message = (
                f"windows of {window:,} tokens: the model was trained on {trained:,}, later tokens may be predicted"
            )
            note(f"{message} worse")
    with load_for_eval(opened, options, max_num_seqs=4, max_seq_len=min(limit, window)) as llm:
        tokenizer = require_tokenizer(llm)
        first = llm.texts.opening_token()
        bos: evaluation.text.OpeningMode = options.bos or ("none" if first is None else "start")
        texts = evaluation.text.encode_documents(tokenizer, list(corpus.texts()))
        parted = None if bos == "none" else first
        if options.is_curve:
            groups = [texts] if joined else [[text] for text in texts]
            rows = [evaluation.text.join_texts([text.tokens for text in group], parted) for group in groups]
            return _curve(opened, llm, rows, options, progress)
        if joined:
            # The opening token of each text is scored within the stream, as in training; the first one is added later.
            tokens = evaluation.text.join_texts([text.tokens for text in texts], parted)[0 if parted is None else 1 :]
            sums = [sum(getattr(text, name) for text in texts) for name in ("bytes", "words", "lines")]
            texts = [evaluation.text.EvalDocument(tokens, *sums)]
        scorer, unknown = _scorer(llm, max(limit, window - 1), cached=is_cached), tokenizer.special_tokens.unk
        windows, tick = evaluation.text.WindowOptions(window, stride, bos), partial(progress.update, "reading")
        likelihood = evaluation.text.evaluate_text(
            scorer, texts, windows, first, most=options.max_scored_tokens, unknown=unknown, tick=tick
        )
        stored = report.describe_cache(llm) if is_cached else None
        name = "" if first is None or bos == "none" else tokenizer.token_text(first)
    length = " (as in training)" if window == trained else ""
    read = {"documents": len(texts), "window": window, "stride": stride, "bos": bos, "opening": name or None}
    places = {"none": "no opening token", "start": f"{name} before each text", "window": f"{name} before each window"}
    source = "all files as one text" if joined else format_count(len(texts), "text")
    size = f"{format_count(likelihood.tokens, 'token')}, {format_count(likelihood.bytes, 'byte')}"
    page = [
        ("text", f"{source}, {size}"),
        ("read", f"windows of {window:,}{length}, stride {stride:,}, {places[bos]}; {report.format_cache(stored)}"),
        *report.format_likelihood(likelihood, words=options.word_perplexity),
    ]
    return [{**read, "memory": stored, **report.format_likelihood_line(likelihood)}], page


def _scorer(llm: LLM, longest: int | None, *, cached: bool) -> benchmarks.scorers.TokenScorer:
    scorers = benchmarks.scorers
    return scorers.CachedScorer(llm.engine) if cached else scorers.UncachedScorer(llm.model, longest)


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


def _trained_seq_len(opened: CheckpointHandle) -> int | None:
    """Return the tokens of a training row; None if the checkpoint does not record them."""
    state = {} if opened.training is None else opened.training.state
    length = state.get("run", {}).get("data", {}).get("seq_len")
    return length if isinstance(length, int) else None


def _curve(
    opened: CheckpointHandle, llm: LLM, texts: list[Any], options: EvalOptions, progress: ProgressLine
) -> EvalResult:
    trained = options.trained_seq_len or _trained_seq_len(opened) or opened.config.max_seq_len
    settings: dict[str, Any] = {"multiples": options.length_multiples or evaluation.text.MULTIPLES}
    if options.max_scored_tokens is not None:
        settings["most"] = options.max_scored_tokens
    curve = evaluation.text.extrapolate(llm.model, texts, trained, **settings, tick=progress.update)
    is_step = opened.path.parent.name == "checkpoints"  # then the figure is named after its run
    name = opened.path.parent.parent.name if is_step else opened.path.name
    progress.clear()
    figures = _draw(curve, name, options.length_plot) if options.length_plot else []
    if curve.note:
        note(curve.note)
    shared = {"what": "extrapolation", "name": name, "positions": curve.positions, "trained": curve.trained}
    shared |= {"limit": curve.limit, "rows": curve.rows}
    lines = [{**shared, **with_properties(point, "perplexity", "whole_perplexity")} for point in curve.points]
    return lines, report.format_curve(curve, figures)


def _draw(curve: evaluation.text.LengthCurve, name: str, files: Sequence[Path]) -> list[Path]:
    lengths = [float(point.length) for point in curve.points]
    perplexities = {
        f"{name}: the same tokens": [point.perplexity for point in curve.points],
        "all tokens of the rows": [point.whole_perplexity for point in curve.points],
    }
    series = [inspection.plot.PlotSeries(label, lengths, y, dots=True) for label, y in perplexities.items()]
    title = f"{name} ({curve.positions}), trained on rows of {curve.trained:,} tokens"
    return inspection.plot.draw_series(
        series, files, title=title, x_label="tokens of a row", y_label="perplexity", log_x=True, log_y=True
    )


def eval_pairs(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    if task == "translate":
        evaluation.metrics.check_sacrebleu()
    paths = PairPaths((*((path,) for path in options.data), *options.pairs))
    corpus = open_pairs(paths, options.encoding_errors)
    if corpus.skipped:
        note(f"{format_count(corpus.skipped, 'pair')} with an empty side omitted")
    texts = list(corpus.texts())
    sources, references = texts[::2], texts[1::2]
    sampling = _sampling(opened, options)
    num_beams, limit = sampling["num_beams"], opened.config.max_seq_len
    max_num_seqs = LINES_PER_BATCH * num_beams
    with load_for_eval(opened, options, max_num_seqs=max_num_seqs, max_seq_len=limit, answers=True) as llm:
        require_tokenizer(llm)
        likelihood = None
        if opened.config.kind == "encoder-decoder":
            reader = _scorer(llm, None, cached=bool(options.given_cache_fields))
            pairs, tick = list(zip(sources, references, strict=True)), partial(progress.update, "scoring")
            likelihood = evaluation.text.evaluate_pairs(llm, reader, pairs, tick=tick)
        tick = partial(progress.update, "answering")
        answers = evaluation.text.generate_answers(llm, sources, sampling, tick=tick)
        stored = report.describe_cache(llm)
    form = evaluation.metrics.BleuOptions(options.bleu_tokenization, options.lowercase)
    match = evaluation.metrics.count_exact_matches(answers, references, lower=form.lowercase)
    words = evaluation.metrics.compute_bleu(answers, references, form) if task == "translate" else None
    shown = list(zip(sources, references, answers, strict=True))[: options.print_samples or 0]
    line = {"pairs": len(sources), "search": "greedy" if num_beams == 1 else f"{num_beams} beams", "memory": stored}
    line |= {"max_tokens": sampling["max_tokens"], "exact_match": match.accuracy}
    line |= {} if words is None else asdict(words)
    line |= {} if likelihood is None else report.format_likelihood_line(likelihood)
    line |= {"shown": [{"source": a, "target": b, "text": c} for a, b, c in shown]} if shown else {}
    search = f"{line['search']}, at most {sampling['max_tokens']} tokens"
    page = [("pairs", f"{format_count(len(sources), 'pair')}; {search}")]
    page += [] if likelihood is None else report.format_likelihood(likelihood, words=options.word_perplexity, ends=True)
    page += [] if words is None else report.format_bleu(words, options.bleu_tokenization)
    case = "in lower case, " if options.lowercase else ""
    hits = f"{match.hits:,} of {match.count:,}; {case}stripped white space"
    page.append(("exact", f"{match.accuracy:.2%} ({hits})"))
    for sample in shown:
        page += [("", ""), *zip("<=>", (" ".join(text.split()) for text in sample), strict=True)]
    return [line], page


def _sampling(opened: CheckpointHandle, options: EvalOptions) -> dict[str, Any]:
    """Choose greedy or beam search; a decoder's answer ends with its line."""
    defaults: Mapping[str, Any] = opened.generation.sampling or {}
    chosen = {name: value for name in ("max_tokens", "length_penalty") if (value := getattr(options, name)) is not None}
    max_tokens = int(defaults.get("max_tokens", report.MAX_TOKENS))
    chosen.setdefault("max_tokens", min(max_tokens, opened.config.max_seq_len - 1))
    beams = options.num_beams or 1
    if beams > 1:
        return {**chosen, "num_beams": beams}
    if "length_penalty" in chosen:
        raise UsageError("--length-penalty needs a beam search", "add --num-beams, or omit it")
    stop = {"stop": ("\n",)} if opened.config.kind == "decoder" else {}
    return {**chosen, "num_beams": 1, "temperature": 0.0, **stop}


def eval_labels(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    """Evaluate the labels of words (``tag``) or of texts (``classify``)."""
    per_word, metrics = task == "tag", evaluation.metrics
    read, tick = (metrics.read_tagged, "tagging") if per_word else (metrics.read_labeled, "labeling")
    rows: list[tuple[Any, Any]] = [*read(options.data, options.encoding_errors)]
    inputs, gold = [words for words, _ in rows], [labels for _, labels in rows]
    with load_for_eval(opened, options, max_num_seqs=64, max_seq_len=1) as llm:
        require_tokenizer(llm)
        if per_word:
            tags = evaluation.text.predict_tags(llm, inputs, tick=partial(progress.update, tick))
            gold, predicted = list(chain(*gold)), list(chain(*tags))
        else:
            answers = evaluation.text.answer_all(llm.classify, inputs, partial(progress.update, tick))
            predicted = [labels[0].label for labels in answers]
    scores, size = metrics.score_labels(gold, predicted), format_count(len(rows), "sentence" if per_word else "text")
    size += f", {format_count(scores.count, 'word')}" if per_word else ""
    line = {"sentences": len(rows)} if per_word else {}
    assert isinstance(opened.config.head, cfg.ClassificationHeadConfig)
    return [line | report.format_labels_line(scores)], report.format_labels(scores, opened.config.head.labels, size)


def eval_objective(opened: CheckpointHandle, task: str, options: EvalOptions, progress: ProgressLine) -> EvalResult:
    if options.adapter is not None:
        opened = checkpoint.adapter.merge_adapter(opened, options.adapter)
    limit, tokenizer = opened.config.max_seq_len, opened.tokenizer
    if opened.config.encoder_input is not None:
        limit = min(limit, opened.config.encoder_input.max_seq_len)
    window = options.window or min(limit, _trained_seq_len(opened) or limit)
    if tokenizer is None:
        raise RequestError("the model has no tokenizer, so it cannot read texts")
    if not 2 <= window <= limit:
        raise UsageError(f"--window {window:,}: must be from 2 to the model's limit of {limit:,}")
    if options.document_unit == "joined":
        raise UsageError(f"--document-unit joined: --task {task} evaluates each text separately", "use files or lines")
    run = {} if opened.training is None else opened.training.state.get("run", {}).get("objective", {})
    objective = ObjectiveConfig(**{name: run[name] for name in ("noise_density", "mean_span_length") if name in run})
    noise, seed, counts = objective.noise_density, evaluation.objectives.SEED, [0, 0]
    drawn: report.TextLine = {"seed": seed, "noise_density": noise}
    if task == "chat":
        batches, counts = evaluation.objectives.chat_batches(
            tokenizer, opened.tokenizer_folder, list(options.data), window, options.encoding_errors
        )
        convention = "the assistant's tokens after everything before them; each conversation separately"
    elif task == "masked-lm":
        batches = evaluation.objectives.masked_batches(tokenizer, _open_texts(options).texts(), window, noise)
        convention = f"{noise:.0%} of a row's tokens, 80/10/10, seed {seed}"
    else:
        batches = evaluation.objectives.span_batches(tokenizer, _open_texts(options).texts(), window, objective)
        convention = f"{noise:.0%} of the tokens in spans of {objective.mean_span_length:g}, seed {seed}"
        drawn["mean_span_length"] = objective.mean_span_length
    result = evaluation.objectives.evaluate_objective(
        checkpoint.loader.load_weights(opened, options.dtype, activation_bits=options.activation_bits),
        batches,
        lambda rows: progress.update("reading rows", rows, rows),
    )
    if task == "chat":  # the counts are complete when all batches are read
        drawn = {"conversations": counts[0], "left_out": counts[1]}
    line = {"window": window, "loss": result.loss, "accuracy": result.accuracy, "targets": result.targets, **drawn}
    left = f"; {format_count(counts[1], 'conversation')} longer than that omitted" if counts[1] else ""
    page = [
        ("targets", convention),
        ("read", f"rows of at most {window:,} tokens, each text separately, without a cache{left}"),
        ("loss", f"{result.loss:.4f} nats per target; {format_count(result.targets, 'target')}"),
        ("accuracy", f"{result.accuracy:.4f} of the targets were predicted"),
    ]
    return [line], page
