"""Pytest plugin that records the largest difference of a test's comparisons as a property of its report.

pytest -p tests.hf_parity.record --junitxml=results.xml tests/checkpoint/test_families.py
"""

from collections.abc import Generator
from typing import Any

import pytest
import torch


def _difference(actual: Any, expected: Any) -> float:
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)) or actual.shape != expected.shape:
        return 0.0  # assert_close will report the error
    return float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    seen: list[float] = []
    compare = torch.testing.assert_close

    def recording(actual: Any, expected: Any, **options: Any) -> None:
        seen.append(_difference(actual, expected))
        compare(actual, expected, **options)

    torch.testing.assert_close = recording
    try:
        return (yield)
    finally:
        torch.testing.assert_close = compare
        if seen:
            item.user_properties.append(("largest", f"{max(seen):.1e}"))
