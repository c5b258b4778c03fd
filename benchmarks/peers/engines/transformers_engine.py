"""transformers: forward passes with its dynamic cache, and ``generate`` for encoder-decoders.

It is also the reference of the tokens: ``check`` reads an engine's tokens in one pass of the float32 model.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.peers.engines import Outcome, Unsupported, serve
from benchmarks.peers.scenarios import Scenario


class TransformersWorker:
    """One model; the cache of the last scenario's prompts."""

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        if precision not in ("float32", "bfloat16"):
            raise Unsupported(f"{precision} is not among what it runs on a CPU without other packages")
        torch.set_num_threads(threads)
        config = transformers.AutoConfig.from_pretrained(path)
        self.is_pair = bool(config.is_encoder_decoder)
        kind = transformers.AutoModelForSeq2SeqLM if self.is_pair else transformers.AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(path, dtype=getattr(torch, precision)).eval()
        self.prompts, self.cache = list[list[int]](), None

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        if scenario.kind == "translate":
            return self._translate(scenario, prompts)
        if scenario.kind == "decode":
            return self._decode(prompts, scenario.new)
        if scenario.kind == "prefix-hit":
            self._prefill([prompts[0][: scenario.cached]])
            start = time.perf_counter()
            token = self._forward(torch.tensor([prompts[0][scenario.cached :]]))
            return Outcome(time.perf_counter() - start, len(prompts[0]), [token.tolist()])
        start = time.perf_counter()
        self.prompts = []
        output = [self._prefill(prompts)]
        for _ in range(scenario.new - 1):
            output.append(self._forward(output[-1][:, None]))
        seconds = time.perf_counter() - start
        return Outcome(seconds, scenario.work, torch.stack(output, 1).tolist())

    def _decode(self, prompts: list[list[int]], new: int) -> Outcome:
        if self.prompts != prompts:
            self.first = self._prefill(prompts)
            self.prompts = prompts
        self.cache.crop(max(map(len, prompts)))
        output = [self.first]
        start = time.perf_counter()
        for _ in range(new):
            output.append(self._forward(output[-1][:, None]))
        seconds = time.perf_counter() - start
        return Outcome(seconds, new * len(prompts), torch.stack(output, 1).tolist())

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        """Compute the prompts, padded on the left, and return the next token of each."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        self.padding = torch.tensor([longest - len(prompt) for prompt in prompts])
        self.cache = transformers.DynamicCache(config=self.model.config)
        return self._forward(ids)

    def _forward(self, ids: Tensor) -> Tensor:
        """Append ids [rows, new] to the cache; return the greedy next tokens [rows]."""
        begin = self.cache.get_seq_length()
        places = torch.arange(begin + ids.shape[1])
        extra: dict[str, Tensor] = {}
        if self.padding.any():
            extra["attention_mask"] = (places[None] >= self.padding[:, None]).long()
            extra["position_ids"] = (places[None, begin:] - self.padding[:, None]).clamp(min=0)
        logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **extra).logits
        return logits[:, -1].argmax(-1)

    @torch.inference_mode()
    def check(self, prompts: list[list[int]], outputs: list[list[list[int]]]) -> list[dict[str, Any]]:
        """Read each engine's tokens after each prompt and compare them with the most likely ones at their positions.

        Args:
            prompts: The prompts.
            outputs: New tokens by engine and prompt.

        Returns:
            For each engine, ``agree`` of ``count`` tokens; ``gap``, the difference of the logits at the first other
            token, in standard deviations of that position's logits (None if all agree).
        """
        checks: list[dict[str, Any]] = [{"agree": 0, "count": 0, "gap": None} for _ in outputs]
        self.prompts = []
        for index, prompt in enumerate(prompts):
            self._prefill([prompt[:-1]])
            for output, check in zip(outputs, checks, strict=True):
                row = output[index]
                self.cache.crop(len(prompt) - 1)
                ids = torch.tensor([[prompt[-1], *row[:-1]]])
                logits = self.model(ids, past_key_values=self.cache, use_cache=True).logits[0].float()
                chosen = logits.gather(1, torch.tensor(row)[:, None])[:, 0]
                short = (logits.amax(1) - chosen) / logits.std(1)
                check["agree"] += int((short == 0).sum())
                check["count"] += len(row)
                if check["gap"] is None and (short > 0).any():
                    check["gap"] = round(float(short[short > 0][0]), 4)
        return checks

    def _translate(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        config = self.model.config
        options = transformers.GenerationConfig(
            decoder_start_token_id=config.decoder_start_token_id, pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id, num_beams=scenario.beams, do_sample=False,
            max_new_tokens=scenario.new, min_new_tokens=scenario.new,
        )  # fmt: skip
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        return Outcome(time.perf_counter() - start, scenario.work, output[:, 1:].tolist())


if __name__ == "__main__":
    serve(TransformersWorker())
