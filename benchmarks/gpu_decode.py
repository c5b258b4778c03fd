"""Decoding and prefill of the 8B Llama shape on one GPU, beside the limits measured in the same run.

    python benchmarks/gpu_decode.py                     all parts; needs 60 GB of GPU memory
    python benchmarks/gpu_decode.py limits decode       without transformers
    python benchmarks/gpu_decode.py --shape 1b decode   the shape of Llama 3.2 1B
    python benchmarks/gpu_decode.py --cache int8 batch  with a cache of int8
    python benchmarks/gpu_decode.py --shape tiny        a small shape, for a rehearsal on any device

Weights are random, bfloat16, and made on the GPU; kvad and transformers have the same ones. The output is JSON lines:

``limits``: a device-to-device copy in GB/s, counting bytes read and written; a sum, counting bytes read; an
8192 x 8192 x 8192 bfloat16 product in TFLOP/s. ``decode``: one sequence through the engine, scheduler and sampling
included; ``of_copy`` is bytes of weights and cache read per second over the copy's bytes (read and written) per second;
``ms_in_order`` is the time of a step that does not start before the tokens of the one before are known.
``batch``: 64 sequences with 2,048 tokens of context, decode only. ``prefill``: TFLOP/s of products with the weights and
of attention. ``sampling``: steps that draw tokens on the GPU, and with the filters of PyTorch. ``options``: steps of 64
sequences with log-probabilities, penalties, biases and bans, in ms: started early; in order; in order with PyTorch on
the GPU, for which the host waits several times. ``swaps``: steps of 64 sequences while every fourth step one of 2,048
tokens goes to the host and another one comes back: none, in a stream of their own, in the stream of the steps.
``transformers`` and ``transformers_batch``: the same with transformers (static cache and torch.compile
for one sequence; for 64 its default cache without compilation, and a static one).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad.benchmarks.results import commit_id, machine_info
from kvad.cache.config import CacheConfig
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.execution import sampler
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer


class Shape(NamedTuple):
    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    max_len: int = 8192
    rows: int = 64
    context: int = 2048
    prompt: int = 8192
    new: int = 128


SHAPES = {"8b": Shape(), "1b": Shape(16, 2048, 8192), "tiny": Shape(2, 64, 96, 4, 2, 500, 128, 3, 24, 64, 6)}
PARTS = ("limits", "decode", "batch", "prefill", "sampling", "options", "swaps", "transformers", "transformers_batch")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "300 biases": {"logit_bias": {token: token / 100 - 1 for token in range(300)}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (7,)},
    "drawn, penalties, logprobs 5": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 5},
}
PROMPT = 128


class Bench:
    def __init__(self, shape: Shape, device: str, cache: str) -> None:
        self.shape, self.device, self.cache = shape, torch.device(device), cache
        self.copy_rate = self.gemm_rate = float("nan")
        self.tokens: list[int] = []  # of the first context
        self.in_order_tokens: list[list[int]] = []
        self._model: Transformer | None = None

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median time of a call after two calls, with one wait for the device each."""
        times = []
        for _ in range(repeats + 2):
            self.sync()
            start = time.perf_counter()
            function()
            self.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    @property
    def model(self) -> Transformer:
        if self._model is None:
            shape = self.shape
            attention = cfg.AttentionConfig(
                shape.heads, num_kv_heads=shape.kv_heads, position=cfg.RopeConfig(theta=500000.0)
            )
            layer = cfg.LayerConfig(attention, cfg.GatedMLPConfig(shape.inner), cfg.NormConfig("rms", eps=1e-5))
            config = ModelConfig(
                hidden_size=shape.width,
                vocab_size=shape.vocab,
                max_seq_len=shape.max_len,
                decoder=cfg.StackConfig(shape.layers, {"L": layer}, "L"),
                tie_embeddings=False,
            )
            torch.manual_seed(0)
            torch.set_default_dtype(torch.bfloat16)
            with torch.device(self.device):
                self._model = Transformer(config).eval().requires_grad_(False)
            torch.set_default_dtype(torch.float32)
            assert self._model.head.weight is not None
            torch.nn.init.normal_(self._model.head.weight, std=0.02)
        return self._model

    def weight_bytes(self) -> int:
        """Return the bytes of weights that one token reads: all but the token table."""
        return sum(x.nbytes for x in self.model.parameters()) - self.model.token_embedding.nbytes

    def cache_bytes(self, engine: Engine, length: int) -> float:
        cache, (group,) = engine.kv_cache, engine.kv_cache.groups
        return (cache.payload_bytes() + cache.scale_bytes()) / (group.num_blocks * group.block_size) * length

    def engine(self, rows: int, max_len: int, chunk: int, **fields: Any) -> Engine:
        cache = CacheConfig(
            dtype=self.cache,
            max_num_seqs=rows,
            max_seq_len=max_len,
            prefill_chunk_size=chunk,
            enable_prefix_caching=False,
        )
        return Engine(self.model, cache, EngineConfig(max_num_batched_tokens=chunk, native=False, **fields))

    def limits(self) -> dict[str, Any]:
        size, side = (1 << 32, 8192) if self.device.type == "cuda" else (1 << 22, 128)
        source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        copy = self.seconds(lambda: target.copy_(source))
        read = self.seconds(lambda: source.view(torch.float32).sum())
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        gemm = self.seconds(lambda: [a @ b for _ in range(5)]) / 5
        self.copy_rate, self.gemm_rate = 2 * size / copy, 2 * side**3 / gemm
        return {"copy_gb_s": self.copy_rate / 1e9, "sum_gb_s": size / read / 1e9, "gemm_tflops": self.gemm_rate / 1e12}

    def decode_steps(
        self,
        engine: Engine,
        rows: int,
        length: int,
        new: int,
        between: Callable[[int], None] = lambda _: None,
        **options: Any,
    ) -> tuple[list[float], list[list[int]]]:
        """Prefill, then return the seconds between the ends of steps that decode all rows, and the tokens of each.

        ``between`` is called with the number of steps so far, and is part of the next one's time.
        """
        generator = torch.Generator().manual_seed(1)
        sampling = SamplingParams(**{"temperature": 0, **options}, max_tokens=new, ignore_eos=True)
        prompts = torch.randint(self.shape.vocab, (rows, length), generator=generator).tolist()
        numbers = [engine.add_request(prompt, sampling) for prompt in prompts]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        times, start = [], time.perf_counter()
        while not engine.idle:
            chunks = engine.step()
            end = time.perf_counter()
            is_counted = len(chunks) == rows and all(tokens.values())
            if is_counted:  # every step waits for its tokens
                times.append(end - start)
            start = end
            for chunk in chunks:
                assert chunk.error is None, chunk.error
                tokens[chunk.request].append(chunk.token_id)
            if is_counted:
                between(len(times) - 1)
        return times[8:] if len(times) > 16 else times, list(tokens.values())

    def in_order_ms(self, engine: Engine, rows: int, length: int, new: int, **options: Any) -> float:
        """Return the median of steps that do not start before the tokens of the one before are known."""
        engine.scheduler.schedule_next = lambda: None  # type: ignore[method-assign]
        times, self.in_order_tokens = self.decode_steps(engine, rows, length, new, **options)
        del engine.scheduler.schedule_next
        return statistics.median(times) * 1e3

    def decode(self) -> dict[str, Any]:
        shape, result = self.shape, dict[str, Any]()
        for length in (PROMPT, shape.context) if shape.layers > 2 else (16,):
            engine = self.engine(1, length + 2 * shape.new, min(length, 2048))
            self.decode_steps(engine, 1, length, shape.new)  # compiles and records
            times, tokens = self.decode_steps(engine, 1, length, shape.new)
            self.tokens = self.tokens or tokens[0]
            step = statistics.median(times)
            read = self.weight_bytes() + self.cache_bytes(engine, length + shape.new // 2)
            result[f"context_{length}"] = {
                "tokens_s": 1 / step,
                "ms": step * 1e3,
                "ms_in_order": self.in_order_ms(engine, 1, length, shape.new),
                "ms_spread": [min(times) * 1e3, max(times) * 1e3],
                "gb_s": read / step / 1e9,
                "of_copy": read / step / self.copy_rate,
                "recorded": engine.runner.graphs.num_recorded,
                "graph_reason": engine.runner.graphs.reason,
                "fused_reason": engine.runner.fused_reason,
            }
            engine.close()
        return result

    def batch(self) -> dict[str, Any]:
        shape = self.shape
        engine = self.engine(shape.rows, shape.context + shape.new, 8192 if shape.layers > 2 else 32)
        in_order = self.in_order_ms(engine, shape.rows, shape.context, shape.new)  # compiles and records, too
        times, _ = self.decode_steps(engine, shape.rows, shape.context, shape.new)
        step = statistics.median(times)
        read = self.weight_bytes() + shape.rows * self.cache_bytes(engine, shape.context + shape.new // 2)
        engine.close()
        return {"tokens_s": shape.rows / step, "ms": step * 1e3, "ms_in_order": in_order,
                "gb_s": read / step / 1e9, "of_copy": read / step / self.copy_rate, "steps": len(times)}  # fmt: skip

    def sampling(self) -> dict[str, Any]:
        """Return milliseconds of a step with tokens drawn on the GPU, and with those that PyTorch draws."""
        shape, result = self.shape, dict[str, Any]()
        cases = {
            "greedy": {},
            "temperature": {"temperature": 1.0},
            "top_p": {"temperature": 0.8, "top_p": 0.95},
            "top_k": {"temperature": 0.8, "top_k": 40},
        }
        length, rows_on_device = PROMPT if shape.layers > 2 else 16, sampler._rows_on_device
        for rows in (1, shape.rows):
            engine = self.engine(rows, length + shape.new, 8192 if shape.layers > 2 else 32)
            self.decode_steps(engine, rows, length, shape.new)  # compiles and records
            for name, options in cases.items():
                times, _ = self.decode_steps(engine, rows, length, shape.new, **options)
                result[f"{rows} {name}"] = [statistics.median(times) * 1e3]
            sampler._rows_on_device = lambda _, seqs: [  # type: ignore[assignment]
                i for i, seq in enumerate(seqs) if seq.sampling_params.needs_best_only
            ]
            for name, options in cases.items():
                times, _ = self.decode_steps(engine, rows, length, min(shape.new, 24), **options)
                result[f"{rows} {name}"].append(statistics.median(times) * 1e3)
            sampler._rows_on_device = rows_on_device
            engine.close()
        return result

    def prefill(self) -> dict[str, Any]:
        shape, result = self.shape, dict[str, Any]()
        for rows, length in ((1, shape.prompt - 8), (max(1, shape.prompt // shape.context), shape.context)):
            engine = self.engine(rows, length + 8, rows * length)
            sampling, times = SamplingParams(temperature=0, max_tokens=1), []
            for trial in range(4):
                for row in range(rows):
                    prompt = torch.randint(shape.vocab, (length,), generator=torch.Generator().manual_seed(trial + row))
                    engine.add_request(prompt.tolist(), sampling)
                start = time.perf_counter()
                while not engine.idle:
                    engine.step()
                times.append(time.perf_counter() - start)
            engine.close()
            inner = sum(layer.numel() for layer in self.model.decoder.parameters())  # type: ignore[union-attr]
            flops = rows * length * (2 * inner + 2 * shape.layers * shape.width * length)  # causal: half of 4 L S E
            seconds = statistics.median(times[1:])
            result[f"{rows}x{length}"] = {
                "tflops": flops / seconds / 1e12,
                "of_gemm": flops / seconds / self.gemm_rate,
                "tokens_s": rows * length / seconds,
                "seconds": times,
            }
        return result

    def options(self) -> dict[str, Any]:
        """Return milliseconds of a step with each of OPTIONS: early, in order, in order with PyTorch."""
        shape, result, rows_on_device = self.shape, dict[str, Any](), sampler._rows_on_device
        for length in (PROMPT, shape.context) if shape.layers > 2 else (16,):
            cases = OPTIONS if length < shape.context else {name: OPTIONS[name] for name in ("greedy", "penalties")}
            engine = self.engine(shape.rows, length + 64, 8192 if shape.layers > 2 else 32)
            new = min(shape.new, 40 if length == PROMPT else 64)
            self.decode_steps(engine, shape.rows, length, min(new, 20))  # compiles and records
            for name, options in cases.items():
                times, tokens = self.decode_steps(engine, shape.rows, length, new, seed=1, **options)
                in_order = self.in_order_ms(engine, shape.rows, length, new, seed=1, **options)
                numbers = {"early": statistics.median(times) * 1e3, "in_order": in_order}
                numbers["equal_tokens"] = tokens == self.in_order_tokens
                if length == PROMPT:
                    sampler._rows_on_device = lambda _, seqs: [  # type: ignore[assignment]
                        i for i, seq in enumerate(seqs) if seq.sampling_params.needs_best_only
                    ]
                    times, _ = self.decode_steps(engine, shape.rows, length, new, seed=1, **options)
                    numbers["pytorch"] = statistics.median(times) * 1e3
                    sampler._rows_on_device = rows_on_device
                result[f"{length} {name}"] = numbers
                emit("options", {length: {name: numbers}})
            engine.close()
        return result

    def swaps(self) -> dict[str, Any]:
        """Return milliseconds of a step while copies of sequences run, in three ways; means, because steps differ."""
        shape, result = self.shape, dict[str, Any]()
        length, new = (shape.context, 96) if shape.layers > 2 else (16, 40)
        engine = self.engine(shape.rows + 2, length + 128, 8192 if shape.layers > 2 else 32)
        copier, copies, seconds = engine.kv_cache.copier, dict[int, list[Tensor]](), list[tuple[str, float]]()
        block_size = engine.kv_cache.groups[0].block_size
        copier.on_copied = lambda direction, nbytes, elapsed: seconds.append((direction, nbytes / elapsed / 1e9))
        stream = copier.stream

        def selections() -> Any:
            free = [block for block, refs in enumerate(engine.kv_cache_manager.pools[0].refs) if refs == 0]
            return engine.kv_cache.iter_arrays([free[-(length // block_size) :]])

        @torch.inference_mode()
        def swap(step: int) -> None:
            if step % 4 == 0:
                copies[step] = copier.copy_out(step, selections())
            elif step % 4 == 2 and step >= 8:
                copier.prefetch(step - 8 - step % 4, copies[step - 8 - step % 4])
            elif step % 4 == 3 and step >= 8:
                key = step - 8 - step % 4
                copier.copy_in(key, selections(), copies.pop(key))

        self.decode_steps(engine, shape.rows, length, 24, swap)  # compiles, records, pins host memory
        tokens = None
        for name in ("none", "own_stream", "stream_of_the_steps"):
            copies.clear()
            seconds.clear()
            if stream is not None:
                stream.has_room = lambda nbytes, name=name: name == "own_stream"  # type: ignore[method-assign]
            between = (lambda _: None) if name == "none" else swap
            times, found = self.decode_steps(engine, shape.rows, length, new, between)
            tokens = found if tokens is None else tokens
            result[name] = {"mean_ms": statistics.mean(times) * 1e3, "median_ms": statistics.median(times) * 1e3,
                            "max_ms": max(times) * 1e3, "equal_tokens": found == tokens}  # fmt: skip
            for direction in {direction for direction, _ in seconds}:
                rates = [rate for each, rate in seconds if each == direction]
                result[name][f"{direction}_gb_s"] = statistics.median(rates)
            emit("swaps", {name: result[name]})
        result["bytes"] = sum(selection.array[selection.blocks].nbytes for selection in selections())
        engine.close()
        return result

    def hf_model(self) -> Any:
        import transformers

        shape = self.shape
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.max_len,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            dtype=torch.bfloat16,
        )
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self.device):
            model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        ours = self.model
        model.lm_head.weight.data = ours.head.weight.data
        model.model.embed_tokens.weight.data = ours.token_embedding.data
        model.model.norm.weight.data = ours.decoder.norm.weight.data
        for theirs, layer in zip(model.model.layers, ours.decoder.layers, strict=True):  # shared, not copied
            a, b = theirs.self_attn, layer.attention
            for name, linear in (("q_proj", b.q), ("k_proj", b.k), ("v_proj", b.v), ("o_proj", b.out)):
                getattr(a, name).weight.data = linear.weight.data
            for name, linear in (
                ("gate_proj", layer.mlp.gate),
                ("up_proj", layer.mlp.up),
                ("down_proj", layer.mlp.down),
            ):
                getattr(theirs.mlp, name).weight.data = linear.weight.data
            theirs.input_layernorm.weight.data = layer.norm1.weight.data
            theirs.post_attention_layernorm.weight.data = layer.norm2.weight.data
        return model

    def hf_steps(self, model: Any, prompts: Tensor, new: int, **options: Any) -> tuple[list[float], Tensor]:
        """Return the seconds of decoding steps of ``generate``, and its tokens."""
        times: list[float] = []

        def watch(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            self.sync()
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        out = model.generate(
            prompts, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, stopping_criteria=[watch],
            **options,
        )  # fmt: skip
        steps = [b - a for a, b in itertools.pairwise(times)]
        return steps[8:] if len(steps) > 16 else steps, out[:, prompts.shape[1] :]

    @torch.no_grad()
    def transformers(self) -> dict[str, Any]:
        shape, model = self.shape, self.hf_model()
        generator = torch.Generator().manual_seed(1)
        length = PROMPT if shape.layers > 2 else 16
        prompts = torch.randint(shape.vocab, (1, length), generator=generator).to(self.device)
        result = dict[str, Any]()
        for name, options in (("dynamic", {}), ("static_compiled", {"cache_implementation": "static"})):
            if name == "static_compiled" and self.device.type == "cpu":
                continue
            start = time.perf_counter()
            for _ in range(2):
                times, tokens = self.hf_steps(model, prompts, shape.new, **options)
            step = statistics.median(times)
            result[name] = {"tokens_s": 1 / step, "ms": step * 1e3, "seconds_in_all": time.perf_counter() - start}
            equal = [a == b for a, b in zip(self.tokens, tokens[0].tolist(), strict=False)]
            result[name]["first_different_token"] = equal.index(False) if False in equal else len(equal)
            emit("transformers", result)
        return result

    @torch.no_grad()
    def transformers_batch(self) -> dict[str, Any]:
        shape, model, result = self.shape, self.hf_model(), dict[str, Any]()
        prompts = torch.randint(shape.vocab, (shape.rows, shape.context)).to(self.device)
        for name, options in (("dynamic", {}), ("static", {"cache_implementation": "static", "disable_compile": True})):
            try:
                times, _ = self.hf_steps(model, prompts, min(shape.new, 32), **options)
                step = statistics.median(times)
                result[name] = {"tokens_s": shape.rows / step, "ms": step * 1e3}
            except Exception as error:
                result[name] = f"{type(error).__name__}: {str(error)[:300]}"
            emit("transformers_batch", result)
        return result


def emit(part: str, result: dict[str, Any]) -> None:
    print(json.dumps({"part": part, **result}, default=str), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--cache", default="bfloat16", help="format of the cache")
    arguments = parser.parse_args()
    bench = Bench(SHAPES[arguments.shape], arguments.device, arguments.cache)
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    emit(
        "machine",
        {
            "gpu": name,
            "shape": arguments.shape,
            "torch": torch.__version__,
            "machine": machine_info(),
            "commit": commit_id(),
        },
    )
    for part in arguments.parts or PARTS:
        start = time.perf_counter()
        try:
            result = getattr(bench, part)()
            emit(part, {**result, "part_seconds": time.perf_counter() - start})
        except Exception as error:
            emit(part, {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-1500:]})
        gc.collect()
        if arguments.device.startswith("cuda"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
