#!/bin/bash
# Installs each wheel of dist/ where there is no compiler, imports it and runs its kernels by
# check_wheel.py; all must compute the same bits. Arm's run under qemu. build_wheels.sh calls it.
#
# Usage: try_wheels.sh PYTHON, the environment's interpreter; as root on Debian 12 for x86-64.
# VERSIONS: some Pythons only. WHEEL_TORCH: what pip is asked for on x86-64 ("torch==2.8.0"; with CUDA's libraries
# some GB, for a while). Keeps what it downloads in build/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
work=$PWD/build/wheels
versions=${VERSIONS:-3.10 3.11 3.12 3.13 3.14}
unset PYTHONPATH  # pip would find the checkout installed

source packaging/interpreters.sh
need qemu-aarch64-static qemu-user-static

check() { # VERSION MACHINE COMMAND...
    local digest=$work/digest-$1-$2
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=2 "${@:3}" packaging/check_wheel.py > "$digest" \
        2> "$work/check.log" || { cat "$work/check.log"; exit 1; }
    echo "CPython $1, $2: $(tail -n 1 "$work/check.log"), $(wc -l < "$digest") passes as they should be"
}

# In a fresh venv of this machine. Without WHEEL_TORCH only a wheel without CUDA: of the index that has these, or
# of this disk (PIP_FIND_LINKS); else the extension is tried without.
try_here() { # VERSION INTERPRETER
    local venv=$work/venv cpu_index=(--index-url https://download.pytorch.org/whl/cpu --retries 0)
    rm -rf "$venv"
    "$2" -m venv "$venv"
    if [ -n "${WHEEL_TORCH:-}" ]; then
        "$venv/bin/python" -m pip install -q --no-compile "$WHEEL_TORCH"
    else
        "$venv/bin/python" -m pip install -q --no-compile "${cpu_index[@]}" --timeout 15 torch 2> /dev/null ||
            "$venv/bin/python" -m pip install -q --no-compile --no-index --no-deps torch 2> /dev/null || true
    fi
    "$venv/bin/python" -m pip install -q --no-compile "${needed[@]}"
    "$venv/bin/python" -m pip install -q --no-compile --no-deps --no-index --find-links dist hytrain
    check "$1" x86_64 env PATH=/nowhere "$venv/bin/python"
    rm -rf "$venv"
}

# What torch and the kernels' package import.
needed=(typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock numpy psutil pydantic)

# pip judges the wheel by its tags, into an empty folder. torch's wheels for Arm are without CUDA up to 2.9.
try_arm() { # VERSION INTERPRETER
    local site=$work/site minor platforms=(--platform manylinux2014_aarch64)
    for minor in 17 24 25 26 27 28; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    platforms+=(--python-version "$1" --implementation cp --only-binary=:all:)
    rm -rf "$site"
    "$python" -m pip install -q --no-compile --target "$site" "${platforms[@]}" "${needed[@]}"
    # It requires CUDA of who installs it for x86-64, which pip takes this for.
    "$python" -m pip install -q --no-compile --target "$site" "${platforms[@]}" --no-deps torch==2.9.1
    "$python" -m pip install -q --no-compile --target "$site" "${platforms[@]}" --no-deps --no-index \
        --find-links dist hytrain
    check "$1" aarch64 env PATH=/nowhere PYTHONPATH="$site" "$2"
    rm -rf "$site"
}

rm -f "$work"/digest-*
for version in $versions; do
    case $version in
        3.13) check "$version" x86_64 packaging/in_debian.sh "$python" trixie /venv/bin/python ;;
        3.14) check "$version" x86_64 packaging/in_debian.sh "$python" sid /venv/bin/python ;;
        *) try_here "$version" "$(interpreter "$version")" ;;
    esac
    try_arm "$version" "$(debian_python "$version" arm64 aarch64 || frozen_python "$version")"
done
for digest in "$work"/digest-*; do cmp "$digest" "$work/digest-${versions%% *}-x86_64"; done
