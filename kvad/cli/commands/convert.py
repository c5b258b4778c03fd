"""``kvad import``, ``export``, ``quantize`` and ``merge``: convert checkpoints and merge adapters.

Output folders are written completely or not at all (``storage``), also after Ctrl-C. No torch until the conversion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from kvad import checkpoint, evaluation
from kvad import config as config_lib
from kvad.cache import CacheConfig, sizing
from kvad.cli.fields import argument, command, option
from kvad.cli.line_batches import model_capabilities
from kvad.cli.output import ProgressLine, print_result, program_path
from kvad.cli.parameters import Dtype, JsonOption, ModelArgument
from kvad.errors import UsageError, format_bytes, format_count, with_article

if TYPE_CHECKING:
    import torch


TOKENS = 1000  # tokens of the cache size in the plan
HEAD_GROUP_SIZE = 32  # weights of the head that share a scale


class _SaveOptions(JsonOption):
    save_dtype: Dtype | None = option("Dtype to store [default: as stored]")
    overwrite: bool = option("Replace a checkpoint in the output folder")

    def torch_dtype(self) -> torch.dtype | None:
        return None if self.save_dtype is None else checkpoint.native.DTYPES[self.save_dtype]


class _ImportOptions(_SaveOptions):
    source: str = argument("SOURCE")
    out: Path | None = argument("[OUT]")
    revision: str | None = option("Branch, tag or commit on the hub [default: main]")
    offline: bool = option("Use only the local cache of the hub")
    token: str | None = option("Token of the hub [default: HF_TOKEN, or that of hf auth login]")


@command("import", _ImportOptions)
def import_command(options: _ImportOptions) -> None:
    """Convert a Hugging Face model (a folder or a name on the hub) or a GGUF file to kvad's layout.

    OUT defaults to ./NAME for a model on the hub; for a folder without OUT only the plan is printed. Every command also
    accepts the Hugging Face model itself; an import is a separate folder, in the chosen dtype, with sha256 sums.

    \b
    kvad import HuggingFaceTB/SmolLM2-135M
    kvad import Helsinki-NLP/opus-mt-de-en runs/opus --save-dtype bfloat16
    kvad import ~/models/llama-3.2-1b
    kvad import model-Q4_K_M.gguf runs/model --save-dtype bfloat16
    """
    source, out = options.source, options.out
    if out is None and not source.startswith((".", "/", "~")) and not Path(source).is_dir():  # a name on the hub
        out = Path(source.removeprefix("hf://").partition("@")[0].rpartition("/")[2])
    if out is not None:
        check_output(out, None, options.overwrite)
    offline = True if options.offline else None
    folder = checkpoint.hub.resolve_model_path(source, revision=options.revision, token=options.token, offline=offline)
    opened = checkpoint.open_checkpoint(folder)
    if not isinstance(opened, checkpoint.hf_layout.HFCheckpoint):
        raise UsageError(f"{source} is a kvad checkpoint already", "every command accepts it")
    if out is not None:
        check_output(out, folder, options.overwrite)
    plan = _plan(opened, options.save_dtype)
    if not options.as_json:
        click.echo("\n".join(_page(source, plan)))
    if out is not None:
        with ProgressLine() as progress:
            done = 0

            def update(name: str, num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                progress.update(name if done < plan["bytes"] else "writing", done, plan["bytes"])

            checkpoint.export.import_hf(opened, out, dtype=options.torch_dtype(), progress=update)
        line = f"written: {out}\nnext:  {program_path()} doctor {out}"
    else:
        name = Path(source).expanduser().resolve().name
        line = f"nothing was written; name a folder for it, as in  kvad import {source} runs/{name}"
    print_result(options.as_json, {"source": source, "out": out, **plan}, line)


class _ExportOptions(ModelArgument, JsonOption):
    out: Path = argument("OUT")
    to: Literal["hf", "gguf"] | None = option(
        "A Hugging Face folder, or a GGUF file for llama.cpp [default: gguf for an OUT that ends in .gguf, else hf]"
    )
    save_dtype: Literal["float64", "float32", "bfloat16", "float16", "q8_0"] | None = option(
        "Dtype to store; GGUF: float32, bfloat16 or q8_0 [default: as stored; GGUF: bfloat16]"
    )
    overwrite: bool = option("Replace a checkpoint or a file at OUT")
    family: str | None = option(
        "Hugging Face model_type, such as llama [default: the origin, or the first that fits]", metavar="TYPE"
    )


@command("export", _ExportOptions)
def export_command(options: _ExportOptions) -> None:
    """Convert a checkpoint to a Hugging Face folder that transformers can load, or to a GGUF file.

    The class or architecture that reads it is printed. A model that none can express is refused, with the reason.

    \b
    kvad export runs/demo demo-hf
    kvad export runs/demo demo-hf --family llama --save-dtype bfloat16 --overwrite
    kvad export runs/demo demo.gguf --save-dtype q8_0
    """
    form = options.to or ("gguf" if options.out.suffix == ".gguf" else "hf")
    (_export_gguf if form == "gguf" else _export_hf)(options)


def _export_hf(options: _ExportOptions) -> None:
    out = options.out
    if options.save_dtype == "q8_0":
        raise UsageError("--save-dtype q8_0: is a type of GGUF files", "add --to gguf")
    check_output(out, None, options.overwrite)
    opened = checkpoint.open_checkpoint(options.model)
    check_output(out, opened.path, options.overwrite)
    dtype = None if options.save_dtype is None else checkpoint.native.DTYPES[options.save_dtype]
    reader = checkpoint.export.export_hf(opened, out, family=options.family, dtype=dtype)
    record = {"model": options.model, "out": out, "format": "hf", "class": reader}
    lines = [f"written: {out}", f"read by: transformers.{reader}.from_pretrained({str(out)!r})"]
    print_result(options.as_json, record, lines)


def _export_gguf(options: _ExportOptions) -> None:
    stored, out = options.save_dtype or "bfloat16", options.out
    if stored not in checkpoint.gguf.FILE_TYPES:
        known = ", ".join(checkpoint.gguf.FILE_TYPES)
        raise UsageError(f"--save-dtype {stored}: must be one of {known} for a GGUF file")
    if options.family is not None:
        raise UsageError("--family: names a class of transformers, not an architecture of GGUF", "leave it out")
    if out.is_dir():
        raise UsageError(f"{out} is a folder, and a GGUF file would replace it", f"name a file, as in {out}.gguf")
    if out.exists() and not options.overwrite:
        raise UsageError(f"{out} exists", "--overwrite replaces it after the new one is complete")
    opened = checkpoint.open_checkpoint(options.model)
    architecture = checkpoint.gguf.export_gguf(opened, out, stored)
    record = {"model": options.model, "out": out, "format": "gguf", "architecture": architecture, "dtype": stored}
    lines = [
        f"written: {out}, {format_bytes(out.stat().st_size)} in {stored}",
        f"read by: llama.cpp, as {architecture}",
    ]
    print_result(options.as_json, record, lines)


def check_output(out: Path, source: Path | None, overwrite: bool) -> None:
    """Check that ``out`` is free, or a checkpoint that may be overwritten and is not the source."""
    if out.name in ("", "..") or out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} cannot be a new folder", "choose another name")
    if source is not None and source.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} contains the source model", "choose another folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / "config.json").is_file():
        raise UsageError(f"{out} exists and is not a checkpoint", "choose another folder; this one is not overwritten")
    if not overwrite:
        raise UsageError(f"{out} exists", "--overwrite replaces it after the new one is complete")


def _plan(opened: checkpoint.hf_layout.HFCheckpoint, dtype: str | None) -> dict[str, Any]:
    """Return sizes of the tensors as they will be stored, and of one sequence's cache in the compute dtype."""
    shapes = config_lib.parameter_shapes
    config, stored = opened.config, str(opened.stored_dtype).removeprefix("torch.")
    chosen = dtype or stored
    if chosen not in get_args(Dtype):
        raise UsageError(
            f"its weights are stored as {chosen}, which kvad does not support", "give --save-dtype bfloat16"
        )
    computed = "float32" if chosen == "float16" else chosen
    source, tokenizer = config.encoder_input, opened.tokenizer
    tokens = min(TOKENS, config.max_seq_len)
    sourced = 0 if source is None else min(TOKENS, source.max_seq_len)
    cache = CacheConfig(max_num_seqs=1, max_seq_len=tokens, block_size=1, dtype=computed, max_source_len=sourced)
    groups = sizing.plan_memory(config, cache, weights_dtype=computed).groups
    sizes = [(group.group.spec.is_cross_attention, group.seq_payload + group.seq_metadata) for group in groups]
    return {
        "architecture": opened.fields.architecture, "origin": opened.origin, "kind": config.kind,
        "parameters": shapes.num_parameters(config), "tensors": len(shapes.weight_shapes(config)),
        "stored": stored, "dtype": chosen, "bytes": shapes.weight_bytes(config, chosen),
        "cache_dtype": computed, "cache_tokens": tokens, "cache": sum(size for cross, size in sizes if not cross),
        "source_tokens": sourced, "source_cache": sum(size for cross, size in sizes if cross),
        "tokenizer": None if tokenizer is None else f"{tokenizer.kind}, {format_count(tokenizer.vocab_size, 'id')}",
    }  # fmt: skip


def _page(source: str, plan: Mapping[str, Any]) -> list[str]:
    stored = plan["dtype"] if plan["dtype"] == plan["stored"] else f"{plan['dtype']}, from {plan['stored']}"
    sizes = (("cache", "cache_tokens", ""), ("source_cache", "source_tokens", " of the source"))
    cache = " and ".join(
        f"{format_bytes(plan[size])} per {format_count(plan[tokens], 'token')}{place}"
        for size, tokens, place in sizes
        if plan[size]
    )
    cache = f"{cache}, in {plan['cache_dtype']}" if cache else "none: it reads each text whole"
    name = plan["architecture"] or "no class named"
    return [
        f"model       {source}: {name} ({plan['origin']}), {with_article(plan['kind'])}",
        f"parameters  {plan['parameters']:,} in {format_count(plan['tensors'], 'tensor')}",
        f"weights     {format_bytes(plan['bytes'])} in {stored}",
        f"cache       {cache}",
        f"tokenizer   {plan['tokenizer'] or 'none: prompts can only be token ids'}",
    ]


class _QuantizeOptions(ModelArgument, JsonOption):
    out: Path = argument("OUT")
    bits: Literal["8", "4"] = option("Bits of a weight", "8")
    group_size: int = option("Weights of a row that share a scale", 32)
    per_channel: bool = option("One scale for each row, instead of groups")
    head_bits: Literal["8", "0"] = option("Bits of a weight of the language head, in groups of 32; 0: leave it", "8")
    data: Path | None = option("Text on which the loss of the weights is measured", metavar="FILE")
    data_tokens: int = option("Tokens of it that are read", 8192)
    overwrite: bool = option("Replace a checkpoint in the output folder")


@command("quantize", _QuantizeOptions)
def quantize_command(options: _QuantizeOptions) -> None:
    """Store attention, MLPs and experts as int8 or int4, and the head as int8: less memory, faster decoding.

    Each group of weights has a scale, with 4 bits also a minimum; activations keep their precision, unless a command
    gets --activation-bits 8. Embeddings, norms, biases and routers stay as they are, so a head that is tied to the
    token table gets a copy. Every command reads OUT; training and export read dequantized weights, and the token
    table of a tied head.

    \b
    kvad quantize runs/demo runs/demo-int8
    kvad quantize ./SmolLM2-135M smollm-int4 --bits 4 --data book.txt
    """
    out, bits, group_size = options.out, int(options.bits), 0 if options.per_channel else options.group_size
    check_output(out, None, options.overwrite)
    if options.group_size < 1:
        raise UsageError(f"--group-size: must be at least 1, got {options.group_size}")
    if options.data_tokens < 2:
        raise UsageError(f"--data-tokens: must be at least 2, got {options.data_tokens}")
    opened = checkpoint.open_checkpoint(options.model)
    check_output(out, opened.path, options.overwrite)
    windows = None if options.data is None else _windows(opened, options.data, options.data_tokens)
    with ProgressLine() as progress:
        total, done = opened.weight_bytes(str(opened.stored_dtype).removeprefix("torch.")), 0

        def update(name: str, num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress.update(name, done, total)

        head_bits = int(options.head_bits)
        form = checkpoint.folder.WeightQuantization(bits, group_size, head_bits, HEAD_GROUP_SIZE if head_bits else 0)
        result = checkpoint.export.quantize_checkpoint(opened, out, form, update)
        record: dict[str, Any] = {"model": options.model, "out": out, "bits": bits, "group_size": group_size}
        record |= result._asdict()
        lines = [
            f"written: {out}, {format_bytes(result.bytes_after)} (before: {format_bytes(result.bytes_before)})",
            *_quantized_lines(opened.config, result, form),
        ]
        if windows is not None:
            count = sum(len(window) - 1 for window in windows)
            load, small = checkpoint.loader.load_weights, checkpoint.open_checkpoint(out)
            loss, rounded = evaluation.objectives.compare_weights(
                load(opened),
                [load(small), load(small, activation_bits=8)],
                windows,
                lambda tokens: progress.update("measuring the loss", tokens, count),
            )
            read = f"{format_count(loss.tokens, 'token')} of {options.data}"
            before, after = math.exp(loss.loss_before), math.exp(loss.loss_after)
            with_rounding = {"perplexity": math.exp(rounded.loss_after), "kl_divergence": rounded.divergence}
            record |= {"perplexity_before": before, "perplexity_after": after, "kl_divergence": loss.divergence}
            record |= {"tokens": loss.tokens, "activation_bits_8": with_rounding}
            lines += [
                f"perplexity: {after:.4f} (before: {before:.4f}), KL divergence {loss.divergence:.2e} nats, {read}",
                f"with --activation-bits 8: {with_rounding['perplexity']:.4f}, KL {rounded.divergence:.2e} nats",
            ]
    next_command = model_capabilities(opened.config)[1][0]
    print_result(options.as_json, record, [*lines, f"next:  {program_path()} {next_command} {out}"])


def _quantized_lines(
    config: config_lib.ModelConfig,
    result: checkpoint.export.QuantizationResult,
    form: checkpoint.folder.WeightQuantization,
) -> list[str]:
    """Describe what was quantized and what was left."""
    matrices, head_size = format_count(result.quantized, "matrix", "matrices"), form.head_group_size
    lines = [f"quantized: {matrices}; the largest error is {result.max_error:.2%} of the largest weight"]
    if result.left:
        lines.append(f"left: {', '.join(result.left[:3])}, whose width groups of {form.group_size} do not divide")
    if result.head_bits:
        copied = f"; {format_bytes(result.head_copy)} in addition to the token table, to which it is tied"
        head = checkpoint.folder.describe_groups(result.head_bits, head_size) + (copied if result.head_copy else "")
    elif not form.head_bits:
        head = "left, as requested"
    elif not isinstance(config.head, config_lib.LanguageHeadConfig):
        head = "left, it is no language head"
    else:
        head = f"left, groups of {head_size} do not divide its width of {config_lib.head_input_size(config)}"
    return [*lines, f"head: {head}"]


def _windows(opened: checkpoint.CheckpointHandle, data: Path, num_tokens: int) -> list[Any]:
    """Return the first tokens of a text in windows of the model's length; the loss is that of a decoder."""
    if opened.config.kind != "decoder":
        raise UsageError(f"--data: the loss is measured on decoders, and this is {with_article(opened.config.kind)}")
    if opened.tokenizer is None:
        raise UsageError("--data: the model has no tokenizer, so it cannot read a text")
    try:
        text = data.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {data}: {error}") from None
    tokens = evaluation.objectives.text_windows(opened.tokenizer, [text], num_tokens)
    first = next(tokens, None)
    if first is None:
        raise UsageError(f"--data {data}: has fewer than 2 tokens")
    length = min(512, opened.config.max_seq_len)
    return [first[low : low + length] for low in range(0, len(first) - 1, length)]


class _MergeOptions(_SaveOptions):
    base: Path = argument("BASE")
    adapter: Path = argument("ADAPTER")
    out: Path = option("Folder of the merged model", dataclasses.MISSING, short="-o")


@command("merge", _MergeOptions)
def merge_command(options: _MergeOptions) -> None:
    """Merge a LoRA adapter, kvad's or PEFT's, into its base model.

    ADAPTER is a folder, or the run of kvad train --lora-rank. BASE keeps its layout, its tokenizer and every
    other file. A base that the adapter was not trained on is refused, if the adapter records its base.

    \b
    kvad merge runs/demo runs/adapter --out runs/merged
    kvad merge ./SmolLM2-135M ./its-adapter --out merged --save-dtype bfloat16
    """
    out, adapter = options.out, options.adapter
    check_output(out, None, options.overwrite)
    opened = checkpoint.adapter.merge_adapter(checkpoint.open_checkpoint(options.base), adapter)
    for source in (opened.base.path, opened.path):
        check_output(out, source, options.overwrite)
    if not opened.factors:
        raise UsageError(f"{adapter} contains no matrices")
    checkpoint.export.write_merged(opened, out, options.torch_dtype())
    record = {"base": options.base, "adapter": adapter, "out": out, "parts": sorted(opened.factors)}
    merged, next_command = format_count(len(opened.factors), "part"), model_capabilities(opened.config)[1][0]
    print_result(
        options.as_json, record, f"written: {out}, {merged} merged\nnext:  {program_path()} {next_command} {out}"
    )
