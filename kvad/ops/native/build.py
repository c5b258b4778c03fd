"""Compile the CPU kernels: one library per instruction set, beside the sources.

``pip install`` runs this through ``hatch_build.py``. Without a C++ compiler nothing is built, and kvad computes with
torch alone. ``python -m kvad.ops.native.build`` builds again, after a change of the sources or with another compiler
(``CXX``). This file imports nothing but the standard library, because the build has no other packages.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "step.cpp"
AVX512_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512")
# By preference. The flags of each instruction set; "portable" runs on any machine of the architecture.
VARIANTS = {
    "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512-bf16": AVX512_BF16,
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
)
COMPILERS = ("c++", "g++", "clang++")


def library_path(variant: str) -> Path:
    return FOLDER / f"step-{variant}.so"


def source_hash() -> str:
    """Return a hash of the sources; a library carries that of its own."""
    digest = hashlib.sha256()
    for path in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def variants_to_build() -> list[str]:
    """Return the variants of this architecture."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return list(VARIANTS) if is_x86 else ["portable"]


def find_compiler() -> str | None:
    """Return the C++ compiler: ``CXX``, or the first that exists."""
    requested = os.environ.get("CXX")
    return next((found for name in ([requested] if requested else COMPILERS) if (found := shutil.which(name))), None)


def compile_variant(compiler: str, variant: str) -> Path:
    """Compile one variant; the file appears when it is complete.

    Raises:
        subprocess.CalledProcessError: If the compiler fails.
    """
    target = library_path(variant)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        out = Path(folder) / target.name
        define = f'-DKVAD_SOURCE_HASH="{source_hash()}"'
        command = [compiler, *FLAGS, define, *VARIANTS[variant], str(SOURCE), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(out, target)
    return target


def build() -> list[Path]:
    """Compile all variants of this architecture; a variant that the compiler does not know is left out.

    Returns the libraries; none without a compiler. Every problem is a line on stderr.
    """
    compiler = find_compiler()
    if compiler is None:
        hint = "python -m kvad.ops.native.build builds them later"
        print(f"kvad: no C++ compiler ({', '.join(COMPILERS)}): CPU kernels are not built. {hint}", file=sys.stderr)
        return []

    def compile_or_report(variant: str) -> Path | None:
        try:
            return compile_variant(compiler, variant)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines()
            print(f"kvad: {variant} is not built: {lines[0] if lines else error}", file=sys.stderr)
            return None

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return [path for path in pool.map(compile_or_report, variants_to_build()) if path is not None]


if __name__ == "__main__":
    for built in build():
        print(built)
