"""llama.cpp through its C interface: one batch per step, greedy tokens, keys and values in float16."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.peers.engines import Outcome, Unsupported, serve
from benchmarks.peers.scenarios import Scenario

BATCH = 2048
CPU_INFO = Path("/proc/cpuinfo")
KEYS_AND_VALUES = {"float32": 0, "bfloat16": 1, "int8": 1, "int8-cache": 8}  # ggml types F32, F16, Q8_0


class LlamaCppWorker:
    """One model; a context for the rows and the length of the last scenario."""

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        if precision == "int8" and CPU_INFO.exists() and " amx_int8" in CPU_INFO.read_text():
            params.use_extra_bufts = False  # its AMX kernels end with a segmentation fault in q8_0 (0.3.36)
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {path}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.threads, self.cache_type = threads, KEYS_AND_VALUES[precision]
        self.context: Any = None
        self.shape, self.prompts = (0, 0), list[list[int]]()
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def versions(self) -> dict[str, str]:
        return {"llama-cpp-python": lib.__version__}

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        if scenario.kind == "translate":
            raise Unsupported("the converter to GGUF has no such architecture")
        self._open(len(prompts), max(scenario.lengths) + scenario.new + 8)
        if scenario.kind == "decode":
            return self._decode(prompts, scenario.new)
        if scenario.kind == "prefix-hit":
            return self._prefix_hit(prompts[0], scenario.cached)
        self.prompts = []
        lib.llama_memory_clear(self.memory, True)
        start = time.perf_counter()
        output = [[token] for token in self._prefill(prompts, [0] * len(prompts))]
        for _ in range(scenario.new - 1):
            self._step(output, prompts)
        return Outcome(time.perf_counter() - start, scenario.work, output)

    def _decode(self, prompts: list[list[int]], new: int) -> Outcome:
        """Time the steps after the first token; the prompts are computed once."""
        if self.prompts != prompts:
            lib.llama_memory_clear(self.memory, True)
            self._prefill([prompt[:-1] for prompt in prompts], [0] * len(prompts))
            self.prompts = prompts
        for row, prompt in enumerate(prompts):
            lib.llama_memory_seq_rm(self.memory, row, len(prompt) - 1, -1)
        output = [[token] for token in self._prefill(prompts, [len(prompt) - 1 for prompt in prompts])]
        start = time.perf_counter()
        for _ in range(new):
            self._step(output, prompts)
        return Outcome(time.perf_counter() - start, new * len(prompts), output)

    def _prefix_hit(self, prompt: list[int], cached: int) -> Outcome:
        if self.prompts != [prompt[:cached]]:
            lib.llama_memory_clear(self.memory, True)
            self._prefill([prompt[:cached]], [0])
            self.prompts = [prompt[:cached]]
        start = time.perf_counter()
        lib.llama_memory_seq_rm(self.memory, 0, cached, -1)
        output = self._prefill([prompt], [cached])
        return Outcome(time.perf_counter() - start, len(prompt), [output])

    def _open(self, rows: int, length: int) -> None:
        length = -(-length // 256) * 256
        if self.shape[0] == rows and self.shape[1] >= length:
            return
        if self.context is not None:
            lib.llama_free(self.context)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * length, rows
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = self.cache_type
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise MemoryError(f"llama.cpp: no context for {rows} rows of {length} tokens")
        self.memory = lib.llama_get_memory(self.context)
        self.shape, self.prompts = (rows, length), []

    def _prefill(self, prompts: list[list[int]], starts: list[int]) -> list[int]:
        """Compute the tokens of each prompt from ``starts`` on, in batches; return the next token of each."""
        pending = [(row, at) for row, prompt in enumerate(prompts) for at in range(starts[row], len(prompt))]
        result = [0] * len(prompts)
        for begin in range(0, len(pending), BATCH):
            part = pending[begin : begin + BATCH]
            entries = [(prompts[row][at], at, row, at == len(prompts[row]) - 1) for row, at in part]
            for row, token in self._compute(entries):
                result[row] = token
        return result

    def _step(self, output: list[list[int]], prompts: list[list[int]]) -> None:
        entries = [
            (row[-1], len(prompt) + len(row) - 1, index, True)
            for index, (row, prompt) in enumerate(zip(output, prompts, strict=True))
        ]
        for row, token in self._compute(entries):
            output[row].append(token)

    def _compute(self, entries: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run one batch of (token, position, row, wants logits); return (row, next token) where logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (token, position, row, is_last) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = is_last
        if status := lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        found = []
        for index, (_, _, row, is_last) in enumerate(entries):
            if is_last:
                logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, index), (self.vocab_size,))
                found.append((row, int(logits.argmax())))
        return found


if __name__ == "__main__":
    serve(LlamaCppWorker())
