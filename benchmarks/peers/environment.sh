#!/bin/bash
# Makes the environment of the engines that kvad is compared with, every package pinned in requirements.txt.
#   benchmarks/peers/environment.sh [FOLDER]      default .venv-peers
# llama.cpp is compiled for this processor (5 to 15 minutes). Run again, nothing is done. PYTHON=python3.11 picks the
# interpreter, which must be the project's own minor version if its torch is to be seen; VENV=path is the project's environment.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
env="${1:-$here/../../.venv-peers}"
venv="${VENV:-$here/../../.venv}"
python="${PYTHON:-$venv/bin/python}"
[[ -x $python ]] || python=python3
torch=2.13.0

stamp="$env/.kvad-peers-$({ echo "$torch"; cat "$here/requirements.txt"; } | cksum | cut -d' ' -f1)"
[[ -e $stamp ]] && exit 0
[[ -x $env/bin/python ]] || "$python" -m venv "$env"
pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
rm -f "$site/kvad-torch.pth" "$env"/.kvad-peers-*
options=(-DGGML_NATIVE=ON -DGGML_OPENMP=ON)
for part in LLAVA_BUILD LLAMA_BUILD_TOOLS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_SERVER LLAMA_BUILD_TESTS; do
    options+=("-D$part=OFF")
done
CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}" CMAKE_ARGS="${options[*]}" "${pip[@]}" -r "$here/requirements.txt"
# torch is many hundred MB: the project's own is seen through a .pth file, behind the packages installed above.
theirs="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null || true)"
same="$(basename "$(dirname "$site")")" # python3.11
if [[ $theirs == */"$same"/* ]] && compgen -G "$theirs/torch-$torch*.dist-info" >/dev/null; then
    echo "$theirs" >"$site/kvad-torch.pth"
else
    "${pip[@]}" "torch==$torch"
fi
"$env/bin/python" -c '
import sys, torch, ctranslate2, llama_cpp, openvino_genai, optimum.intel, transformers
assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
assert transformers.__file__.startswith(sys.prefix), transformers.__file__
print("ctranslate2", ctranslate2.__version__, "llama-cpp-python", llama_cpp.__version__, "openvino-genai",
      openvino_genai.__version__, "transformers", transformers.__version__, "torch", torch.__version__)' "$torch"
touch "$stamp"
