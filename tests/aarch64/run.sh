#!/bin/bash
# Builds everything for 64-bit Arm and runs it under qemu: the C++ tests; the kernels' digest beside
# this machine's; the Python kernel tests in an Arm CPython with torch. `make test-aarch64` calls it.
#
# Usage: run.sh PYTHON, the environment's interpreter. Keeps what it downloads and builds in
# build/aarch64. TEST_ARGS goes to pytest; AARCH64_ONLY=cpp ends after the C++ tests, AARCH64_ONLY=threads
# runs the worker's under ThreadSanitizer instead of all this.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD
python=$1
work=$here/build/aarch64
root=$work/root
site=$work/site
tag=cpython-311-aarch64-linux-gnu
mkdir -p "$work"

if ! command -v aarch64-linux-gnu-g++ > /dev/null || ! command -v qemu-aarch64-static > /dev/null; then
    packages=(g++-aarch64-linux-gnu qemu-user-static)
    apt-get update -qq && apt-get install -y -qq "${packages[@]}" ||
        { echo "as root: apt-get install ${packages[*]}"; exit 2; }
fi

cat > "$work/toolchain.cmake" << END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-L;/usr/aarch64-linux-gnu)
END
configure() {
    cmake -S . -B "$work/$1" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$work/toolchain.cmake" \
        -DHYTRAIN_STRICT=ON -DCMAKE_BUILD_TYPE=Release "${@:2}" > /dev/null
}

if [ "${AARCH64_ONLY:-}" = threads ]; then
    # ThreadSanitizer starts itself again where addresses are random, which qemu does not survive.
    configure threads -DHYTRAIN_PYTHON=OFF -DHYTRAIN_TESTS=ON -DHYTRAIN_SANITIZE=threads \
        -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1
    cmake --build "$work/threads"
    HYTRAIN_STRESS_RUNS=${HYTRAIN_STRESS_RUNS:-2} setarch -R \
        ctest --test-dir "$work/threads" --timeout 900 --output-on-failure
    exit
fi

configure cpp -DHYTRAIN_PYTHON=OFF -DHYTRAIN_TESTS=ON
cmake --build "$work/cpp"
OMP_NUM_THREADS=2 ctest --test-dir "$work/cpp" --timeout 900 --output-on-failure
[ "${AARCH64_ONLY:-}" != cpp ] || exit 0

# Debian's CPython 3.11 for arm64 and what it needs, unpacked into a folder, with an empty list of
# installed packages, so that this machine's packages stay as they are.
if [ ! -x "$root/usr/bin/python3.11" ]; then
    apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$root"
    : > "$apt/status"
    options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64
        -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status"
        -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives"
        -o APT::Install-Recommends=0 -o Debug::NoLocking=1)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" install -y --download-only python3.11 libpython3.11-dev libstdc++6 \
        libgomp1
    for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$root"; done
fi

# A torch whose Arm wheel on PyPI is for the CPU alone; those of today need CUDA's. pip judges
# dependencies by the machine it runs on, so each is named.
if [ ! -d "$site/torch" ]; then
    "$python" -m pip install -q --no-deps --target "$site" --python-version 3.11 \
        --implementation cp --only-binary=:all: --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_27_aarch64 --platform manylinux_2_26_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        torch==2.8.0 typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock \
        numpy psutil pytest pluggy iniconfig packaging pygments pytest-timeout \
 pytest-xdist execnet hypothesis sortedcontainers pydantic \
        pydantic-core annotated-types typing-inspection
fi

configure python "-DPython_EXECUTABLE=$python" "-DPython_INCLUDE_DIR=$root/usr/include/python3.11" \
    "-DCMAKE_CXX_FLAGS=-idirafter $root/usr/include" "-DPYTHON_MODULE_EXTENSION=.$tag.so" \
    "-Dpybind11_DIR=$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')"
cmake --build "$work/python" --target _C
rm -rf "$work/tree"
mkdir "$work/tree"
cp -r hytrain tests pyproject.toml "$work/tree"
rm -f "$work"/tree/hytrain/_C.*.so
cp "$work/python/_C.$tag.so" "$work/tree/hytrain"

# Tests start processes of their own by sys.executable, which the kernel need not know how to run.
cat > "$work/run-python" << END
#!/bin/sh
OMP_NUM_THREADS=1 PYTHONHOME=$root/usr PYTHONPATH=$work/tree:$site \
    exec qemu-aarch64-static -L $root $root/usr/bin/python3.11 "\$@"
END
chmod +x "$work/run-python"
cd "$work/tree"
"$work/run-python" tests/aarch64/digest.py > "$work/digest.aarch64"
(cd "$here" && PYTHONPATH=. "$python" tests/aarch64/digest.py) > "$work/digest.here"
diff <(cut -d' ' -f2- "$work/digest.here" | sort -u) <(cut -d' ' -f2- "$work/digest.aarch64" | sort -u)
echo "$(wc -l < "$work/digest.aarch64") digests of passes: bit for bit those of $(uname -m)"
# shellcheck disable=SC2086
"$work/run-python" -c "import pytest, sys; sys.executable = '$work/run-python'; sys.exit(pytest.main())" \
    -p no:cacheprovider -q -n0 --timeout=1200 ${TEST_ARGS:-} tests/unit/kernels
