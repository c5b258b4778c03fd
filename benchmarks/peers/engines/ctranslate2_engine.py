"""CTranslate2: generators for decoders, translators for encoder-decoders; token ids are named ``t5``."""

from __future__ import annotations

import time

import ctranslate2

from benchmarks.peers.engines import Outcome, Unsupported, serve
from benchmarks.peers.scenarios import Scenario

COMPUTE_TYPES = {"float32": "float32", "int8": "int8"}


def names(tokens: list[int]) -> list[str]:
    return [f"t{token}" for token in tokens]


class CTranslate2Worker:
    """One model."""

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        if precision not in COMPUTE_TYPES:
            raise Unsupported(f"{precision}: this processor's products run in {', '.join(COMPUTE_TYPES)}")
        options = {"compute_type": COMPUTE_TYPES[precision], "intra_threads": threads, "inter_threads": 1}
        self.is_pair = needs["max_source_len"] > 0
        self.model = (ctranslate2.Translator if self.is_pair else ctranslate2.Generator)(path, **options)

    def versions(self) -> dict[str, str]:
        return {"ctranslate2": ctranslate2.__version__}

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        if scenario.kind == "translate":
            return self._translate(scenario, prompts)
        if scenario.kind == "prefix-hit":
            raise Unsupported("a prompt's cache is reused for static prompts only")
        if scenario.kind == "decode" and len(prompts) > 1:
            raise Unsupported("prompts of different lengths are computed token by token, in the time of decoding")
        return self._generate(prompts, scenario.new + (scenario.kind == "decode"), scenario)

    def _generate(self, prompts: list[list[int]], new: int, scenario: Scenario) -> Outcome:
        """Generate ``new`` tokens per row; for decoding, the time begins at the first token."""
        moments: list[float] = []

        def on_token(_result: ctranslate2.GenerationStepResult) -> bool:
            moments.append(time.perf_counter())
            return False

        is_decode = scenario.kind == "decode"
        start = time.perf_counter()
        results = self.model.generate_batch(
            [names(prompt) for prompt in prompts], max_batch_size=len(prompts), max_length=new, min_length=new,
            sampling_topk=1, include_prompt_in_result=False, callback=on_token if is_decode else None,
        )  # fmt: skip
        end = time.perf_counter()
        output = [result.sequences_ids[0] for result in results]
        if any(len(row) != new for row in output):
            raise RuntimeError(f"expected {new} tokens per row, got {sorted({len(row) for row in output})}")
        if is_decode:
            return Outcome(moments[-1] - moments[0], new - 1, output)
        return Outcome(end - start, scenario.work, output)

    def _translate(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        start = time.perf_counter()
        results = self.model.translate_batch(
            [names(prompt) for prompt in prompts], beam_size=scenario.beams, max_batch_size=len(prompts),
            max_decoding_length=scenario.new, min_decoding_length=scenario.new,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        output = [[-1 if name[0] == "<" else int(name[1:]) for name in each.hypotheses[0]] for each in results]
        return Outcome(seconds, scenario.work, output)


if __name__ == "__main__":
    serve(CTranslate2Worker())
