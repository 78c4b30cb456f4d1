#!/usr/bin/env bash
# check_symbols.sh LIBRARY OBJECTS: what the library needs, and what its kernels may leak.
set -euo pipefail
library=$1 objects=$2
failed=0

needed=$(readelf -d "$library" | grep NEEDED)
for unwanted in libpython libtorch_python; do
  if grep -q "$unwanted" <<< "$needed"; then
    echo "$library needs $unwanted: a C++ program without Python could not load it"
    failed=1
  fi
done
grep -q libtorch_cpu <<< "$needed" || { echo "$library does not name libtorch_cpu"; failed=1; }

# A weak function of an AVX-512 object may replace the same function of the whole program.
count=0
while IFS= read -r object; do
  count=$((count + 1))
  leaked=$(nm -C "$object" | awk '$2 == "W" || $2 == "u"' || true)
  if [ -n "$leaked" ]; then
    printf '%s has weak symbols:\n%s\n' "$object" "$leaked"
    failed=1
  fi
done < <(find "$objects" -path '*/fn_kernels_*/kernels/*.cpp.o')
[ "$count" -ge 1 ] || { echo "no kernel objects under $objects"; failed=1; }

[ "$failed" = 0 ] && echo "1 library and $count kernel objects are clean"
exit "$failed"
