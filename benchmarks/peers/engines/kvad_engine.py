"""kvad: the engine as it serves, one step at a time."""

from __future__ import annotations

import time

import torch

import kvad
from benchmarks.peers.engines import Outcome, serve
from benchmarks.peers.scenarios import Scenario
from kvad import LLM
from kvad.cache import CacheConfig
from kvad.engine.scheduling import SamplingParams


class KvadWorker:
    """LLM with the cache that the scenarios need."""

    llm: LLM
    count = 0  # runs
    salt = ""  # cached blocks are shared between requests with the same salt

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        torch.set_num_threads(threads)
        computed = "float32" if precision == "float32" else "bfloat16"
        cache = CacheConfig(
            dtype={"float32": "float32", "int8-cache": "int8"}.get(precision, "bfloat16"),
            max_seq_len=needs["max_len"],
            max_num_seqs=needs["rows"],
            num_blocks=needs["tokens"] // 16 + needs["rows"] + 1,
            max_source_len=needs["max_source_len"],
        )
        activation_bits = 8 if precision == "int8" else None  # as the other engines do
        self.llm = LLM.load(path, dtype=computed, cache_config=cache, activation_bits=activation_bits)

    def versions(self) -> dict[str, str]:
        return {"kvad": f"{kvad.__version__} at {kvad.__path__[0]}", "torch": torch.__version__}

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        is_translation = scenario.kind == "translate"
        if scenario.kind == "prefix-hit":
            prefix = prompts[0][: scenario.cached]
            self._generate([prefix], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            prompts = [scenario.with_new_end(prompts[0], self.count)]
        self.count += 1
        self.salt = "" if scenario.kind in ("decode", "prefix-hit") else str(self.count)  # a timed prompt has no hits
        new = scenario.new + (scenario.kind == "decode")
        params = SamplingParams(
            max_tokens=new, min_tokens=new if is_translation else 0, temperature=0, ignore_eos=not is_translation,
            num_beams=scenario.beams,
        )  # fmt: skip
        return self._generate(prompts, params, decode_only=scenario.kind == "decode", translate=is_translation)

    def _generate(
        self, prompts: list[list[int]], params: SamplingParams, *, decode_only: bool = False, translate: bool = False
    ) -> Outcome:
        """Run requests to their ends; ``decode_only``: the time begins when every row has its first token."""
        engine = self.llm.engine
        start = time.perf_counter()
        if translate:
            target = self.llm.texts.generation.decoder_start_token_id
            requests = [
                engine.add_request([target], params, encoder_token_ids=prompt, cache_salt=self.salt)
                for prompt in prompts
            ]
        else:
            requests = [engine.add_request(prompt, params, cache_salt=self.salt) for prompt in prompts]
        output: dict[int, list[int]] = {request: [] for request in requests}
        started, tokens = 0, 0
        while not engine.idle:
            for chunk in engine.step():
                assert chunk.error is None, chunk.error
                if chunk.token_id is None:
                    continue
                row = output[chunk.request]
                started += not row
                row.append(chunk.token_id)
                tokens += 1
            if decode_only and started == len(requests):
                start, tokens, decode_only = time.perf_counter(), 0, False
        return Outcome(time.perf_counter() - start, tokens, list(output.values()))


if __name__ == "__main__":
    serve(KvadWorker())
