"""``kvad inspect MODEL``: contents of a checkpoint from its headers, the architecture, attention, and the cache.

The cache is shown token by token: as text, JSON (schema in kv-cache/inspect.md) or HTML. A session is never written.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from kvad import checkpoint, engine, inspection, planning
from kvad import config as config_lib
from kvad.cache import sessions
from kvad.cli import parameters
from kvad.cli.commands.plan import memory_lines, request_lines
from kvad.cli.commands.session import read_session_header, with_saved_options
from kvad.cli.fields import command, flag_of, given_fields, is_given, option
from kvad.cli.output import format_table, json_line, note, print_result
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, UsageError, format_bytes, format_count
from kvad.train.config import RunConfig

MAX_TOKENS = 32
MAX_SEQS = 8
DRAWINGS = {  # drawing -> its formats, the default first
    "attention": ("terminal", "svg", "png", "html", "json"),
    "tree": ("text", "svg", "mermaid", "json"),
}
SUFFIXES = {".svg": "svg", ".png": "png", ".html": "html", ".json": "json", ".mmd": "mermaid"}


class _TraceOptions(parameters.CacheFlags, parameters.SessionDirOption):
    section = "Trace of the cache, with --cache"
    prompt: tuple[str, ...] = option("Prompt; - reads standard input", common=True)
    file: tuple[Path, ...] = option("File with a prompt", metavar="FILE", common=True)
    ids: bool = option("Read prompts as token ids: '12 7 99'", common=True)
    max_tokens: int | None = option(f"Number of tokens to generate [default: {MAX_TOKENS}]", short="-n", common=True)
    n: int | None = option("Samples of each prompt [default: 1]", common=True)
    temperature: float | None = option("Sampling temperature; 0 is greedy [default: 0]", short="-t", common=True)
    seed: int | None = option("Seed of the samples [default: 0]", short="-s", common=True)
    session: str | None = option("Session that the prompts continue; it is not changed", metavar="NAME", common=True)
    trace_token: tuple[int, ...] = option("Print the events of this token", metavar="I", common=True)
    html: Path | None = option(
        "Write an HTML page to FILE, also with --attention", kind=parameters.OUTPUT_FILE, common=True
    )


class _InspectOptions(parameters.ModelArgument, _TraceOptions, parameters.JsonOption):
    tensors: bool = option("List every tensor: dtype, shape, bytes")
    check: bool = option("Read every file and compare its sha256 with the manifest")
    tree: bool = option("Draw the architecture, also of a config or a known model")
    attention: str | None = option("Draw the attention for TEXT (loads the model)")
    target: str | None = option(
        "With --attention and an encoder-decoder: the target of TEXT [default: the model's output]"
    )
    layer: tuple[str, ...] = option("Layer to draw, or 'all' [default: 0; with --cache: all]", metavar="I")
    head: tuple[str, ...] = option("Head to draw, or 'all' [default: 0; with --cache: all]", metavar="J")
    use_cache: bool = option("With --attention: compute through the KV cache")
    format: Literal["terminal", "svg", "png", "html", "json", "text", "mermaid"] | None = option(
        "Format of the drawing [default: text or terminal]"
    )
    out: Path | None = option("File of the drawing [default: stdout]", short="-o", kind=parameters.OUTPUT_FILE)
    cache: bool = option("Run prompts and show the state of their tokens in the cache")

    def reject(self, names: Iterable[str], reason: str) -> None:
        """Raise UsageError if one of these options is given."""
        for name in names:
            if is_given(getattr(self, name)):
                raise click.UsageError(f"{flag_of(name)} {reason}")


@command("inspect", _InspectOptions)
def inspect_command(options: _InspectOptions) -> None:
    """Show the config, parameters, tensors, memory, tokenizer and training of a checkpoint or a Hugging Face model.

    Only headers are read, unless --check is given. Exit code 1 if a kvad checkpoint has no manifest, or if files or
    tensors are missing or do not match manifest and config; 2 if --check finds a changed file.

    \b
    kvad inspect google/gemma-2-2b --tree
    kvad inspect runs/demo --attention "def add(a, b):" --layer all --head all --html heads.html
    kvad inspect runs/demo --attention "def add(a, b):" --layer 2 --head all --out heads.png
    kvad inspect runs/demo --cache --prompt "def add(a, b):" --policy "heavy-hitters(32)" --html cache.html
    """
    if options.cache:
        options.reject(("tensors", "check", "tree", "attention"), "and --cache exclude each other.")
        reason = "does not apply to --cache, which writes text, --json or --html."
        options.reject(("use_cache", "target", "format"), reason)
        _trace_cache(options)
        return
    source = click.get_current_context().get_parameter_source
    model_names = {field.name for field in fields(parameters.DeviceOptions)} if options.attention is not None else set()
    trace_names = [field.name for field in fields(_TraceOptions) if field.name not in {*model_names, "html"}]
    options.reject((name for name in trace_names if source(name) is ParameterSource.COMMANDLINE), "needs --cache.")
    if options.tree and options.attention is not None:
        raise click.UsageError("--tree and --attention exclude each other.")
    if options.attention is None:
        options.reject(("html",), "needs --cache or --attention TEXT.")
        options.reject(("layer", "head", "target", "use_cache"), "needs --attention TEXT.")
    if not options.tree and options.attention is None:
        options.reject(("format", "out"), "needs --tree or --attention TEXT.")
        summary = inspection.checkpoint.summarize_checkpoint(options.model, check=options.check)
        record, page = inspection.checkpoint.summary_to_json(summary), _page(summary, options.tensors)
        print_result(options.as_json, record, page, failed=bool(summary.problems))
        return
    drawn, out = "tree" if options.tree else "attention", options.out
    options.reject(("tensors", "check"), f"and --{drawn} exclude each other.")
    if options.html is not None:
        options.reject(("out", "format"), "and --html exclude each other.")
        out = options.html
    form = "html" if options.html is not None else _format(drawn, options)
    if form == "png" and out is None:
        raise UsageError("a PNG needs a file", "name it: --out heads.png")
    drawing = _tree(options.model, form, out) if options.attention is None else _draw(options, options.attention, form)
    if drawing is not None:
        _write(drawing.rstrip("\n"), out)
    if out is not None:
        note(f"{out}: open it in a browser" if form == "html" else f"{out}: written")


def _write(text: str, out: Path | None) -> None:
    """Print a text without its final newline, or write it to a file."""
    if out is None:
        click.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


def _indices(name: str, values: tuple[str, ...], default: list[int]) -> list[int] | None:
    """Parse layer or head indices; None is all. The model checks the range."""
    if "all" in values:
        return None
    if bad := next((text for text in values if not text.isdecimal()), None):
        raise UsageError(f"--{name} {bad}: not a number", f"give an index from 0, or --{name} all")
    return [int(text) for text in dict.fromkeys(values)] or default


# ---------------------------------------------------------------- trace of the cache


def _trace_cache(options: _InspectOptions) -> None:
    layers, heads = _indices("layer", options.layer, []) or None, _indices("head", options.head, []) or None
    _check_trace(options)
    report = _trace(options)
    num_heads = max(group.kv_heads for group in report.groups)
    for name, chosen, count in (("layer", layers, report.layers), ("head", heads, num_heads)):
        if bad := [index for index in chosen or () if index >= count]:
            raise RequestError(f"--{name} {bad[0]} is not one of 0..{count - 1}")
    if options.html is not None:
        options.html.write_text(inspection.trace_to_html(report), encoding="utf-8")
        note(f"{options.html}: open it in a browser")
    out = options.out
    if options.as_json or (out is not None and out.suffix == ".json"):
        text = json_line(inspection.trace_to_json(report))
    else:
        width = 100 if out is not None else shutil.get_terminal_size((100, 24)).columns
        text = inspection.trace_to_text(report, width=width, layers=layers, heads=heads, tokens=options.trace_token)
    _write(text, out)


def _check_trace(options: _InspectOptions) -> None:
    if not options.prompt and not options.file and options.session is None:
        raise click.UsageError("--cache needs something to run: give --prompt TEXT, --file FILE or --session NAME.")
    given_here = click.get_current_context().get_parameter_source("session_dir") is ParameterSource.COMMANDLINE
    if options.session is None and given_here:
        raise click.UsageError("--session-dir needs --session NAME.")
    for name in ("deterministic", "compile"):
        if getattr(options, name):
            raise click.UsageError(f"--{name} and --cache exclude each other: the trace uses its own kernel.")
    for name, minimum in (("max_tokens", 0), ("n", 1), ("max_num_seqs", 1)):
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UsageError(f"{flag_of(name)} {value}: must be at least {minimum}")
    if bad := [index for index in options.trace_token if index < 0]:
        raise UsageError(f"--trace-token {bad[0]}: must be at least 0")


def _trace(options: _InspectOptions) -> inspection.TraceReport:
    session, path, history = options.session, None, list[int]()
    if session is not None:
        path, header = read_session_header(session, options)
        options = with_saved_options(options, header)
        history = sessions.directory.read_tokens(path, header.metadata["history"])
    load = parameters.load_fields(options)
    opened = checkpoint.open_checkpoint(options.model, rope_scaling=options.rope_scaling)
    prompts = _prompts(opened, options, history)
    max_tokens = MAX_TOKENS if options.max_tokens is None else options.max_tokens
    longest = max(map(len, prompts)) + max(max_tokens, 1)
    num_seqs = min(MAX_SEQS, len(prompts) * (options.n or 1))
    with parameters.open_llm(opened, load, max_num_seqs=num_seqs, max_seq_len=longest) as llm:
        given = given_fields(options, SamplingParams)
        sampling = llm.sampling_params(**{"temperature": 0.0, "n": 1, "seed": 0, **given, "max_tokens": max_tokens})
        tokenizer = llm.tokenizer
        piece: Callable[[int], str] = str if tokenizer is None else tokenizer.token_text
        loaded = llm.session(path, cache_salt=options.cache_salt)
        return inspection.trace_requests(
            llm.engine,
            prompts,
            sampling,
            model=str(options.model),
            piece=piece,
            resume=loaded.state,
            session=session or "",
            cache_salt=loaded.cache_salt or "",
        )


def _prompts(opened: checkpoint.CheckpointHandle, options: _InspectOptions, history: Sequence[int]) -> list[list[int]]:
    """Encode the prompts; ``history`` is the tokens of the session that they continue."""
    if opened.config.kind != "decoder":
        raise RequestError(f"--cache needs a decoder, got an {opened.config.kind}", "use a decoder")
    encoder = engine.PromptEncoder(opened.config, opened.tokenizer, opened.generation)
    texts = [*map(parameters.read_text_or_stdin, options.prompt), *map(parameters.read_text, options.file)]
    prompts = [parameters.parse_token_ids(text, "--ids") if options.ids else text for text in texts]
    if history:
        encoded = [[*history, *encoder.encode_continuation(prompt)] for prompt in prompts or [""]]
    else:
        encoded = [encoder.encode_prompt(prompt) for prompt in prompts]
    limit = opened.config.max_seq_len
    for tokens in encoded:
        if len(tokens) > limit and not options.endless:
            length = format_count(len(tokens), "token")
            raise RequestError(f"the prompt has {length}, the model's limit is {limit}", "shorten it")
    return encoded


# ---------------------------------------------------------------- drawings


def _format(drawn: str, options: _InspectOptions) -> str:
    """Choose the format by --format, else by the suffix of --out, else the default of the drawing."""
    known, form, out = DRAWINGS[drawn], options.format, options.out
    if options.as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other.")
    if options.as_json:
        return "json"
    if form is not None:
        if form not in known:
            raise click.UsageError(f"--{drawn} has no format {form}: {', '.join(known)}.")
        return form
    if out is None or out.suffix == ".txt":
        return known[0]
    suffix_format = SUFFIXES.get(out.suffix, "")
    if suffix_format not in known:
        suffixes = ", ".join(suffix for suffix, name in SUFFIXES.items() if name in known)
        raise UsageError(f"{out}: the suffix is not a known format", f"name it {suffixes} or .txt, or give --format")
    return suffix_format


def _tree(model: Path, form: str, out: Path | None) -> str | None:
    """Return the tree as text, or None if a figure was written."""
    target, trees = planning.read_target(str(model)), inspection.model_tree
    stored = "float32" if target.stored_dtype in (None, "float16") else target.stored_dtype
    root = trees.build_model_tree(target.config, Path(target.name).name or target.name, dtype=stored)
    if form == "svg":
        inspection.plot.draw_boxes(trees.tree_to_boxes(root), [out or sys.stdout.buffer])
        return None
    if form == "json":
        return json_line(root)
    return trees.tree_to_mermaid(root) if form == "mermaid" else trees.tree_to_text(root)


def _draw(options: _InspectOptions, text: str, form: str) -> str | None:
    """Return the attention of ``text`` as text, or None if a figure was written."""
    layers, heads = _indices("layer", options.layer, [0]), _indices("head", options.head, [0])
    target, plot = {} if options.target is None else {"target": options.target}, inspection.attention_plot
    summary = inspection.checkpoint.attention_maps(
        options.model,
        text,
        layers=layers,
        heads=heads,
        cached=options.use_cache,
        **target,
        **parameters.model_fields(options),
    )
    if form in ("png", "svg"):
        inspection.plot.draw_attention(summary.pieces, summary.maps, [options.out or sys.stdout.buffer])
        return None
    if form == "html":
        return engine.attention_to_html(summary.pieces, summary.maps, f"Attention of {options.model}")
    if form == "json":
        return json_line(plot.attention_to_json(summary.tokens, summary.pieces, summary.maps))
    width = 100 if options.out is not None else shutil.get_terminal_size().columns
    return "\n\n".join(plot.attention_to_text(summary.pieces, one, width) for one in summary.maps)


# ---------------------------------------------------------------- contents


def _page(summary: inspection.checkpoint.CheckpointSummary, tensors: bool) -> list[str]:
    outline = inspection.checkpoint.outline_values
    dtypes = sorted({tensor.dtype for tensor in summary.tensors})
    size = sum(tensor.bytes for tensor in summary.tensors)
    count = f"{format_count(summary.num_parameters, 'parameter')} in {format_count(len(summary.tensors), 'tensor')}"
    active = config_lib.parameter_shapes.num_active_parameters(summary.config)
    if active < config_lib.parameter_shapes.num_parameters(summary.config):
        count += f", {active:,} parameters used by a token"
    origin = "" if summary.origin is None else f"Hugging Face's {summary.origin}, "
    info, tokenizer = summary.tokenizer, "none; prompts can only be token ids"
    if info is not None:
        specials = ", ".join(f"{name} = {number}" for name, number in info.specials.items()) or "no specials"
        tokenizer = f"{info.kind}, {format_count(info.vocab, 'token')}; {specials}"
    dequantized = "" if summary.origin is None else "; dequantized when it is loaded"
    lines = [
        f"{summary.path}: {origin}{count}, {', '.join(dtypes)}, {format_bytes(size)}",
        *([f"quantized: {summary.quantization}{dequantized}"] if summary.quantization else []),
        *(f"problem: {problem}" for problem in summary.problems),
        *([f"config.json: not used: {', '.join(summary.unused_keys)}"] if summary.unused_keys else []),
        "",
        "config, without defaults (--json has every value)",
        *(f"  {line}" for line in outline(config_lib.serialization.changed_fields(summary.config))),
        "",
        "parameters",
        *(
            f"  {part:<12}{count:>16,}  {count / max(summary.num_parameters, 1):>6.1%}"
            for part, count in summary.parameters.items()
            if count
        ),
        "",
        f"memory of {request_lines(summary.plan)} (kvad plan estimates other sizes)",
        *(f"  {line}".rstrip() for line in memory_lines(summary.plan)),
        "",
        f"manifest: {_manifest(summary)}",
        f"tokenizer: {tokenizer}",
    ]
    if summary.training is None:
        lines.append("training: not recorded in the checkpoint")
    else:
        training = {**summary.training, "run": _changed_run(summary.training.get("run", {}))}
        lines += ["training, without defaults", *(f"  {line}" for line in outline(training))]
    if tensors:
        rows = [(each.name, each.dtype, str(each.shape), f"{each.bytes:,}") for each in summary.tensors]
        lines += ["", "tensors", *(f"  {line}" for line in format_table(rows, left=(0, 1)))]
    return lines


def _changed_run(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables of a run file without the values that every run has by default."""
    defaults = RunConfig().to_dict()
    return {
        table: {key: value for key, value in values.items() if value != defaults.get(table, {}).get(key)}
        if isinstance(values, Mapping)
        else values
        for table, values in run.items()
    }


def _manifest(summary: inspection.checkpoint.CheckpointSummary) -> str:
    if summary.files is None and summary.origin is not None:
        return "a Hugging Face folder has none; kvad doctor reads every file"
    if summary.files is None:
        return "none; the files cannot be compared with what was saved"
    checked = "every sha256 agrees" if summary.checked else "--check compares their sha256"
    return f"{format_count(summary.files, 'file')}; {checked}"
