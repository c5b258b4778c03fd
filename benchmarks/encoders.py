"""Encoders and encoder-decoders compared with transformers, on the same random weights, alternating, medians.

    python benchmarks/encoders.py encoder                    BERT-base shape, 32 texts of 128 tokens
    python benchmarks/encoders.py translate --num-beams 4    Marian shape (6 + 6 x 512), 32 texts of 24 tokens, 32 new

The output is one JSON line per run: seconds of each side, the medians, their ratio, the machine. Requires the extra
``oracle``; ctranslate2 is included if installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvad.benchmarks.results import machine_info
from kvad.cache.config import CacheConfig
from kvad.checkpoint.loader import load_model
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.model import NoCache, whole_sequences


def alternate(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each side, run in alternation after one warm-up each."""
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def report(what: str, seconds: dict[str, list[float]], work: int, unit: str, **more: Any) -> None:
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rates = {name: round(work / median, 1) for name, median in medians.items()}
    line = {"bench": what, "seconds": seconds, f"{unit}_per_second": rates, **more, "machine": machine_info()}
    for peer in ("transformers", "ctranslate2"):
        if peer in medians:
            line[f"ratio_to_{peer}"] = round(medians[peer] / medians["kvad"], 3)
    print(json.dumps(line))


def run_engine(engine: Engine) -> None:
    while not engine.idle:
        for piece in engine.step():
            assert piece.error is None, piece.error


def encoder(folder: Path, repeats: int, batch_size: int, length: int) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertModel

    BertForMaskedLM(BertConfig()).save_pretrained(folder)
    reference_model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    model, _ = load_model(folder)
    engine = Engine(
        model,
        CacheConfig(max_seq_len=512, max_num_seqs=batch_size),
        EngineConfig(max_num_batched_tokens=batch_size * length),
    )
    ids = torch.randint(1000, 30000, (batch_size, length), generator=torch.Generator().manual_seed(0))

    def run_kvad() -> None:
        for text in ids.tolist():
            engine.add_encoder_request(text, "mean")
        run_engine(engine)

    @torch.inference_mode()
    def transformers() -> None:
        reference_model(ids).last_hidden_state.mean(dim=1)

    seconds = alternate({"kvad": run_kvad, "transformers": transformers}, repeats)
    report("encoder", seconds, batch_size * length, "tokens", batch_size=batch_size, length=length)


def translate(folder: Path, repeats: int, batch_size: int, length: int, beams: int, new: int) -> None:
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=32001, d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
        encoder_attention_heads=8, decoder_attention_heads=8, pad_token_id=32000, decoder_start_token_id=32000,
        eos_token_id=0, forced_eos_token_id=None, activation_function="swish", scale_embedding=True,
    )  # fmt: skip
    torch.manual_seed(0)
    MarianMTModel(config).save_pretrained(folder)
    reference_model = MarianMTModel.from_pretrained(folder).eval()
    reference_model.generation_config = GenerationConfig(
        decoder_start_token_id=32000, pad_token_id=32000, num_beams=beams, max_new_tokens=new, min_new_tokens=new,
        eos_token_id=0, do_sample=False,
    )  # fmt: skip
    model, _ = load_model(folder)
    num_seqs = batch_size * beams
    sizes = {"max_seq_len": new + 1, "max_num_seqs": num_seqs, "max_source_len": length}
    cache = CacheConfig(**sizes, enable_prefix_caching=False)
    engine = Engine(model, cache, EngineConfig(max_num_batched_tokens=max(2048, num_seqs)))
    ids = torch.randint(5, 31000, (batch_size, length), generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, num_beams=beams, stop_token_ids=(0,))

    def run_kvad() -> None:
        for text in ids.tolist():
            engine.add_request([32000], sampling, encoder_token_ids=text)
        run_engine(engine)

    def transformers() -> None:
        reference_model.generate(ids, attention_mask=torch.ones_like(ids))

    def without_cache() -> None:
        target, no_cache = [32000], NoCache(model.config)
        source = whole_sequences([ids[0].tolist()], ids.device)
        with torch.inference_mode():
            for _ in range(new):
                step = whole_sequences([target], ids.device, last_only=True)._replace(encoder_input=source)
                target.append(int(model.logits(model(step, no_cache), step.logit_indices).argmax()))

    sides: dict[str, Callable[[], Any]] = {"kvad": run_kvad, "transformers": transformers}
    fast = ctranslate2(reference_model, ids.tolist(), beams, new, folder / "ct2")
    if fast is not None:
        sides["ctranslate2"] = fast
    seconds = alternate(sides, repeats)
    report("translate", seconds, batch_size * new, "tokens", batch_size=batch_size, length=length, beams=beams, new=new)
    if beams == 1:
        batched = alternate(
            {"cached": lambda: one(engine, ids[0].tolist(), sampling), "recomputed": without_cache}, repeats
        )
        report("translate one text", batched, new, "tokens", length=length, new=new)


def ctranslate2(
    reference_model: Any, ids: list[list[int]], beams: int, new: int, folder: Path
) -> Callable[[], Any] | None:
    """Run CTranslate2 on the same weights in float32, if it is installed (``pip install ctranslate2``)."""
    try:
        import ctranslate2
        from ctranslate2.converters.transformers import MarianMTLoader
    except ImportError:
        return None
    vocab = reference_model.config.vocab_size

    class Names:
        """The tokenizer interface that the converter requires: a name for each id."""

        eos_token, unk_token = "</s>", "t1"

        def get_vocab(self) -> dict[str, int]:
            return {"</s>": 0, "<pad>": vocab - 1, **{f"t{i}": i for i in range(1, vocab - 1)}}

    spec = MarianMTLoader()(reference_model, Names())
    spec.validate()
    folder.mkdir()
    spec.save(str(folder))
    translator = ctranslate2.Translator(str(folder), intra_threads=torch.get_num_threads(), compute_type="float32")
    sources = [[f"t{token}" for token in text] for text in ids]

    def run() -> None:
        done = translator.translate_batch(
            sources, beam_size=beams, max_decoding_length=new, min_decoding_length=new, max_batch_size=len(ids)
        )
        assert all(len(each.hypotheses[0]) == new for each in done), [len(each.hypotheses[0]) for each in done]

    return run


def one(engine: Engine, source: list[int], sampling: SamplingParams) -> None:
    engine.add_request([32000], sampling, encoder_token_ids=source)
    run_engine(engine)


def load(folder: Path, repeats: int) -> None:
    """Compare the time until ready to generate (model and engine, then one token) with reading the file once.

    The file is in the page cache. Peak memory is that of a separate process, above its baseline.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    room = bytearray(1 << 24)

    def read() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(room):
                    pass

    seconds = alternate({"kvad": lambda: ready(folder).close(), "read": read}, repeats)
    child = subprocess.run(
        [sys.executable, __file__, "child", "--folder", str(folder)], capture_output=True, text=True, check=True
    )
    report("load", seconds, size, "bytes", bytes=size, **json.loads(child.stdout))


def ready(folder: Path) -> Engine:
    model, _ = load_model(folder)
    return Engine(model, CacheConfig(max_seq_len=64, max_num_seqs=1, dtype="bfloat16"))


def high_water() -> int:
    """Return the peak resident bytes (Linux; getrusage's number is inherited from the parent)."""
    status = Path("/proc/self/status").read_text("utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def child(folder: Path) -> None:
    """Print the peak memory of the process above torch and kvad, before and after one generated token."""
    before = high_water()
    engine = ready(folder)
    loaded = high_water()
    began = time.perf_counter()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, temperature=0))
    run_engine(engine)
    peak = high_water()
    peaks = {"peak_when_ready": loaded - before, "peak_after_two_tokens": peak - before}
    print(json.dumps({**peaks, "two_tokens_seconds": round(time.perf_counter() - began, 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("encoder", "translate", "load", "child"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=None, help="tokens of a text [128, translate: 24]")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--num-beams", type=int, default=1)
    args = parser.parse_args()
    if args.what == "child":
        child(args.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "encoder":
            encoder(folder, args.repeats, args.batch_size, args.length or 128)
        elif args.what == "translate":
            translate(folder, args.repeats, args.batch_size, args.length or 24, args.num_beams, args.new_tokens)
        else:
            load(folder, args.repeats)


if __name__ == "__main__":
    main()
