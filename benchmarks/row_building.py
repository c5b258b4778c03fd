"""Speed of tokenizing texts and building rows, and how full the rows are: one JSON line per measure.

    python benchmarks/row_building.py [TEXT_OR_FOLDER ...] [--megabytes 16] [--seq-len 2048] [--consumed 400 20000]

Default texts: the sources of Python's standard library. ``prepare``: ``kvad data prepare`` (read, encode, frame,
write and hash) compared with ``tokenizers.encode_batch`` with the same vocabulary and texts, which stores nothing;
both on all cores, best of three, in alternation. ``rows``: tokens per second of processor time of each packing and
order, and the ratio to the speed of training (``--consumed``, tokens/s): rows for GPT-2-124M (``--seq-len``, 8 per
batch) and for ``recipes/shakespeare-char-cpu.toml`` (64 tokens, 12 per batch). ``packing``: fill of the rows.
``padding``: real tokens per second of a small model, packed and with one document per row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvad.datasets.stdlib_sources import find_sources
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.data.collate import Batch, PackedRow, collate_rows
from kvad.train.data.packed_dataset import PackedDataset
from kvad.train.data.packers import DocumentPacker
from kvad.train.data.streaming import StreamPacker, stream_store, stream_texts
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.setup.prepared import PreparedData, prepare_data
from kvad.train.sources.documents import open_corpus

ORDERS = [("epochs", "split"), ("epochs", "first-fit"), ("epochs", "best-fit"), ("windows", "split")]
ORDERS += [("sequential", "split")]
ORDERS += [("sequential", "first-fit"), ("stream", "split"), ("stream", "first-fit")]


def emit(measure: str, **values: object) -> None:
    print(json.dumps({"measure": measure, **values, "cores": os.cpu_count()}), flush=True)


def best(*runs: Callable[[], object], times: int = 3) -> list[float]:
    """Return the shortest time of each in seconds, measured in alternation."""
    shortest = [float("inf")] * len(runs)
    for _ in range(times):
        for number, run in enumerate(runs):
            began = time.perf_counter()
            run()
            shortest[number] = min(shortest[number], time.perf_counter() - began)
    return shortest


def chosen(paths: list[Path], limit: float, folder: Path) -> Path:
    """Copy texts of about ``limit`` MB to one folder."""
    files = paths or find_sources().files
    if len(paths) == 1 and paths[0].is_dir():
        files = sorted(path for path in paths[0].rglob("*") if path.is_file())
    total, target = 0, folder / "texts"
    target.mkdir()
    for number, path in enumerate(files):
        content = path.read_bytes()
        if b"\0" in content[:8192] or not content.strip():
            continue
        (target / f"{number:06d}.txt").write_bytes(content)
        total += len(content)
        if total >= limit * 1e6:
            break
    return target


def config(context: int, order: str, packing: str, batch: int = 8) -> RunConfig:
    data = {"seq_len": context, "order": order, "packing": packing, "shuffle_buffer": 64, "encoding_errors": "replace"}
    return RunConfig.from_dict({"data": data, "train": {"batch_size": batch}})


def measure_prepare(texts: Path, folder: Path, vocab: int) -> None:
    corpus = open_corpus([texts], errors="replace")
    whole = list(corpus.texts())
    tokenizer = train_tokenizer("bpe", whole[:: max(1, len(whole) // 100)], vocab_size=vocab)
    backend = tokenizer._backend  # type: ignore[attr-defined]

    def run_kvad() -> None:
        prepare_data(RunConfig(), corpus, tokenizer, folder / "data", overwrite=True)

    encode, fast, write = best(
        lambda: backend.encode_batch(whole, add_special_tokens=False),
        lambda: backend.encode_batch_fast(whole, add_special_tokens=False),
        run_kvad,
    )
    size = sum(source.num_bytes for source in corpus.sources) / 1e6
    emit(
        "prepare",
        megabytes=round(size, 2),
        documents=len(whole),
        prepare_mb_per_s=round(size / write, 3),
        encode_batch_mb_per_s=round(size / encode, 3),
        ratio=round(encode / write, 3),
        ratio_of_encode_batch_fast=round(fast / write, 3),
    )


def made(texts: Path, folder: Path, settings: RunConfig) -> PackedDataset:
    prepared = PreparedData(folder / "data")
    if settings.data.order in ("epochs", "windows"):
        return PackedDataset(DocumentPacker(prepared.store, settings), settings)
    if settings.data.order == "stream":
        units = stream_texts(open_corpus([texts], errors="replace", hashed=False), prepared.tokenizer)
    else:
        units = stream_store(prepared.store, 0, prepared.store.num_documents, pairs=False)
    return PackedDataset(StreamPacker([(units, 1.0)], settings, pairs=False, description=""), settings)


def measure_rows(texts: Path, folder: Path, model: str, context: int, batch: int, consumed: float) -> None:
    for order, packing in ORDERS:
        data = made(texts, folder, config(context, order, packing, batch))
        tokens, step, began = 0, 0, time.process_time()
        while time.process_time() - began < 1:
            tokens += sum(len(each.targets) for each in data.micro_batches(step))
            step += 1
        speed = tokens / (time.process_time() - began)
        times = round(speed / consumed, 1)
        emit("rows", model=model, context=context, order=order, packing=packing, tokens_per_s=round(speed), times=times)


def measure_packing(texts: Path, folder: Path, context: int) -> None:
    for packing in ("split", "first-fit", "best-fit"):
        use = made(texts, folder, config(context, "epochs", packing)).packer.source.packing_stats()
        unused = use.num_cropped / (use.num_used + use.num_cropped)
        emit(
            "packing",
            packing=packing,
            context=context,
            rows=use.rows,
            taken=round(use.num_used / use.capacity, 4),
            padding=round(1 - use.num_used / use.capacity, 4),
            cropped=round(unused, 4),
        )


def measure_padding(texts: Path, folder: Path) -> None:
    """Batch documents of at most 128 tokens (lines), packed by first fit and one per row, with equally many rows."""
    lines = open_corpus([texts], errors="replace", lines=True)
    with tempfile.TemporaryDirectory() as other:
        store_folder = Path(other) / "data"
        prepare_data(RunConfig(), lines, PreparedData(folder / "data").tokenizer, store_folder)
        settings = config(128, "epochs", "first-fit")
        data = PackedDataset(DocumentPacker(PreparedData(store_folder).store, settings), settings)
        packed = data.rows(np.arange(32))
        apart: list[PackedRow] = [[part] for row in packed for part in row][::3]
        model = Transformer(RunConfig.from_dict({"model": {"preset": "tiny"}}).resolve(4096))
        objective = CrossEntropyObjective(model, Autocast("fp32", "cpu"))

        def speed(rows: list[PackedRow]) -> float:
            batches: list[Batch] = [collate_rows(rows[low : low + 8], data.shape) for low in range(0, len(rows), 8)]
            tokens = sum(len(batch.targets) for batch in batches)
            (seconds,) = best(lambda: [objective.accumulate_gradients(batch, tokens) for batch in batches])
            return tokens / seconds

        mixed = [apart[at] for at in np.random.default_rng(0).permutation(len(apart))]
        together, single = speed(packed), speed(mixed)
        emit(
            "padding",
            packed_tokens_per_s=round(together),
            padded_tokens_per_s=round(single),
            times=round(together / single, 2),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=4096)
    options = "tokens/s of training GPT-2-124M and recipes/shakespeare-char-cpu.toml on this machine"
    parser.add_argument("--consumed", type=float, nargs=2, default=(400, 20000), help=options)
    measures = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = chosen(measures.texts, measures.megabytes, folder)
        measure_prepare(texts, folder, measures.vocab)
        measure_rows(texts, folder, "gpt2-124m", measures.seq_len, 8, measures.consumed[0])
        measure_rows(texts, folder, "shakespeare-char-cpu", 64, 12, measures.consumed[1])
        measure_packing(texts, folder, measures.seq_len)
        measure_padding(texts, folder)


if __name__ == "__main__":
    main()
