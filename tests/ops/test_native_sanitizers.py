"""The native CPU kernels under sanitizers: no access outside an array, no undefined behaviour, no data race."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvad.ops.native import build, library

DRIVER = Path(__file__).with_name("native_driver.cpp")
# GCC takes half a minute to optimize with AddressSanitizer; ThreadSanitizer is quick to compile and slow to run.
SANITIZERS = {
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-fsanitize=thread"),
}
PROGRAMS = {"address": 30, "thread": 14}
THREADS = {"address": ("1", "3"), "thread": ("3", "2")}  # one thread has no race
FLAGS = ("-g", "-pthread", "-Wno-unknown-pragmas", "-Wno-uninitialized", '-DKVAD_SOURCE_HASH=""', f"-I{build.FOLDER}")
# LeakSanitizer needs rights that containers may lack.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
PROBE = "#include <sanitizer/asan_interface.h>\n#include <thread>\nint main() { std::thread([] {}).join(); }\n"


def best_variant() -> str:
    """Return the best variant of this machine, or "portable" if none is built."""
    return next(iter(library.runnable_variants()), "portable")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ENVIRONMENT
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


def compile_driver(sanitizer: str, variant: str, source: Path, program: Path) -> subprocess.CompletedProcess[str]:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    # Without OpenMP: ThreadSanitizer does not know its barriers. The driver starts threads of its own.
    kept = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC", "-shared", "-fopenmp")]
    flags = (*kept, *FLAGS, *SANITIZERS[sanitizer], *build.VARIANTS[variant])
    return run(compiler, *flags, str(source), "-o", str(program))


def launcher(sanitizer: str, folder: Path) -> tuple[str, ...]:
    """Return how to start a program with a sanitizer; skip the test if there is none, or none that works."""
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text(PROBE)
    compiled = compile_driver(sanitizer, "portable", source, program)
    if compiled.returncode:
        pytest.skip(f"no {sanitizer} sanitizer: {compiled.stderr.strip()[-200:]}")
    # ThreadSanitizer of some compilers does not know the layout of memory with much randomization.
    starts = [(), ("setarch", os.uname().machine, "-R")] if shutil.which("setarch") else [()]
    results = [run(*start, str(program)) for start in starts]
    for start, result in zip(starts, results, strict=True):
        if result.returncode == 0:
            return start
    pytest.skip(f"the {sanitizer} sanitizer does not run: {results[0].stderr.strip()[-200:]}")


@pytest.mark.parametrize(
    ("sanitizer", "is_best"),
    [("address", True), pytest.param("address", False, marks=pytest.mark.long), ("thread", True)],
)
def test_random_programs(sanitizer: str, is_best: bool, tmp_path: Path) -> None:
    variant = best_variant() if is_best else "portable"
    if variant == "portable" and is_best and sanitizer == "address":
        pytest.skip("portable is the best variant of this machine")
    start, program = launcher(sanitizer, tmp_path), tmp_path / "driver"
    compiled = compile_driver(sanitizer, variant, DRIVER, program)
    assert compiled.returncode == 0, compiled.stderr
    result = run(*start, str(program), "0", str(PROGRAMS[sanitizer]), *THREADS[sanitizer])
    assert result.returncode == 0, result.stdout + result.stderr[:8000]
