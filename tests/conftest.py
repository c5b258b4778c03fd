"""Settings of all tests: a fixed number of threads, reproducible hypothesis, and ``--sample N`` of a suite."""

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Set before torch is imported, so that parallel workers share the cores and sums are reproducible.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    # a worker inherits the controller's setting, which is meant for one process
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ[_name] = "1"
    else:
        os.environ.setdefault(_name, "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", parent=settings.get_profile("ci"), max_examples=1000)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="run only N of the collected tests, spread evenly, and of the long ones those of a minute or less",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _mark_long(items)
    yield  # -m and -k
    selected: int | None = config.getoption("--sample")
    if selected is None:
        return
    brief = [item for item in items if _minutes(item) <= 1]
    chosen = brief[:: max(1, -(-len(brief) // selected))]
    sampled = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in sampled])
    items[:] = chosen


def _mark_long(items: list[pytest.Item]) -> None:
    """Mark the tests of a function with ``one_in(N)`` as long, but for one in N, drawn from the function's name."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, tests in functions.items():
        (count,) = tests[0].get_closest_marker("one_in").args
        random.Random(name).shuffle(tests)
        for item in tests[-(-len(tests) // count) :]:
            item.add_marker(pytest.mark.long)


def _minutes(item: pytest.Item) -> float:
    marker = item.get_closest_marker("long")
    return float(marker.kwargs.get("minutes", 1)) if marker else 0.0


@pytest.fixture
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans of large models fit, whatever else runs on this machine."""
    monkeypatch.setattr("kvad.cache.sizing.available_bytes", lambda: 64 << 30)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run with one thread: with small tensors a second one takes more time than it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every model in PyTorch: the test changes what the native kernels replace."""
    from kvad import ops

    monkeypatch.setattr(ops.native, "load", lambda: ops.native.library.LoadResult(None, "a test"))
