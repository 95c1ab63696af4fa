#!/usr/bin/env bash
# Prints the folder of a Python environment, made on first use from hashed lock files.
# usage: dev/env.sh ops|engine|engine-shared|operator|uv
#   ops            operator, CLI and their tests (dev/requirements.lock)
#   engine         torch, SGLang, and this checkout's patches/sglang_* as if they were installed: $(dev/env.sh engine)/bin/python
#                  needs no PYTHONPATH. It is build/engine, a thin layer (dev/engine_env.py) on engine-shared
#   engine-shared  the part that no checkout's path is in (images/engine-cpu/*.lock); the CPU engine image is packed from it
#   operator       what the operator needs at run time; its image is packed from it (images/operator/requirements.lock)
# The folder's name carries a hash of what went in, so a changed lock makes a new one and an unchanged one costs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${DDTREE_CACHE:-$HOME/.cache/ddtree}
# Beside the environments, which hard-link into it: what is installed is on the disk once, and goes with the cache folder.
export UV_CACHE_DIR=${UV_CACHE_DIR:-$cache/uv-cache}
say() { printf '\033[2m· %s\033[0m\n' "$*" >&2; }
uv_bin() {
  command -v uv && return
  [ -x "$cache/uv/bin/uv" ] || { say "installing uv"; python3 -m venv "$cache/uv" && "$cache/uv/bin/pip" install -q "uv==0.13.9"; }
  echo "$cache/uv/bin/uv"
}
key() { cat "$@" | sha256sum | cut -c1-12; }
make_env() { # name files... ; installs the *.lock files; the marker .done comes last, so that a broken install is never used
  local name=$1; shift
  local dir="$cache/venv/$name-$(key "$@")"
  if [ ! -f "$dir/.done" ]; then
    (flock 9
    if [ ! -f "$dir/.done" ]; then
      say "installing the $name environment (once)"
      rm -rf "$dir"; local uv; uv=$(uv_bin)
      "$uv" venv -q --python 3.11 "$dir" >&2
      local lock; for lock in "$@"; do
        [[ $lock == *.lock ]] || continue
        "$uv" pip install -q -p "$dir/bin/python" --require-hashes --no-deps -r "$lock" >&2
      done
      "compile_$name" "$dir" >&2
      touch "$dir/.done"
    fi) 9>"$cache/.env-$name.lock"
  fi
  echo "$dir"
}
compile_ops() { "$1/bin/python" -m compileall -q -j 0 "$1/lib" || true; }
# Bytecode for images: the same on every machine and valid whatever the files' dates are; images take it as it is.
# SGLang's is checked against its source: patches are applied to copies of it.
for_image() { # folder options...
  local site="$1/lib/python3.11/site-packages"; shift
  "$site/../../../bin/python" -m compileall -q -q -j 0 -s "$site" -p /opt/venv/lib/python3.11/site-packages --invalidation-mode "$@" || true
}
compile_engine() {
  for_image "$1" unchecked-hash -x '/sglang/' "$1/lib/python3.11/site-packages"
  for_image "$1" checked-hash "$1/lib/python3.11/site-packages/sglang"
}
compile_operator() { for_image "$1" unchecked-hash "$1/lib/python3.11/site-packages"; }
engine_shared() { make_env engine images/engine-cpu/requirements.lock images/engine-cpu/sglang.lock; }
mkdir -p "$cache/venv"
case ${1:-} in
uv) uv_bin ;;
operator) make_env operator images/operator/requirements.lock ;;
ops) make_env ops dev/requirements.lock ;;
engine-shared) engine_shared ;;
engine) shared=$(engine_shared); mkdir -p build; (flock 9; "$shared/bin/python" dev/engine_env.py . "$shared" build/engine) 9>build/.engine.lock; echo "$PWD/build/engine" ;;
*) echo "usage: dev/env.sh ops|engine|engine-shared|operator|uv" >&2; exit 2 ;;
esac
