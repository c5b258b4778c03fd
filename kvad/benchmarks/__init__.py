"""Benchmarks: cache speed, cache quality, needle tasks, streaming perplexity, servers under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.benchmarks import cache_quality as cache_quality
    from kvad.benchmarks import cache_speed as cache_speed
    from kvad.benchmarks import needle_tasks as needle_tasks
    from kvad.benchmarks import results as results
    from kvad.benchmarks import scorers as scorers
    from kvad.benchmarks import serve as serve
    from kvad.benchmarks import speculation as speculation
    from kvad.benchmarks import step_profile as step_profile
    from kvad.benchmarks import streaming_perplexity as streaming_perplexity
    from kvad.benchmarks import variants as variants
    from kvad.benchmarks.cache_quality import bench_quality as bench_quality
    from kvad.benchmarks.cache_speed import bench_cache as bench_cache
    from kvad.benchmarks.scorers import ScoredRow as ScoredRow
    from kvad.benchmarks.serve import bench_serve as bench_serve
    from kvad.benchmarks.speculation import bench_speculation as bench_speculation
    from kvad.benchmarks.step_profile import bench_profile as bench_profile
    from kvad.benchmarks.streaming_perplexity import bench_streaming as bench_streaming
    from kvad.benchmarks.variants import Variant as Variant
    from kvad.benchmarks.variants import select_variants as select_variants

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
