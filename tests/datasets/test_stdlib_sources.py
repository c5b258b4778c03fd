"""Python sources as text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from kvad.datasets import stdlib_sources
from kvad.datasets.stdlib_sources import find_sources
from kvad.errors import DataError


def test_the_standard_library_is_found_in_a_fixed_order() -> None:
    found = find_sources()
    assert found == find_sources() and list(found.files) == sorted(found.files)
    assert found.num_bytes == sum(path.stat().st_size for path in found.files) >= stdlib_sources.MIN_BYTES
    assert found.root == Path(sysconfig.get_path("stdlib")) and found.root / "argparse.py" in found.files
    assert not any(
        part in stdlib_sources.EXCLUDED_FOLDERS for path in found.files for part in path.relative_to(found.root).parts
    )


def test_the_next_candidate_is_used_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_sources, "MIN_BYTES", 10)
    (tmp_path / "empty").mkdir()
    package = tmp_path / "packages" / "thing"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n" * 9)
    (package / "tests").mkdir()
    (package / "tests" / "b.py").write_text("y = 1\n" * 9)
    found = find_sources([("library", str(tmp_path / "empty")), ("packages", str(tmp_path / "packages"))])
    assert (found.description, found.files) == ("packages", (package / "a.py",))


def test_missing_sources_are_refused_with_the_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no Python sources.*missing.*kvad train"):
        find_sources([("library", str(tmp_path / "missing"))])
