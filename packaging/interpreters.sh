# Functions of build_wheels.sh and try_wheels.sh: packages, and interpreters for both architectures.
# What they download is kept in $work.

need() { # COMMAND PACKAGE
    command -v "$1" > /dev/null || { apt-get update -qq && apt-get install -y -qq "$2"; }
}

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

# CPython for Arm of a version that Debian does not have: the one in cx_Freeze's wheels, which calls
# lib/__startup__.py, with the standard library of this machine's interpreter. Prints a script that runs it.
frozen_python() { # VERSION
    local root=$work/frozen-$1 run=$work/run-frozen-$1 libraries
    debian libc-arm64 trixie arm64 libc6 libgomp1 libstdc++6 zlib1g 1>&2
    libraries=$root/lib:$work/libc-arm64/usr/lib/aarch64-linux-gnu
    [ -d "$root" ] || {
        rm -rf "$root.new"
        "$python" -m pip download -q --no-deps -d "$root.new" --python-version "$1" --implementation cp \
            --only-binary=:all: --platform manylinux2014_aarch64 cx_Freeze==8.0.0 1>&2
        unzip -q "$root.new"/*.whl -d "$root.new"
        cp -r "$("$(interpreter "$1")" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
            "$root.new/lib"
        rm -r "$root.new"/lib/{lib-dynload,site-packages,test}
        cp -r "$root.new"/cx_Freeze/bases/lib{,-dynload}/. "$root.new/lib"
        cp "$root.new"/cx_Freeze/bases/console-cpython-* "$root.new/python"
        cat > "$root.new/lib/__startup__.py" << END2
import os, runpy, sys

def init():
    pass

def run(*_):
    del sys.argv[0]
    sys.path[:0] = os.environ["PYTHONPATH"].split(":")
    runpy.run_path(sys.argv[0], run_name="__main__")
END2
        mv "$root.new" "$root"
    }
    cat > "$run" << END2
#!/bin/sh
exec $(command -v qemu-aarch64-static) $work/libc-arm64/usr/lib/aarch64-linux-gnu/ld-linux-aarch64.so.1 \
    --library-path $libraries $root/python "\$@"
END2
    chmod +x "$run"
    echo "$run"
}
