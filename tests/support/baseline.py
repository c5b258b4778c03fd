# ruff: noqa: E501  (command lines)
"""Record of what kvad computes, and the comparison of a later commit with it.

    python -m tests.support.baseline --out FILE                      # record
    python -m tests.support.baseline --compare dev/baseline.json     # recompute and compare; exit code 1 if different
    python -m tests.support.baseline --compare dev/baseline.json --only families,plan

The record is one JSON object: an environment, and one entry per case (`generate/greedy`, `training/masked`,
`families/llama`). It is computed on one thread from fixed seeds, nearly all in float32, so a later commit must give
the same bits on the same processor type and the same torch. Volatile values (times, rates, paths, machine, hashes of
renamed things) are dropped by key.

A commit that renames keys or changes an option edits the first half of this file and writes the record again, after
it compared the numbers of both records.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import random
import shlex
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvad.cli.main import main as run_cli
from kvad.errors import KvadError

# ---------------------------------------------------------------- names of kvad: edit this half when they change
from kvad.llm import LLM
from tests.hf_parity import checkpoint as family_goldens

# Keys whose values differ from run to run, from commit to commit or from machine to machine: never recorded.
VOLATILE_KEYS = {
    "available", "bandwidth", "checkpoint", "commit", "costs", "date", "digest", "early", "elapsed", "engine_ms", "eta",
    "eval_seconds", "evaluating", "exponent", "fastest", "fingerprint", "first_token", "fits", "flatness", "gemm_flops", "late",
    "machine", "memory_peak", "mfu", "model_ms", "out", "path", "seconds", "slowest", "speedup", "step_seconds",
    "threads", "time", "tokens_per_second", "torch", "update", "utilisation", "version",
}  # fmt: skip
VOLATILE_SUFFIXES = ("sha256",)
# The same, only under these keys: the last key and some of those before it ("stats.prefix_cache.bytes").
VOLATILE_PATHS: set[str] = {
    "training.memory",  # of the process
    "inspect.why.text",  # a sentence for every token; its numbers are recorded
    "storage.bytes", "disk.bytes", "store.bytes_in", "store.bytes_out",  # of files
    "trial.utilization",
}  # fmt: skip
# Sentences: reworded by changes of prose. A difference is printed as a note and is no failure.
PROSE_KEYS: set[str] = {
    "rules", "notes", "sources", "skipped", "why", "finding.what", "finding.evidence", "finding.causes",
    "finding.sentence", "places.text", "parking.fault", "table.refused", "groups.kept",
}  # fmt: skip
# Upper bounds of `plan`: with --closer-bounds a smaller number is a note and no failure.
BOUND_KEYS = {"bytes.scratch", "bytes.activations", "bytes.total"}

_TUNE = (
    "--seq-len 64 --batch-size 4 --steps 20 --seed 3 --precision fp32 --lr 3e-3 --eval-interval 10 --save-interval 20"
    " --set train.log_interval=1 --json"
)
_TRAIN = f"--tokenizer byte {_TUNE}"
_LINES = "--set data.document_unit=lines"
OUT_FLAG = "--out"
# name -> arguments of `kvad`, without the folder of the run, which other commands call {name}.
TRAINING = {
    "decoder": f"train {{text}} --preset tiny {_TRAIN} --steps 40",
    "next-token": f"train {{lines}} --preset tiny {_TRAIN} {_LINES}",
    "bpe": f"train {{text}} --preset tiny {_TRAIN} --tokenizer bpe --vocab-size 300",
    "words": f"train {{lines}} --preset tiny {_TRAIN} --tokenizer word {_LINES}",
    "long": f"train {{text}} --preset tiny {_TRAIN} --seq-len 256",
    "accumulate": f"train {{text}} --preset tiny {_TRAIN} --gradient-accumulation-steps 3 --set train.activation_checkpointing=true",
    "best-fit": f"train {{lines}} --preset tiny {_TRAIN} {_LINES} --set data.packing=best-fit",
    "stream": f"train {{lines}} --preset tiny {_TRAIN} {_LINES} --set data.order=stream",
    "windows": f"train {{text}} --preset tiny {_TRAIN} --set data.order=windows",
    "bf16": f"train {{text}} --preset tiny {_TRAIN} --precision bf16",
    "dropout": f"train {{text}} --preset tiny {_TRAIN} --set dropout.residual=0.1 --set dropout.attention=0.1",
    "layer-norm": f"train {{text}} --preset shakespeare-char {_TRAIN}",
    "muon-wsd": f"train {{text}} --preset tiny {_TRAIN} --set optim.name=muon --set optim.schedule=wsd",
    "adafactor": f"train {{text}} --preset tiny {_TRAIN} --set optim.name=adafactor --set optim.schedule=linear",
    "averages": f"train {{text}} --preset tiny {_TRAIN} --set optim.ema_decay=0.9 --set optim.schedule=constant",
    "init": f"train {{lines}} --init {{decoder}} {_TUNE} {_LINES}",
    "lora": f"train {{lines}} --init {{decoder}} --lora-rank 4 {_TUNE} {_LINES}",
    "summarizer": (
        f"train {{text}} --objective summarizer --init {{decoder}} {_TUNE} --set summarizer.ratio=4"
        " --set summarizer.recent=8 --set summarizer.interval=8"
    ),
    "chat": f"train {{chat_data}} --objective chat --preset tiny {_TRAIN} --seq-len 128",
    "seq2seq": f"train {{pairs}} --preset transformer-tiny {_TRAIN}",
    "label-smoothing": f"train {{pairs}} --preset marian-tiny {_TRAIN} --set objective.label_smoothing=0.1",
    "scheduled-sampling": f"train {{pairs}} --preset transformer-tiny {_TRAIN} --set objective.scheduled_sampling=0.5",
    "spans": f"train {{lines}} --objective span-corruption --preset t5-tiny {_TRAIN} {_LINES}",
    "masked": f"train {{lines}} --objective masked-lm --preset encoder-tiny {_TRAIN} {_LINES}",
    "tag": f"train {{tags}} --objective tag --preset encoder-tiny {_TRAIN} --seq-len 96",
    "tag-hidden-inputs": (
        f"train {{tags}} --objective tag --preset encoder-tiny {_TRAIN} --seq-len 96 --set objective.input_mask_ratio=0.2"
    ),
    "classify": f"train {{labels}} --objective classify --preset encoder-tiny {_TRAIN}",
}
METRICS_FILE = "metrics.jsonl"
METRICS_KIND = "kind"  # the key of a line that says what it holds

_GENERATE = "generate {decoder} 'ada bob ' 'the cache cleo' --max-tokens 16"
_PLAN = "--bandwidth 20 --json"
_LLAMA = "plan llama-3-8b --dtype bfloat16 --max-seq-len 8192"
_INSPECT = "inspect {decoder} --cache --prompt 'ada bob cleo' --max-tokens 10 --json"
# name -> one command per line; what each prints as JSON is recorded.
COMMANDS = {
    "generate/greedy": f"{_GENERATE} --temperature 0 --logprobs 2 --prompt-logprobs 1 --stats --json",
    "generate/sampled": f"{_GENERATE} --seed 7 --n 2 --logprobs 0 --json",
    "generate/sampled-filters": f"{_GENERATE} --seed 8 --temperature 0.9 --top-k 20 --top-p 0.9 --min-p 0.01 --json",
    "generate/typical": f"{_GENERATE} --seed 9 --typical-p 0.8 --logit-bias 97=1.5 --bad-word ada --stop bo --json",
    "generate/penalties": (
        f"{_GENERATE} --seed 9 --repetition-penalty 1.3 --presence-penalty 0.2 --frequency-penalty 0.1"
        " --no-repeat-ngram-size 2 --min-tokens 4 --json"
    ),
    "generate/beams": f"{_GENERATE} --num-beams 4 --n 2 --length-penalty 0.7 --json",
    "generate/contiguous": f"{_GENERATE} --temperature 0 --layout contiguous --logprobs 0 --stats --json",
    "generate/heavy-hitters": (
        f"{_GENERATE} --temperature 0 --policy 'heavy-hitters(8, 2, 4)' --block-size 4 --logprobs 0 --stats --json"
    ),
    "generate/sinks": f"{_GENERATE} --seed 3 --policy 'sinks(2, 8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/window": f"{_GENERATE} --seed 3 --policy 'window(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/truncate": f"{_GENERATE} --seed 3 --policy 'block-window(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/snapkv": f"{_GENERATE} --seed 3 --policy 'snapkv(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/tova": f"{_GENERATE} --seed 3 --policy 'tova(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/key-norm": f"{_GENERATE} --seed 3 --policy 'key-norm(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/random": f"{_GENERATE} --seed 3 --policy 'random(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/quest": f"{_GENERATE} --seed 3 --policy 'quest(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/tiered": (
        f"{_GENERATE} --seed 3 --policy 'tiered(8, quantized=8, interval=4, summaries=4, ratio=4)' --block-size 4"
        " --logprobs 0 --stats --json"
    ),
    "generate/summarizer": (
        f"{_GENERATE} --seed 3 --policy 'tiered(8, quantized=0, interval=8, summaries=16, ratio=4)' --block-size 4"
        " --summarizer {summarizer} --logprobs 0 --stats --json"
    ),
    "generate/offload": f"{_GENERATE} --seed 3 --policy 'offload(8)' --block-size 4 --logprobs 0 --stats --json",
    "generate/full-row-offload": (
        f"{_GENERATE} --seed 3 --max-tokens 40 --max-seq-len 24 --block-size 4 --overflow offload --offload-dir {{dir}}/spill"
        " --logprobs 0 --stats --json"
    ),
    "generate/offload-to-disk": (
        f"{_GENERATE} --seed 3 --policy 'offload(8)' --block-size 4 --offload-ram 0 --offload-dir {{dir}}/offload"
        " --logprobs 0 --stats --json"
    ),
    "generate/endless": f"{_GENERATE} --seed 3 --max-tokens 80 --endless --block-size 4 --logprobs 0 --stats --json",
    "generate/full-row-summaries": (
        f"{_GENERATE} --seed 3 --max-tokens 40 --max-seq-len 32 --block-size 4 --overflow summarize --logprobs 0 --json"
    ),
    "generate/int8": f"{_GENERATE} --temperature 0 --cache-dtype int8 --logprobs 0 --stats --json",
    "generate/int4-fp8": (
        f"{_GENERATE} --temperature 0 --cache-key-dtype int4-channel --cache-value-dtype fp8-e4m3 --logprobs 0 --stats --json"
    ),
    "generate/rope-at-read": (
        f"{_GENERATE} --temperature 0 --rope-at read --policy 'sinks(2, 8)' --block-size 4 --logprobs 0 --json"
    ),
    "generate/preempted": (
        f"{_GENERATE} 'eve finn gus' --temperature 0 --block-size 4 --num-blocks 14 --max-num-seqs 3 --ignore-eos --logprobs 0"
        " --stats --json"
    ),
    "generate/swapped": (
        f"{_GENERATE} 'eve finn gus' --temperature 0 --block-size 4 --num-blocks 14 --max-num-seqs 3 --ignore-eos --logprobs 0"
        " --policy '0: full; key-norm(8, interval=4)' --swap-space 1MiB --stats --json"
    ),
    "generate/swapped-to-disk": (
        f"{_GENERATE} 'eve finn gus' --temperature 0 --block-size 4 --num-blocks 14 --max-num-seqs 3 --ignore-eos --logprobs 0"
        " --policy '0: full; key-norm(8, interval=4)' --swap-space 0 --swap-dir {dir}/swap --stats --json"
    ),
    "generate/deterministic": f"{_GENERATE} --seed 2 --deterministic --logprobs 0 --stats --json",
    "generate/lora": "generate {decoder} 'ada ' --adapter {lora} --seed 1 --max-tokens 16 --logprobs 0 --json",
    "storage/prefix-cache": (
        "prefix add {decoder} --prompt 'ada bob cleo dan eve finn gus ' --name p --prefix-cache-dir {dir}/tier --block-size 4"
        " --json\n"
        "generate {decoder} 'ada bob cleo dan eve finn gus ivo' --prefix-cache-dir {dir}/tier --block-size 4 --max-tokens 8"
        " --temperature 0 --logprobs 0 --stats --json"
    ),
    "storage/session": (
        "session save {decoder} s --prompt 'ada bob cleo ' --session-dir {dir}/sessions --json\n"
        "session continue {decoder} s --prompt 'dan ' --session-dir {dir}/sessions --max-tokens 8 --seed 4 --json"
    ),
    "generate/translate": (
        "translate {seq2seq} {sources} --max-tokens 12 --quiet --json\n"
        "translate {seq2seq} {sources} --num-beams 3 --n-best 2 --max-tokens 12 --quiet --json"
    ),
    "generate/encoder": (
        "tag {tag} {sources} --quiet --json\n"
        "classify {classify} {sources} --quiet --json\n"
        "embed {masked} {sources} --quiet\n"
        "embed {masked} {sources} --quiet --pooling first"
    ),
    "plan/model": f"plan {{decoder}} {_PLAN}",
    "plan/model-int8-policies": (
        f"plan {{decoder}} --cache-dtype int8 --policy '0: full; heavy-hitters(16, interval=8)' --block-size 8 {_PLAN}\n"
        "plan {decoder} --policy 'tiered(16, quantized=0, interval=16, summaries=32, ratio=4)' --summarizer {summarizer}"
        f" {_PLAN}\n"
        f"plan {{decoder}} --policy 'sinks(4, 28)' --layout contiguous --deterministic {_PLAN}\n"
        f"plan {{decoder}} --policy 'quest(16)' {_PLAN}\n"
        f"plan {{decoder}} --policy 'tova(16)' --rope-at read {_PLAN}"
    ),
    "plan/model-fit": f"plan {{decoder}} --fit-memory 8MiB --max-seq-len 64 --max-num-seqs 4 --compression-ratios 0.5 {_PLAN}",
    "plan/encoder-decoder": f"plan {{seq2seq}} --max-num-seqs 4 --max-source-len 48 {_PLAN}",
    "plan/encoder": f"plan {{masked}} --max-num-seqs 4 {_PLAN}",
    "plan/llama": f"{_LLAMA} --max-num-seqs 8 {_PLAN}\n{_LLAMA} --max-num-seqs 8 --cache-key-dtype int8 --cache-value-dtype int4 {_PLAN}",
    "plan/llama-fit": f"{_LLAMA} --max-num-seqs 1 --fit-memory 24GiB {_PLAN}",
    "plan/llama-mesh": f"{_LLAMA} --max-num-seqs 8 --mesh 4x1 {_PLAN}\n{_LLAMA} --max-num-seqs 8 --mesh 2x2 {_PLAN}",
    "plan/storage": (
        f"plan gpt2 --max-seq-len 256 --overflow offload --offload-ram 64MiB --swap-space 256MiB {_PLAN}\n"
        f"plan gpt2 --policy 'offload(64)' --offload-ram 1MiB {_PLAN}\n"
        f"plan gpt2 --prefix-cache-dir {{dir}}/plan-tier --prefix-cache-ram 32MiB --prefix-cache-size 1GiB {_PLAN}"
    ),
    "plan/shapes": "\n".join(
        f"plan {name} --max-num-seqs 4 {_PLAN}" for name in ("t5-base", "smollm-135m", "mistral-7b")
    ),
    "verify/default": "verify {decoder} --json",
    "verify/formats": "verify {decoder} --cache-dtype int8,int4,fp8-e4m3,int8/int4-channel --layout paged --json",
    "verify/fault-mask": "verify {decoder} --inject-fault mask --layout paged --cache-dtype float32 --json",
    "verify/fault-position": "verify {decoder} --inject-fault position --layout paged --cache-dtype float32 --json",
    "verify/policies": (
        "verify {decoder} --policy 'sinks(4,20)' --policy snapkv --policy tiered --layout paged"
        " --cache-dtype float32,int8 --json"
    ),
    "verify/round-trips": "verify {decoder} --round-trip all --layout paged --cache-dtype float32 --json",
    "verify/encoder-decoder": "verify {seq2seq} --layout paged --cache-dtype float32 --json",
    "eval/text": (
        "eval {decoder} {text} --word-perplexity --quiet --json\n"
        "eval {decoder} {text} --window 32 --stride 16 --bos window --max-scored-tokens 500 --quiet --json"
    ),
    "eval/cache": (
        "eval {decoder} {text} --max-scored-tokens 300 --policy 'sinks(4, 12)' --cache-dtype int8 --quiet --json\n"
        "eval {decoder} {text} --max-scored-tokens 300 --use-cache --quiet --json"
    ),
    "eval/lengths": "eval {decoder} {text} --document-unit joined --length-multiples 1,2 --max-scored-tokens 300 --quiet --json",
    "eval/pairs": "eval {seq2seq} {pairs} --quiet --json",
    "eval/labels": (
        "eval {tag} {tags} --quiet --json\n"
        "eval {classify} {labels} --quiet --json\n"
        "eval {masked} {lines} --document-unit lines --quiet --json\n"
        "eval {spans} {lines} --document-unit lines --task span-corruption --quiet --json\n"
        "eval {chat} {chat_data} --task chat --quiet --json"
    ),
    "bench/cache": "bench cache {decoder} --new-tokens 8,16 --repeats 1 --json",
    "bench/cache-quality": (
        "bench cache-quality {long} --variants int8,sinks,snapkv --compression-ratios 0.5 --tasks single --lengths 240 --depths 0.5"
        " --samples-per-cell 1 --num-texts 2 --text-length 48 --text {text} --json"
    ),
    "bench/streaming": "bench streaming {decoder} --num-tokens 192 --span-length 64 --text {text} --json",
    "inspect/model": "inspect {decoder} --json",
    "inspect/tree": "inspect llama-3-8b --tree --json\ninspect {seq2seq} --tree --json",
    "inspect/cache-full": f"{_INSPECT} --temperature 0",
    "inspect/cache-heavy-hitters": f"{_INSPECT} --policy 'heavy-hitters(8, 2, 4)' --block-size 4",
    "inspect/cache-tiered": (
        f"{_INSPECT} --policy 'tiered(8, quantized=8, interval=4, summaries=4, ratio=4)' --block-size 4"
    ),
    "inspect/attention": "inspect {decoder} --attention 'ada bob' --layer 0 --head all --format json --use-cache",
    "tokenize/byte": "tokenize {decoder} 'ada böb ☃' --json",
    "tokenize/bpe": "tokenize {bpe} 'ada böb cleo' --json",
    "tokenize/words": "tokenize {words} 'ada zzz cleo' --json",
    "train/dry-run": f"train {{text}} --preset tiny {_TRAIN} --dry-run",
}

_PROMPTS = ([97, 100, 97, 32], [98, 111, 98, 32, 99, 108, 101, 111])
# name -> (how the model is loaded, how tokens are chosen)
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"temperature": 0}),
    "seed-0": ({}, {"seed": 0}),
    "seed-1": ({}, {"seed": 1}),
    "cold": ({}, {"seed": 1, "temperature": 0.6}),
    "hot": ({}, {"seed": 1, "temperature": 1.7}),
    "top-k": ({}, {"seed": 2, "top_k": 5}),
    "top-p": ({}, {"seed": 2, "top_p": 0.7}),
    "min-p": ({}, {"seed": 2, "min_p": 0.2}),
    "typical": ({}, {"seed": 2, "typical_p": 0.5}),
    "all-filters": ({}, {"seed": 3, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "temperature": 0.8}),
    "repetition": ({}, {"seed": 3, "repetition_penalty": 1.4}),
    "presence": ({}, {"seed": 3, "presence_penalty": 0.8, "frequency_penalty": 0.4}),
    "no-repeat": ({}, {"temperature": 0, "no_repeat_ngram_size": 2}),
    "bias": (
        {},
        {"seed": 4, "logit_bias": {98: 3.0, 32: -2.0}, "bad_words_ids": ((97, 100),), "stop_token_ids": (103,)},
    ),
    "forced": ({}, {"seed": 4, "forced_bos_token_id": 100, "forced_eos_token_id": 46, "min_tokens": 3}),
    "four-samples": ({}, {"seed": 5, "n": 4}),
    "beams": ({}, {"num_beams": 4, "n": 3, "length_penalty": 0.8}),
    "beams-gnmt": ({}, {"num_beams": 3, "n": 3, "length_penalty_form": "gnmt", "early_stopping": True}),
    "int8-sampled": ({"cache_dtype": "int8"}, {"seed": 6, "n": 2}),
    "contiguous-sampled": ({"layout": "contiguous"}, {"seed": 6, "n": 2}),
    "window-sampled": ({"policy": "window(6)", "block_size": 4}, {"seed": 6, "n": 2}),
    "deterministic-sampled": ({"deterministic": True}, {"seed": 6, "n": 2}),
    "float64-sampled": ({"dtype": "float64"}, {"seed": 6, "n": 2}),
}


def sample_tokens(path: str, load: dict[str, Any], options: dict[str, Any]) -> Any:
    """Generate from two prompts at once.

    Args:
        path: A trained decoder's folder.
        load: Options of loading.
        options: Options of sampling.

    Returns:
        For each prompt and each sample its token ids.
    """
    with LLM.load(path, **load) as llm:
        completions = llm.generate([list(prompt) for prompt in _PROMPTS], max_tokens=24, **options)
        return [[list(sample.token_ids) for sample in completion.choices] for completion in completions]


def family_outputs(version: str, name: str, folder: Path) -> Any:
    """Load one tiny Hugging Face checkpoint and compute its outputs.

    Args:
        version: Version of transformers whose config the checkpoint has.
        name: Name of the case in the golden files.
        folder: An empty folder for the checkpoint.

    Returns:
        Summaries of logits and vectors, scores and greedy tokens through the cache; or "refused".
    """
    meta, arrays = family_goldens.load(version, name)
    family_goldens.write(meta, arrays, folder)
    try:
        llm = LLM.load(folder)
    except KvadError:
        return "refused"
    with llm:
        fits = len(arrays["long/input_ids"]) <= meta["config"].get("max_position_embeddings", 1024)
        run = "long" if fits else "ragged2"
        ids = arrays[f"{run}/input_ids"].tolist()
        if meta["kind"] == "encoder":
            outputs: dict[str, Any] = {"logits": summary(llm.logits(ids))}
            return outputs | {f"embed-{pool}": summary(llm.embed([ids], pool=pool)) for pool in ("mean", "first")}
        source = None if meta["kind"] == "decoder" else ids
        target = ids if source is None else arrays[f"{run}/decoder_input_ids"].tolist()
        generated = llm.generate(ids[:12], max_tokens=4, temperature=0, ignore_eos=True)
        return {
            "logits": summary(llm.logits(target, encoder_input=source)),
            "score": summary(torch.tensor(llm.score(target, encoder_input=source).logprobs[1:])),
            "greedy": list(generated.choices[0].token_ids),
        }


def family_cases() -> list[tuple[str, str]]:
    """List (version of transformers, name) of every golden case, each name once, the newest version's."""
    newest: dict[str, str] = {}
    for version in family_goldens.ORACLES:
        newest |= dict.fromkeys(family_goldens.names(version), version)
    return [(version, name) for name, version in newest.items()]


# ---------------------------------------------------------------- independent of kvad's names

WORDS = ("ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hana", "ivo", "jo", "kim", "lea")
HASH_DIGITS = 20  # of sha256
MAX_NUMBERS = 64  # longer lists of numbers are recorded by their hash
MAX_PRINTED = 20  # differences printed of one case


def summary(tensor: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor by shape, the hash of its float32 bytes and its first and last values."""
    values = tensor.detach().to(torch.float32).contiguous()
    flat = values.flatten().tolist()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:HASH_DIGITS]
    return {"shape": list(values.shape), "hash": digest, "first": flat[:4], "last": flat[-2:]}


class Workspace(dict[str, str]):
    """Temporary folder with data files and trained models, each made when a command first names it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dir=str(folder))
        self.folder = folder
        self.metrics: dict[str, list[dict[str, Any]]] = {}
        write_data(folder)
        for name in ("text", "lines", "pairs", "sources", "tags", "labels"):
            self[name] = str(folder / f"{name}.txt")
        self["chat_data"] = str(folder / "chat.jsonl")

    def __missing__(self, name: str) -> str:
        """Train the model of the training case `name` and return its folder."""
        out = self.folder / "runs" / name
        arguments = [each.format_map(self) for each in shlex.split(TRAINING[name])]
        code, _, errors = capture([*arguments, OUT_FLAG, str(out)])
        if code:
            raise RuntimeError(f"training {name} failed with exit code {code}:\n{errors}")
        lines = (out / METRICS_FILE).read_text("utf-8").splitlines()
        self.metrics[name] = [json.loads(line) for line in lines]
        self[name] = str(out)
        return str(out)


def write_data(folder: Path) -> None:
    """Write small synthetic data files for every objective; the same bytes on every machine."""
    draw = random.Random(0)

    def words(low: int, high: int) -> list[str]:
        return [WORDS[int(draw.random() * len(WORDS))] for _ in range(low + int(draw.random() * (high - low + 1)))]

    texts = [words(2, 7) for _ in range(120)]
    files = {
        "text.txt": "".join(" ".join(words(4, 9)).capitalize() + ".\n" for _ in range(160)),
        "lines.txt": "".join(" ".join(text) + "\n" for text in texts),
        "pairs.txt": "".join(f"{' '.join(text)}\t{' '.join(reversed(text))}\n" for text in texts),
        "sources.txt": "".join(" ".join(text) + "\n" for text in texts[:3]),
        "tags.txt": "\n".join("".join(f"{word}\t{word[0].upper()}\n" for word in text) for text in [WORDS, *texts]),
        "labels.txt": "".join(f"{len(text) % 2}\t{' '.join(text)}\n" for text in texts),
        "chat.jsonl": "".join(json.dumps({"messages": _conversation(words, draw)}) + "\n" for _ in texts),
    }
    for name, content in files.items():
        (folder / name).write_text(content, "utf-8")


def _conversation(words: Callable[[int, int], list[str]], draw: random.Random) -> list[dict[str, str]]:
    roles = ("user", "assistant") * (1 + int(draw.random() * 2))
    return [{"role": role, "content": " ".join(words(1, 3))} for role in roles]


def capture(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run `kvad arguments` in this process and return exit code, standard output and standard error."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = run_cli(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), errors.getvalue()


def run_commands(commands: str, workspace: Workspace) -> list[Any]:
    """Run the commands of one case and return exit code and JSON output of each."""
    records = []
    for command in commands.splitlines():
        arguments = [argument.format_map(workspace) for argument in shlex.split(command)]
        code, out, errors = capture(arguments)
        try:
            content = [json.loads(line) for line in out.splitlines() if line.strip()]
        except ValueError as error:
            raise RuntimeError(f"{command}: no JSON lines on standard output: {out[:200]!r}\n{errors}") from error
        if not content:
            raise RuntimeError(f"{command}: exit code {code} and no output\n{errors}")
        records.append({"exit": code, "output": content[0] if len(content) == 1 else content})
    return records


def training_record(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Turn the lines of a metrics file into columns: kind -> key -> one value per line."""
    columns: dict[str, dict[str, list[Any]]] = {}
    for line in lines:
        table = columns.setdefault(line[METRICS_KIND], {})
        for key, value in line.items():
            if key != METRICS_KIND:
                table.setdefault(key, []).append(value)
    return columns


def case_functions(workspace: Workspace) -> dict[str, Callable[[], Any]]:
    """Map the name of every case to the function that computes its record."""

    def training(name: str) -> Callable[[], Any]:
        return lambda: (workspace[name], training_record(workspace.metrics[name]))[1]

    def sampling(load: dict[str, Any], options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: sample_tokens(workspace["decoder"], load, options)

    def family(version: str, name: str) -> Callable[[], Any]:
        return lambda: family_outputs(version, name, workspace.folder / "families" / name)

    def commands(text: str) -> Callable[[], Any]:
        return lambda: run_commands(text, workspace)

    return {
        **{f"families/{name}": family(version, name) for version, name in family_cases()},
        **{f"training/{name}": training(name) for name in TRAINING},
        **{f"sampling/{name}": sampling(*options) for name, options in SAMPLING.items()},
        **{name: commands(text) for name, text in COMMANDS.items()},
    }


def compute(only: Sequence[str] = (), *, verbose: bool = False) -> dict[str, Any]:
    """Compute the record.

    Args:
        only: Parts or names of cases; empty for all.
        verbose: Print the seconds of every case.

    Returns:
        Environment and cases. A case that fails has its exception as its record.
    """
    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvad-baseline-") as name, isolated(Path(name)):
        for case, function in case_functions(Workspace(Path(name))).items():
            if only and not {case, case.partition("/")[0]} & set(only):
                continue
            start = time.perf_counter()
            torch.manual_seed(0)
            try:
                cases[case] = clean(function(), (case.partition("/")[0],), name)
            except Exception as error:
                traceback.print_exc()
                cases[case] = {"failed": f"{type(error).__name__}: {error}"}
            if verbose:
                print(f"{time.perf_counter() - start:7.2f} s  {case}", file=sys.stderr)
    return {"environment": environment(), "cases": cases}


@contextlib.contextmanager
def isolated(folder: Path) -> Iterator[None]:
    """Keep user folders inside `folder`, and warnings off the terminal."""
    variables = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_DATA_HOME": "data", "XDG_CONFIG_HOME": "config"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(folder / place) for name, place in variables.items()})
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment() -> dict[str, str]:
    """Describe what the bits depend on besides the code."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def clean(value: Any, path: tuple[str, ...], folder: str) -> Any:
    """Drop volatile values and temporary paths, and replace long lists of numbers by their hash.

    Args:
        value: A JSON value.
        path: Keys around it, the part's name first.
        folder: The temporary folder.

    Returns:
        What is recorded.
    """
    if isinstance(value, dict):
        items = ((str(key), each) for key, each in value.items())
        kept = {key: each for key, each in items if not volatile((*path, key)) and not _names(each, folder)}
        return {key: clean(each, (*path, key), folder) for key, each in kept.items()}
    if isinstance(value, list | tuple):
        if len(value) > MAX_NUMBERS and all(isinstance(each, int | float) for each in value):
            digest = hashlib.sha256(json.dumps(list(value)).encode()).hexdigest()[:HASH_DIGITS]
            return {"numbers": len(value), "hash": digest, "first": list(value[:8])}
        rows = [clean(each, path, folder) for each in value if not _names(each, folder)]
        if len(rows) > 1 and all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
            return {key: [row[key] for row in rows] for key in rows[0]}  # columns: keys are written once
        return rows
    return value


def _names(value: Any, folder: str) -> bool:
    return isinstance(value, str) and folder in value


def volatile(path: tuple[str, ...]) -> bool:
    """Return True if the value at these keys differs from run to run."""
    key = path[-1]
    return key in VOLATILE_KEYS or key.endswith(VOLATILE_SUFFIXES) or any(matches(path, VOLATILE_PATHS))


def matches(path: tuple[str, ...], names: Any) -> Iterator[str]:
    """Yield those of `names` that match the path, the longest first.

    A name matches if its last key is the path's last key and its other keys occur before it in the same order.
    """
    for name in sorted(names, key=len, reverse=True):
        *before, last = name.split(".")
        keys = iter(path[:-1])
        if last == path[-1] and all(key in keys for key in before):
            yield name


def flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of every leaf. List indices are written as "#3"; a list of numbers is one leaf."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flatten(each, (*path, key))
    elif isinstance(value, list) and any(not isinstance(each, int | float) for each in value):
        for index, each in enumerate(value):
            yield from flatten(each, (*path, f"#{index}"))
    else:
        yield path, value


def keys_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the part's name and the keys of a path, without list indices."""
    return (path[0].partition("/")[0], *(key for key in path[1:] if not key.startswith("#")))


def differences(recorded: dict[str, Any], now: dict[str, Any], *, closer_bounds: bool) -> tuple[list[str], list[str]]:
    """Compare the leaves of one case.

    Args:
        recorded: The case's record under its name.
        now: What was computed now, under its name.
        closer_bounds: Accept smaller upper bounds.

    Returns:
        Lines that describe failures, and lines that describe accepted differences.
    """
    failures: list[str] = []
    notes: list[str] = []
    new_values = dict(flatten(now))
    old_values = {path: old for path, old in flatten(recorded) if not volatile(keys_of(path))}
    for path, old in old_values.items():
        if path not in new_values:
            failures.append(f"{_text(path)}: recorded {old!r}, missing now")
            continue
        new = new_values[path]
        if repr(new) == repr(old):
            continue
        bound = closer_bounds and any(matches(keys_of(path), BOUND_KEYS)) and 0 <= new < old
        accepted = bound or (isinstance(old, str) and _is_prose(keys_of(path)))
        (notes if accepted else failures).append(f"{_text(path)}: {_difference(old, new)}")
    for path, new in new_values.items():
        if path not in old_values:
            (notes if _is_prose(keys_of(path)) else failures).append(f"{_text(path)}: not recorded, now {new!r}")
    return failures, notes


def _difference(old: Any, new: Any) -> str:
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return f"recorded {old!r}, now {new!r}"
    differ = [index for index in range(len(old)) if repr(old[index]) != repr(new[index])]
    first = differ[0]
    return f"{len(differ)} of {len(old)} differ; number {first}: recorded {old[first]!r}, now {new[first]!r}"


def _is_prose(path: tuple[str, ...]) -> bool:
    return path[0] != "families" and any(matches(path, PROSE_KEYS))


def _text(path: tuple[str, ...]) -> str:
    return ": ".join((path[0], ".".join(path[1:]).replace(".#", "#")))


def compare(recorded: dict[str, Any], now: dict[str, Any], *, closer_bounds: bool = False) -> int:
    """Print every difference of the cases that both records could have.

    Args:
        recorded: The record.
        now: What was computed now; only its cases are compared.
        closer_bounds: Accept smaller upper bounds of `plan`.

    Returns:
        The number of cases that differ.
    """
    if recorded["environment"] != now["environment"]:
        print(f"other environment: recorded {recorded['environment']}, now {now['environment']}; bits may differ")
    wrong = 0
    for case, new in now["cases"].items():
        if case not in recorded["cases"]:
            print(f"{case}: not recorded")
            wrong += 1
            continue
        old = recorded["cases"][case]
        failures, notes = differences({case: old}, {case: new}, closer_bounds=closer_bounds)
        for line in failures[:MAX_PRINTED]:
            print(line)
        if len(failures) > MAX_PRINTED:
            print(f"{case}: {len(failures) - MAX_PRINTED} more differences")
        for line in notes[:MAX_PRINTED]:
            print(f"note: {line}")
        wrong += bool(failures)
    return wrong


def write(record: dict[str, Any], path: Path) -> None:
    """Write a record, one line per case."""
    lines = [f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in record["cases"].items()]
    head = json.dumps(record["environment"])
    path.write_text('{"environment": ' + head + ', "cases": {\n' + ",\n".join(lines) + "\n}}\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; return the exit code."""
    parser = argparse.ArgumentParser(description="Record what kvad computes, or compare with a record.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="FILE", help="Record into this file.")
    action.add_argument(
        "--compare", type=Path, metavar="FILE", help="Compare with this record; exit code 1 if different."
    )
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help="Parts (families, training, sampling, plan, ...) or cases."
    )
    parser.add_argument("--closer-bounds", action="store_true", help="Accept smaller upper bounds of plan.")
    parser.add_argument("--verbose", action="store_true", help="Print the seconds of every case.")
    options = parser.parse_args(arguments)
    only = [name for name in options.only.split(",") if name]
    record = compute(only, verbose=options.verbose)
    failed = [case for case, content in record["cases"].items() if isinstance(content, dict) and "failed" in content]
    if failed:
        print(f"cases that failed: {', '.join(failed)}")
    if not record["cases"]:
        print(f"no case of {options.only}")
        return 2
    if options.out is not None:
        write(record, options.out)
        return 1 if failed else 0
    wrong = compare(json.loads(options.compare.read_text("utf-8")), record, closer_bounds=options.closer_bounds)
    print(f"{len(record['cases'])} cases compared, {wrong} differ")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
