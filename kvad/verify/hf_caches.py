"""The caches of ``transformers``, compared with the same reference and named by the same diagnosis.

``DynamicCache``, ``StaticCache`` and ``QuantizedCache`` run the checkpoint's own transformers model over the streams of
``kvad verify``, in chunks and token by token; the model without a cache runs first, so a difference between the two
implementations is not taken for a fault of a cache. ``transformers`` is imported here only, and only when used.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvad import model as model_lib
from kvad.config import attention_specs
from kvad.errors import UsageError
from kvad.model import NoCache, Transformer
from kvad.verify import diagnosis, mismatch, references, replay, report, scenario, signatures
from kvad.verify.reference_model import ReferenceModel, WholeSequence, reference_model

CACHES = ("none", "DynamicCache", "StaticCache", "QuantizedCache")
Keys = list[tuple[Tensor, Tensor]]  # per layer: keys [K, T, D] and values [K, T, Dv] as stored


def verify_hf(
    folder: Path,
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: scenario.ScenarioOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> report.VerifyReport:
    """Compare transformers' caches with the reference.

    Args:
        folder: The checkpoint as a Hugging Face folder.
        model: The same model here, in the dtype and on the device that run.
        prompts: Token ids.
        options: Sequences; prompts are computed in chunks.
        progress: Called with the name of each cache.

    Raises:
        UsageError: If transformers is not installed.
    """
    start = time.perf_counter()
    try:
        import transformers
    except ImportError:
        raise UsageError("--against hf: transformers is not installed", "pip install transformers") from None
    if any(spec.values_in_keys for spec in attention_specs(model.config)):
        raise UsageError("--against hf: is not supported for latent attention", "Verify kvad's cache: omit --against.")
    exact, plain = reference_model(model, torch.float64), reference_model(model)
    streams = scenario.build_streams(model, prompts, dataclasses.replace(options, prefix_hit=False))
    hf_model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=plain.compute_dtype)
    hf_model = hf_model.to(plain.token_embedding.device).eval()
    sequences = [WholeSequence(stream.tokens(0)) for stream in streams]
    no_cache = NoCache(exact.config, kernel="reference")
    reference = references.compute_reference(exact, plain, sequences, no_cache)
    run = _Comparison(hf_model, exact, streams, reference, options.prefill_chunk_size)
    cases, skipped = list[report.CaseReport](), list[report.SkippedCase]()
    for name in CACHES:
        progress(name)
        try:
            cases.append(run.case(name))
        except ImportError as error:  # the backend of a quantized cache
            skipped.append(report.SkippedCase(f"transformers {name}", str(error).partition("\n")[0]))
    return report.VerifyReport(
        rows=tuple(len(sequence.tokens) for sequence in sequences),
        positions=sum(len(logits) for logits in reference.logits.values()),
        logit_scale=reference.scale,
        injected=None,
        cases=tuple(cases),
        notes=(f"transformers {transformers.__version__}; float64 caches are not verified: it computes in float32",),
        seconds=time.perf_counter() - start,
        skipped=tuple(skipped),
    )


class _Comparison:
    """One transformers model and the reference of its sequences."""

    def __init__(
        self,
        model: Any,
        exact: ReferenceModel,
        streams: Sequence[replay.ReplayStream],
        reference: references.ReferenceLogits,
        chunk: int,
    ) -> None:
        self.model, self.exact, self.streams, self.reference = model, exact, streams, reference.logits
        self.bound, self.chunk, self.dtype = reference.tolerance, chunk, str(model.dtype).removeprefix("torch.")

    def case(self, name: str) -> report.CaseReport:
        """Run all streams with one kind of cache, "none" without one."""
        start = time.perf_counter()
        runs = [self._run(name, stream) for stream in self.streams]
        pieces: dict[replay.SequenceKey, list[tuple[int, Tensor]]] = {}
        for index, (logits, _) in enumerate(runs):
            pieces[index, 0] = [(0, logits)]
        comparison = references.compare_logits(replay.ReplayResult(pieces), self.reference, 2 * self.bound.max_dlogit)
        within, finding = self.bound.allows(comparison), None
        verdict: report.Verdict = "within tolerance"
        if not within:
            finding = None if name == "none" else self._diagnose([keys for _, keys in runs])
            is_finite = math.isfinite(comparison.max_dlogit)
            verdict = "lossy by design" if name == "QuantizedCache" and is_finite else "broken"
        reason = "the two implementations of this model differ without a cache" if name == "none" else ""
        return report.CaseReport(
            layout="transformers",
            dtype=name,
            **vars(comparison),
            tolerance=self.bound.max_dlogit,
            rms_tolerance=self.bound.rms_dlogit,
            structure=None,
            verdict=verdict,
            seconds=time.perf_counter() - start,
            scenario_counts=dataclasses.asdict(replay.ScenarioCounts(rows=len(runs))),
            finding=finding if verdict == "broken" else None,
            reason=reason if verdict == "broken" and finding is None else "",
        )

    @torch.inference_mode()
    def _run(self, name: str, stream: replay.ReplayStream) -> tuple[Tensor, Keys]:
        """Return the logits [T, V] of a stream, and the keys and values in the cache at its end."""
        ids = torch.tensor([stream.tokens(0)], device=self.model.device)
        if name == "none":
            return self.model(ids, use_cache=False).logits[0].cpu(), []
        cache, parts, low = self._build(name, stream.limit), list[Tensor](), 0
        while low < ids.shape[1]:
            high = min(low + self.chunk, len(stream.prompt)) if low < len(stream.prompt) else low + 1
            high = max(high, self._first_chunk(ids.shape[1]))
            positions = torch.arange(low, high, device=ids.device)
            output = self.model(ids[:, low:high], past_key_values=cache, use_cache=True, cache_position=positions)
            parts.append(output.logits[0].cpu())
            low = high
        length = ids.shape[1]
        stored = [(layer.keys, layer.values) for layer in cache.layers]
        keys = [(k[0, :, :length].cpu(), v[0, :, :length].cpu()) for k, v in stored if k is not None and k.dim() == 4]
        return torch.cat(parts), keys

    def _first_chunk(self, length: int) -> int:
        """Return the tokens that transformers must compute at once: generation drops the cache there."""
        config = self.exact.config
        short_lens = model_lib.positions.short_regime_lens(config.stack, config.max_seq_len)
        return max((original + 1 for original in short_lens if original < length), default=0)

    def _build(self, name: str, limit: int) -> Any:
        import transformers

        if name == "DynamicCache":
            return transformers.DynamicCache(config=self.model.config)
        if name == "StaticCache":
            return transformers.StaticCache(config=self.model.config, max_cache_len=limit)
        return transformers.QuantizedCache("quanto", self.model.config)

    def _diagnose(self, stored: Sequence[Keys]) -> report.MismatchFinding:
        """Find the first layer, sequence and position whose stored keys or values differ, and name the fault."""
        specs = attention_specs(self.exact.config)
        true = {
            (index, 0): mismatch.reference_layers(self.exact, stream, 0, specs, False)
            for index, stream in enumerate(self.streams)
        }
        close = diagnosis.CLOSE.get(self.model.dtype, 4 * torch.finfo(self.model.dtype).eps)
        for layer, index in ((layer, index) for layer in range(len(specs)) for index in range(len(stored))):
            if len(stored[index]) != len(specs):
                break  # a quantized cache, whose keys are packed
            keys, values = (x.double() for x in stored[index][layer])
            if keys.shape[1] < len(self.streams[index].tokens(0)):
                break  # a sliding window holds its last tokens only
            expected = true[index, 0][layer]
            for what, have, want in (("k", keys, expected.k), ("v", values, expected.v)):
                first = mismatch.first_difference(have, want, close * (layer + 1), 1)
                if first is not None:
                    fault, evidence = self._name(layer, (index, 0), true, what, have, want, close * (layer + 1))
                    where = layer, index, 0, first[0], what, first[1]
                    return report.MismatchFinding(fault, *where, evidence, stored=self.dtype)
        evidence = "the stored keys and values are right: the mask, the positions or the scale of the queries are not"
        return report.MismatchFinding("mask", 0, -1, 0, 0, "the logits", 0.0, evidence, stored=self.dtype)

    def _name(
        self,
        layer: int,
        key: replay.SequenceKey,
        true: dict[replay.SequenceKey, list[mismatch.RecordedLayer]],
        what: str,
        have: Tensor,
        want: Tensor,
        close: float,
    ) -> signatures.Explanation:
        """Name the fault of one layer's keys or values [K, T, D] by the tests of an engine's slots."""
        gap = (have - want).abs().amax(dim=(0, 2))
        wrong = (gap > close * float(want.abs().max())).nonzero().squeeze(-1)
        case: Any = SimpleNamespace(
            context=SimpleNamespace(stored=(self.dtype, self.dtype), reference=true),
            call=SimpleNamespace(layer=layer),
            reference=true[key][layer],
            key=key,
            start=0,
            k=have,
            positions=torch.arange(have.shape[1]),
            expected=torch.arange(have.shape[1]),
            same=lambda x, y, dim: mismatch.first_difference(x, y, close, dim) is None,
        )
        return signatures.name_stored(case, what, have, want, wrong)
