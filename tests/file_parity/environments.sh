#!/bin/bash
# Makes the two environments in which other libraries write and read model files, every package pinned.
#   tests/file_parity/environments.sh [FOLDER]      FOLDER/quantizers and FOLDER/llama-cpp; default /tmp/kvad-oracle
# quantizers reads torch, transformers and safetensors from the project's environment (VENV=path). llama.cpp is compiled,
# which takes about 15 minutes on one core (JOBS=1), and is run on the CPU. Run again, nothing is done.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-/tmp/kvad-oracle}"
venv="$(realpath "${VENV:-$here/../../.venv}")"
llama_cpp=0.3.36

mkdir -p "$folder"
for name in quantizers llama-cpp; do
    env="$folder/$name"
    stamp="$env/.kvad-oracle-$({ echo "$llama_cpp"; cat "$here/$name.txt"; } | cksum | cut -d' ' -f1)"
    [[ -e $stamp ]] && continue
    [[ -x $env/bin/python ]] || "$venv/bin/python" -m venv "$env"
    pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
    rm -f "$env"/.kvad-oracle-*
    if [[ $name == quantizers ]]; then
        "${pip[@]}" setuptools==80.9.0 wheel==0.45.1
        BUILD_CUDA_EXT=0 "${pip[@]}" --no-deps --no-build-isolation -r "$here/$name.txt"
        site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/kvad-torch.pth"
    else
        "${pip[@]}" -r "$here/$name.txt"
        off=(GGML_NATIVE GGML_OPENMP LLAVA_BUILD LLAMA_BUILD_TOOLS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_SERVER LLAMA_BUILD_TESTS)
        CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-1}" CMAKE_ARGS="$(printf -- '-D%s=OFF ' "${off[@]}")" \
            "${pip[@]}" --no-deps "llama-cpp-python==$llama_cpp"
    fi
    touch "$stamp"
done
