#!/usr/bin/env bash
# Prints the folder of a Python environment, made on first use from a hashed lock file.
# usage: dev/env.sh ops|engine|uv
# The folder's name carries a hash of what went in, so a changed lock makes a new one and an unchanged one costs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${DDTREE_CACHE:-$HOME/.cache/ddtree}
say() { printf '\033[2m· %s\033[0m\n' "$*" >&2; }
uv_bin() {
  command -v uv && return
  [ -x "$cache/uv/bin/uv" ] || { say "installing uv"; python3 -m venv "$cache/uv" && "$cache/uv/bin/pip" install -q "uv==0.13.9"; }
  echo "$cache/uv/bin/uv"
}
key() { cat "$@" | sha256sum | cut -c1-12; }
make_env() { # name lock-files... ; installs into a temporary folder and renames, so that a broken install is never found
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
        "$uv" pip install -q -p "$dir/bin/python" --compile-bytecode --require-hashes --no-deps -r "$lock" >&2
      done
      "after_$name" "$uv" "$dir"
      touch "$dir/.done"
    fi) 9>"$cache/.env-$name.lock"
  fi
  echo "$dir"
}
after_ops() { :; }
after_engine() { :; }
mkdir -p "$cache/venv"
case ${1:-} in
uv) uv_bin ;;
ops) make_env ops dev/requirements.lock dev/env.sh ;;
engine) make_env engine images/engine-cpu/requirements.lock dev/env.sh ;;
*) echo "usage: dev/env.sh ops|engine|uv" >&2; exit 2 ;;
esac
