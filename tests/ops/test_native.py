"""The native CPU kernels as a library: how they are built, chosen and loaded, and the weights that they pack."""

from __future__ import annotations

import gc
import importlib.util
import mmap
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kvad.ops.native import build, library

BUILT = library.load().library is not None
needs_kernels = pytest.mark.skipif(not BUILT, reason=library.load().reason)
PANEL = library.PANEL
ROOT = Path(__file__).parents[2]


def load_again(monkeypatch: pytest.MonkeyPatch, value: str) -> library.LoadResult:
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, value)
    return library.load.__wrapped__()


@needs_kernels
def test_every_variant_of_this_machine_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = library.runnable_variants()
    assert "portable" in variants
    for variant in variants:
        found = load_again(monkeypatch, variant).library
        assert found is not None and found.variant == variant
    best = load_again(monkeypatch, "").library
    assert best is not None and best.variant == variants[0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("off", "KVAD_NATIVE=off"), ("sse9", "must be off or one of amx, avx512-bf16, avx512, avx2, portable")],
)
def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, value: str, reason: str) -> None:
    result = load_again(monkeypatch, value)
    assert result.library is None and reason in result.reason


@pytest.fixture
def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the library be found in another folder, with the sources and what is built."""
    for path in build.FOLDER.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "SOURCE", tmp_path / "step.cpp")
    return tmp_path


@needs_kernels
@pytest.mark.parametrize("damage", ["changed source", "truncated", "other library", "missing"])
def test_stale_and_damaged_libraries_are_not_used(
    copied_sources: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in copied_sources.glob("*.so"):
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:1000])
        elif damage == "other library":
            path.write_bytes(b"not a library")
        elif damage == "missing":
            path.unlink()
    if damage == "changed source":
        (copied_sources / "simd.h").write_text((copied_sources / "simd.h").read_text() + "// changed\n")
    result = load_again(monkeypatch, "")
    assert result.library is None and "run python -m kvad.ops.native.build" in result.reason


def test_without_a_compiler_nothing_is_built(
    copied_sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in copied_sources.glob("*.so"):
        path.unlink()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build() == [] and not list(copied_sources.glob("*.so"))
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_wheel_is_built_with_and_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_compiler: bool
) -> None:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / "kvad" / "ops" / "native"
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__", "tmp*"))
    compiler = tmp_path / "cc"
    if has_compiler:
        compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    data: dict[str, Any] = {"pure_python": True, "infer_tag": False, "artifacts": []}
    module.NativeBuildHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel").initialize("standard", data)
    names = [f"kvad/ops/native/step-{variant}.so" for variant in build.variants_to_build() if has_compiler]
    assert data == {"pure_python": not has_compiler, "infer_tag": has_compiler, "artifacts": names}
    assert sorted(path.name for path in folder.glob("*.so")) == sorted(Path(name).name for name in names)
    hint = "CPU kernels are not built. python -m kvad.ops.native.build builds them later"
    assert (hint in capsys.readouterr().err) != has_compiler


def test_a_compiler_that_fails_is_reported(
    copied_sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = copied_sources / "cc"
    compiler.write_text("#!/bin/sh\necho 'unknown flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.build() == []
    assert "portable is not built: unknown flag" in capsys.readouterr().err


@needs_kernels
def test_the_library_uses_the_threads_of_torch() -> None:
    program = "import torch; from kvad.ops.native import library; library.load(); print(open('/proc/self/maps').read())"
    maps = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert len({line.split()[-1] for line in maps.splitlines() if "gomp" in line}) <= 1


# ---------------------------------------------------------------- packed weights


@needs_kernels
@pytest.mark.parametrize("shape", [(70, 9), (5, 1), (1, 6), (3, 40, 7)])
def test_transposed_matrices_are_packed_as_their_copies(shape: tuple[int, ...]) -> None:
    found, files = library.load().library, library.FileMappings()
    matrix = torch.randn(*shape)
    transposed = torch.cat([matrix.mT.contiguous(), matrix.mT], -1)[..., : shape[-2]].mT  # columns of a wider matrix
    assert torch.equal(transposed, matrix)
    packed = [library.PackedWeights().panels(found, [each], files) for each in (transposed, matrix)]
    assert torch.equal(*packed)


@pytest.mark.skipif(not library.SMAPS.is_file(), reason="the system does not say what is mapped")
def test_the_pages_of_columns_of_a_file_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 22))
    with (tmp_path / "file").open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    stored = torch.frombuffer(content, dtype=torch.float32).view(1024, 1024)
    columns = stored.t()[:64]

    def resident() -> int:
        spans = re.findall(r"^([0-9a-f]+)-\S+ .*\n(?:.*\n)*?Rss: +([0-9]+) kB", library.SMAPS.read_text(), re.MULTILINE)
        return next(int(rss) for low, rss in spans if int(low, 16) == stored.data_ptr())

    assert float(columns.sum()) == 0 and resident() == 4096
    library.FileMappings().release(columns)
    assert resident() <= 8


@needs_kernels
@given(rows=st.integers(1, 70), width=st.integers(1, 9), half=st.booleans(), interleaved=st.booleans())
def test_packed_panels_have_every_number_once(rows: int, width: int, half: bool, interleaved: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    first, second = (nn.Parameter(torch.randn(rows, width).to(dtype)) for _ in range(2))
    found = library.load().library
    assert found is not None
    packed = library.PackedWeights().panels(found, [first, second], library.FileMappings(), interleaved=interleaved)
    step = 4 // dtype.itemsize
    plain = packed.view(-1, packed.shape[1] // step if half else width, PANEL, step) if half else None
    if plain is None:
        plain = packed.view(-1, packed.shape[1], PANEL, 1)
    flat = plain.transpose(1, 2).reshape(-1, packed.shape[1])
    if interleaved:
        parts = flat.view(-1, 2, PANEL // 2, packed.shape[1]).transpose(0, 1).reshape(2, -1, packed.shape[1])
        assert torch.equal(parts[0, :rows, :width], first) and torch.equal(parts[1, :rows, :width], second)
    else:
        assert torch.equal(flat[:rows, :width], first) and torch.equal(flat[rows : 2 * rows, :width], second)
        assert not flat[2 * rows :].any()
    assert not flat[:, width:].any()


@needs_kernels
def test_a_changed_weight_is_packed_again() -> None:
    found, files, weights = library.load().library, library.FileMappings(), library.PackedWeights()
    assert found is not None
    matrix = nn.Parameter(torch.randn(40, 8))
    packed = weights.panels(found, [matrix], files)
    assert weights.panels(found, [matrix], files) is packed
    with torch.no_grad():
        matrix.mul_(2)
    doubled = weights.panels(found, [matrix], files)
    assert torch.equal(doubled, 2 * packed)
    matrix.data = torch.zeros(40, 8)
    assert not weights.panels(found, [matrix], files).any()


@needs_kernels
def test_panels_in_memory_share_a_region_of_huge_pages() -> None:
    """Alone each matrix of a small model would be in pages of 4 KiB."""
    found, files, weights = library.load().library, library.FileMappings(), library.PackedWeights()
    matrices = [nn.Parameter(torch.randn(512, 512).bfloat16()) for _ in range(6)]
    panels = [weights.panels(found, [matrix], files) for matrix in matrices]
    assert len({each.untyped_storage().data_ptr() for each in panels}) == 1
    large = weights.panels(
        found, [nn.Parameter(torch.zeros(8, library.REGION_BYTES // (2 * PANEL) + 2).bfloat16())], files
    )
    assert large.untyped_storage().data_ptr() != panels[0].untyped_storage().data_ptr()
    plain = library.PackedWeights().panels(found, [matrices[0].detach().clone()], files)
    assert torch.equal(panels[0], plain)


def test_memory_of_a_mapped_file_is_given_back_unless_it_was_written(tmp_path: Path) -> None:
    path, size = tmp_path / "weights", 1 << 24
    path.write_bytes(b"\1" * size)

    def mapped() -> torch.Tensor:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    tensor, written, anonymous = mapped(), mapped(), torch.ones(size, dtype=torch.uint8)
    assert int(tensor.sum()) == size
    written[100] = 7
    files = library.FileMappings()
    if not library.SMAPS.is_file():
        pytest.skip("only Linux says what is mapped")
    assert files.contain(tensor) and not files.contain(written) and not files.contain(anonymous)
    before = resident_bytes()
    for each in (tensor, written, anonymous):
        files.release(each)
    assert before - resident_bytes() > size // 2
    assert int(tensor.sum()) == int(anonymous.sum()) == size and written[100] == 7
    del tensor, written
    gc.collect()


def resident_bytes() -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssFile"))
    return int(line.split()[1]) * 1024
