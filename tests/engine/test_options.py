"""The typed keywords of LLM and Session agree with the dataclasses that they fill."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from kvad.cache.config import CacheConfig
from kvad.engine import options
from kvad.engine.scheduling.request import SamplingOptions, SamplingParams


def field_types(kind: type) -> dict[str, object]:
    """Return the types of a dataclass's fields, without the ranges that annotate them."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def test_sampling_options_are_the_fields_of_sampling_params() -> None:
    assert get_type_hints(SamplingOptions) == field_types(SamplingParams)


def test_cache_options_are_the_fields_of_cache_config() -> None:
    fields = field_types(CacheConfig)
    del fields["dtype"]  # LLM.load names it cache_dtype, because its dtype is that of the computation
    assert get_type_hints(options.CacheOptions) == fields


def test_a_missing_or_differing_option_is_found() -> None:
    hints = get_type_hints(SamplingOptions)
    del hints["seed"]
    assert hints != field_types(SamplingParams)
    assert {**get_type_hints(SamplingOptions), "seed": str} != field_types(SamplingParams)


@pytest.mark.parametrize("name", ["cache_dtype", "cache_key_dtype", "cache_value_dtype"])
def test_load_options_name_every_cache_dtype(name: str) -> None:
    assert name in options.LoadOptions.__annotations__ and name in options.CACHE_DTYPE_FIELDS
