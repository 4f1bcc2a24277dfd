#!/usr/bin/env bash
# Exit codes and streams of the bare command: 0 for what was asked for, 2 for wrong usage.
set -u
failures=0

# expect CODE STREAM PATTERN ARGS...: exit code, and a pattern on stdout or stderr.
expect() {
  local code=$1 stream=$2 pattern=$3 got out err text
  shift 3
  err=$(mktemp)
  out=$("$LOCKSTEP_BIN" "$@" 2>"$err")
  got=$?
  if [ "$stream" = stdout ]; then text=$out; else text=$(cat "$err"); fi
  rm -f "$err"
  if [ "$got" != "$code" ] || ! grep -qE "$pattern" <<<"$text"; then
    echo "lockstep $*: exit $got (expected $code), $stream (expected /$pattern/): $text"
    failures=1
  fi
}

expect 0 stdout '^lockstep [0-9]+\.[0-9]+\.[0-9]+$' --version
expect 0 stdout 'Usage: lockstep' --help
expect 2 stderr 'subcommand is required'
expect 2 stderr 'no-such-flag' --no-such-flag
expect 2 stderr 'no-such-command' no-such-command
exit $failures
