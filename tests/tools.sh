#!/usr/bin/env bash
# tools.sh check        names each tool that the build lacks, one line each with what to do
# tools.sh googletest FOLDER    GoogleTest for CMake: the system's, else Debian's package, unpacked into FOLDER
set -euo pipefail

check() {
  local missing=0 version
  lack() { echo "fusednorm needs $1: apt install $2" >&2; missing=1; }
  command -v "${CXX:-g++}" > /dev/null || lack "a C++ compiler (g++)" g++
  command -v cmake > /dev/null || lack "cmake (3.25 or newer)" "cmake, or pip install cmake"
  command -v ninja > /dev/null || lack ninja ninja-build
  "${PYTHON:-python3}" -c 'import venv, ensurepip' 2> /dev/null || lack "Python's venv" python3-venv
  if command -v cmake > /dev/null; then
    version=$(cmake --version | sed -n '1s/.* //p')
    [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" = 3.25 ] ||
      lack "cmake 3.25 or newer (this is $version)" "a newer cmake, or pip install cmake"
  fi
  return $missing
}

# Neither root nor GitHub: the package is fetched as any user and unpacked beside the build.
googletest() {
  local folder=$1 state=$1/apt
  [ -e /usr/include/gtest/gtest.h ] && return
  [ -n "$(find "$folder/usr" -name libgtest.a 2> /dev/null)" ] && return
  mkdir -p "$folder" "$state/lists/partial" "$state/cache/archives/partial"
  local own=(-o Dir::State::Lists="$state/lists" -o Dir::Cache="$state/cache" -o APT::Sandbox::User="$(id -un)")
  (
    cd "$folder"
    apt-get download -q libgtest-dev > apt.log 2>&1 ||
      { apt-get "${own[@]}" update -q >> apt.log 2>&1 && apt-get "${own[@]}" download -q libgtest-dev >> apt.log 2>&1; }
    dpkg -x libgtest-dev_*.deb .
  ) || echo "GoogleTest is neither here nor to be had from apt (see $folder/apt.log): apt install libgtest-dev" >&2
  rm -rf "$state"
}

"$@"
