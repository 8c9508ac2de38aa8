#!/usr/bin/env bash
# The C code by itself: natively with gcc, and where the tools are there with clang, under the sanitizers and as aarch64.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
sources=(tests/c/test_native.c src/native.c src/pools.c src/threads.c)
# FLAGS of setup.py
flags=(-O3 -std=gnu11 -fopenmp-simd -fno-math-errno -fno-trapping-math -fvisibility=hidden -Wno-pass-failed -Wall -Wextra -Werror -Isrc)
memory=(-g -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all)
races=(-g -fsanitize=thread)

# run NAME COMMAND...: prints the last line of its output, all of it where it fails
run() {
  local name=$1
  shift
  if "$@" > "$out/log" 2>&1; then
    echo "$name: $(tail -1 "$out/log")"
  else
    cat "$out/log"
    echo "$name: failed"
    return 1
  fi
}
skip() { echo "$1: skipped, $2"; }
# links CC FLAG...: whether this compiler has the runtime for these flags
links() { echo 'int main(void) { return 0; }' | "$1" -x c - "${@:2}" -o "$out/probe" > /dev/null 2>&1 && "$out/probe"; }

for cc in gcc clang; do
  if ! command -v "$cc" > /dev/null; then
    [ "$cc" = clang ] || { echo "gcc: not found"; exit 1; }
    skip clang "not found"
    continue
  fi
  "$cc" "${flags[@]}" "${sources[@]}" -o "$out/test" -lpthread -lm
  run "$cc" "$out/test"
  "$cc" "${flags[@]}" -O0 "${sources[@]}" -o "$out/test" -lpthread -lm
  run "$cc -O0" "$out/test"
  if links "$cc" "${memory[@]}"; then
    "$cc" "${flags[@]}" "${memory[@]}" "${sources[@]}" -o "$out/test" -lpthread -lm
    run "$cc, address and undefined behaviour" "$out/test"
  else
    skip "$cc, address and undefined behaviour" "its runtime library is not installed"
  fi
  if links "$cc" "${races[@]}"; then
    "$cc" "${flags[@]}" "${races[@]}" "${sources[@]}" -o "$out/test" -lpthread -lm
    run "$cc, races" "$out/test" stress
  else
    skip "$cc, races" "its runtime library is not installed, or does not run here"
  fi
done

if command -v aarch64-linux-gnu-gcc > /dev/null && command -v qemu-aarch64 > /dev/null; then
  aarch64-linux-gnu-gcc "${flags[@]}" -static "${sources[@]}" -o "$out/test" -lpthread -lm
  run "aarch64 in qemu" qemu-aarch64 "$out/test" no-fork
else
  skip "aarch64 in qemu" "no aarch64-linux-gnu-gcc or no qemu-aarch64"
fi
