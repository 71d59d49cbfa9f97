#!/bin/bash
# Runs a command on another release of Debian, with a wheel of dist/ installed in a fresh venv there, on
# top of that release's own torch (for CPUs) and without a compiler.
#
# Usage, as root on x86-64 Debian: in_debian.sh PYTHON RELEASE COMMAND..., PYTHON: an interpreter with
# DeepSpeed, whose version is the one installed. The venv is /venv, the tests are in /src. Keeps the
# release in build/debian.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 release=$2
work=$PWD/build/debian
root=$work/$release
mkdir -p "$work"
unset PYTHONPATH PIP_FIND_LINKS

# Old snapshots of unstable are good enough.
[ -d "$root" ] || {
    command -v mmdebstrap > /dev/null || { apt-get update -qq && apt-get install -y -qq mmdebstrap; } >&2
    mmdebstrap --quiet --variant=apt --mode=root --aptopt='APT::Install-Recommends "0"' \
        --aptopt='Acquire::Check-Valid-Until "false"' --include=python3-torch,python3-venv \
        "$release" "$root.new" http://deb.debian.org/debian >&2
    mv "$root.new" "$root"
}
if chroot "$root" sh -c 'command -v cc gcc g++ clang'; then exit 1; fi >&2

version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages=$work/packages-$version
[ -d "$packages" ] || {
    options=(--only-binary=:all: --python-version "$version" --implementation cp
        --platform manylinux2014_x86_64)
    for minor in 5 12 17 24 25 26 27 28; do options+=(--platform "manylinux_2_${minor}_x86_64"); done
    "$python" -m pip download -q -d "$packages.new" "${options[@]}" einops hjson msgpack ninja packaging \
        psutil py-cpuinfo pydantic tqdm scipy viztracer pytest pytest-timeout pytest-xdist hypothesis \
        setuptools huggingface-hub regex safetensors tokenizers >&2
    "$python" -m pip download -q -d "$packages.new" "${options[@]}" --no-deps accelerate transformers >&2
    deepspeed=$("$python" -c 'from importlib.metadata import version; print(version("deepspeed"))')
    # Its setup imports torch, which an isolated build would download.
    DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$packages.new" \
        "deepspeed==$deepspeed" >&2
    mv "$packages.new" "$packages"
}

rm -rf "$root/venv" "$root/src" "$root/wheels"
mkdir "$root/src" "$root/wheels"
cp "$packages"/* dist/*-"cp${version/./}"-*_x86_64.whl "$root/wheels"
cp -r tests packaging pyproject.toml experiments examples ds_configs docs "$root/src"
chroot "$root" python3 -m venv --system-site-packages /venv
# Debian's torch names releases of its needs that Debian does not have.
chroot "$root" sh -c '/venv/bin/pip install -q --no-compile --no-index --no-deps /wheels/*.whl' >&2
# Debian builds torch without libuv.
# shellcheck disable=SC2016
exec unshare --mount sh -c 'for one in proc sys dev; do mount --rbind /$one "$0/$one"; done
exec chroot "$0" env -C /src PATH=/venv/bin:/usr/bin:/bin USE_LIBUV=0 "$@"' "$root" "${@:3}"
