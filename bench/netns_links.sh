#!/usr/bin/env bash
# All-reduce between "hosts": network namespaces whose links are shaped to RATE in both directions.
# Prints the share of what the link allows for 2(n-1)/n of the buffer, encrypted as between hosts and with --plain-wire: medians of
# RUNS runs of both in turn. verdict.py has what is required of four hosts, and of encryption beside none. Needs root.
# usage: [RATE=BITS_PER_SECOND] [RUNS=N] bench/netns_links.sh [HOSTS...]    default: 1000000000, 15, 2 4
set -eu
cd "$(dirname "$0")/.."
lockstep=${LOCKSTEP_BUILD_DIR:-build/release}/lockstep
rate=${RATE:-1000000000}  # bits per second
bytes=$((25 * 1024 * 1024))
runs=${RUNS:-15}
algorithm=${ALGORITHM:-auto}

if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
  echo "shaped links: skipped, needs root and iproute2"
  exit 0
fi

tag=lsb$$
folder=$(mktemp -d)
hosts=()
ranks=()
clean_up() {
  for pid in "${ranks[@]:+${ranks[@]}}"; do kill "$pid" 2>/dev/null || true; done
  for name in "${hosts[@]:+${hosts[@]}}" "$tag-switch"; do ip netns del "$name" 2>/dev/null || true; done
  rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

in_host() { ip netns exec "$@"; }

shape() { in_host "$1" tc qdisc add dev "$2" root tbf rate "${rate}bit" burst 256kb latency 50ms; }

# A switch in a namespace of its own, and a host at each of its ports.
build_network() {
  ip netns add "$tag-switch"
  in_host "$tag-switch" ip link add name bridge type bridge
  in_host "$tag-switch" ip link set bridge up
  local i
  for i in $(seq 0 $(($1 - 1))); do
    local host=$tag-$i
    ip netns add "$host"
    hosts+=("$host")
    ip link add "port$i" netns "$tag-switch" type veth peer name eth0 netns "$host"
    in_host "$tag-switch" ip link set "port$i" master bridge up
    in_host "$host" ip address add "10.77.0.$((i + 1))/24" dev eth0
    in_host "$host" ip link set lo up
    in_host "$host" ip link set eth0 up
    shape "$host" eth0
    shape "$tag-switch" "port$i"
  done
}

run_ranks() {
  local n=$1 wire=$2 i
  for i in $(seq 0 $((n - 1))); do
    in_host "$tag-$i" env RANK="$i" WORLD_SIZE="$n" MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 \
      "$lockstep" bench allreduce --transport tcp --token-file "$folder/token" --bytes "$bytes" --algorithm "$algorithm" \
      $wire --wire-compress off --iterations 3 --json >"$folder/out.$i" 2>"$folder/err.$i" &
    ranks+=($!)
  done
  local failed=0 pid
  for pid in "${ranks[@]}"; do wait "$pid" || failed=1; done
  ranks=()
  if [ "$failed" != 0 ]; then
    echo "shaped links, $n hosts: failed"
    cat "$folder"/err.*
    return 1
  fi
  cat "$folder/out.0" >>"$folder/rows.${wire:-encrypted}"
}

# Exits with 1 when a row is missed.
tell() {
  python3 - "$1" "$bytes" "$rate" "$folder" <<'EOF'
import json, statistics, sys
sys.path.insert(0, "bench")
import verdict
n, size, rate = map(int, sys.argv[1:4])
allowed = 2 * (n - 1) / n * size * 8 / rate * 1e6
times = {}
for wire in ("encrypted", "--plain-wire"):
    rows = [json.loads(line) for line in open(f"{sys.argv[4]}/rows.{wire}")]
    times[wire] = [row["median_us"] for row in rows]
    median = statistics.median(times[wire])
    print(f"shaped links, {n} hosts, {rate // 10**6} Mbit/s, 25 MiB ({rows[0]['algorithm']}), {wire}: {median / 1e3:.1f} ms, the link allows "
          f"{allowed / 1e3:.1f} ms: {allowed / median:.0%}", flush=True)
ratios = {"/ link": [allowed / time for time in times["encrypted"]],
          "plain / encrypted": [plain / sealed for plain, sealed in zip(times["--plain-wire"], times["encrypted"])]}
missed = False
for what, values in ratios.items():
    name = f"hosts {n}x1 {rate // 10**9} Gbit/s {what}"
    if name in verdict.REQUIREMENTS:
        missed |= verdict.tell(name, values)
sys.exit(missed)
EOF
}

measure() {
  build_network "$1"
  (umask 077 && head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$folder/token")
  rm -f "$folder"/rows.*
  local i
  for i in $(seq "$runs"); do
    run_ranks "$1" ""
    run_ranks "$1" --plain-wire
  done
  tell "$1" || missed=1
  local name
  for name in "${hosts[@]}" "$tag-switch"; do ip netns del "$name"; done
  hosts=()
}

missed=0
for n in "${@:-2 4}"; do
  for count in $n; do measure "$count"; done
done
exit "$missed"
