"""OpenVINO GenAI's continuous batching pipeline, one step at a time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.engines import Outcome, Unsupported, serve
from benchmarks.peers.scenarios import Scenario

BLOCK = 32  # tokens of a block of its cache on a CPU
PRECISIONS = {  # of products, and of keys and values
    "float32": ("f32", "f32"), "bfloat16": ("bf16", "bf16"), "int8": ("bf16", "bf16"), "int8-cache": ("bf16", "u8"),
}  # fmt: skip


class OpenVINOWorker:
    """Two pipelines of one model at most: with the prefix cache where prompts are not timed, and without."""

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        if not Path(path, "openvino_model.xml").exists():
            raise OSError(f"no openvino_model.xml in {path}")
        self.path, self.precision, self.threads, self.needs = path, precision, threads, needs
        self.caches_prefixes: bool | None = None
        self.count = 0
        self._open(True)

    def _open(self, caches_prefixes: bool) -> None:
        if self.caches_prefixes == caches_prefixes:
            return
        self.caches_prefixes, self.pipeline = caches_prefixes, None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = self.needs["rows"]
        scheduler.num_kv_blocks = self.needs["tokens"] // BLOCK + 2 * self.needs["rows"] + 1
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = caches_prefixes
        products, cache = PRECISIONS[self.precision]
        properties = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": products,
            "KV_CACHE_PRECISION": cache,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(self.path, scheduler, "CPU", properties)

    def versions(self) -> dict[str, str]:
        return {"openvino-genai": openvino_genai.get_version()}

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        if scenario.kind == "translate":
            raise Unsupported("its pipeline has no encoder-decoders of text")
        self._open(scenario.kind in ("decode", "prefix-hit", "load"))
        if scenario.kind == "prefix-hit":
            self._generate([prompts[0][: scenario.cached]], 1)
            prompts = [scenario.with_new_end(prompts[0], self.count)]
        return self._generate(prompts, scenario.new + (scenario.kind == "decode"), scenario.kind == "decode")

    def _generate(self, prompts: list[list[int]], new: int, decode_only: bool = False) -> Outcome:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        self.count += 1
        start = time.perf_counter()
        handles = [
            self.pipeline.add_request(self.count * 1000 + row, openvino.Tensor(np.array([prompt], np.int64)), config)
            for row, prompt in enumerate(prompts)
        ]
        output: list[list[int]] = [[] for _ in prompts]
        tokens = 0
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for each in handle.read().values():
                        output[row] += each.generated_ids
                        tokens += len(each.generated_ids)
            if decode_only and all(output):
                start, tokens, decode_only = time.perf_counter(), 0, False
        return Outcome(time.perf_counter() - start, tokens, output)


if __name__ == "__main__":
    serve(OpenVINOWorker())
