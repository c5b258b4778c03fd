#!/bin/bash
# Makes the two environments in which the oracles speak: transformers 4.57.6 and 5.23.0, every package pinned.
#   tests/hf_parity/environments.sh [FOLDER]      FOLDER/4.57 and FOLDER/5; default /tmp/kvad-oracle
# Run again, it does nothing for an environment that is as pinned. PYTHON=python3.11 picks the interpreter, which must be
# the project's own minor version if the project's torch is to be seen; VENV=path picks the project's environment.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-/tmp/kvad-oracle}"
venv="${VENV:-$here/../../.venv}"
python="${PYTHON:-$venv/bin/python}"
[[ -x $python ]] || python=python3
torch=2.13.0

mkdir -p "$folder"
for oracle in 4.57 5; do
    env="$folder/$oracle"
    pins="$here/environment-$oracle.txt"
    stamp="$env/.kvad-oracle-$({ echo "$torch"; cat "$pins"; } | cksum | cut -d' ' -f1)"
    [[ -e $stamp ]] && continue
    [[ -x $env/bin/python ]] || "$python" -m venv "$env"
    site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    rm -f "$site/kvad-torch.pth" "$env"/.kvad-oracle-*
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$pins"
    # torch is many hundred MB: the project's own is seen through a .pth file, behind the packages installed above.
    theirs="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null || true)"
    same="$(basename "$(dirname "$site")")" # python3.11
    if [[ $theirs == */"$same"/* ]] && compgen -G "$theirs/torch-$torch*.dist-info" >/dev/null; then
        echo "$theirs" >"$site/kvad-torch.pth"
    else
        "$env/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch"
    fi
    "$env/bin/python" -c '
import sys, torch, transformers
assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
assert transformers.__file__.startswith(sys.prefix), transformers.__file__
print("oracle", transformers.__version__, "torch", torch.__version__)' "$torch"
    touch "$stamp"
done
