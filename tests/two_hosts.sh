#!/usr/bin/env bash
# Train a tiny run on two hosts and compare its losses with those of one process.
#
#   tests/two_hosts.sh [PYTHON]
#
# The hosts are two network namespaces that only a virtual cable (veth) joins, each with caches of its own, so whatever
# would meet over the loopback of one machine fails here. All of it happens within namespaces of this script: it needs no
# root where unprivileged user namespaces are allowed, and leaves nothing behind. Exit code 0 if the losses agree to 1e-5.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(realpath -s "${1:-.venv/bin/python}")
if [[ -z ${TWO_HOSTS_INSIDE:-} ]]; then
    # --kill-child: whatever was started ends with this script
    exec env TWO_HOSTS_INSIDE=1 unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc \
        bash "tests/$(basename "$0")" "$PYTHON"
fi

STEPS=6
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

mount -t tmpfs tmpfs /run # where ip keeps the names of namespaces; the machine's own stays as it is
ip netns add first
ip netns add second
ip link add cable netns first type veth peer name cable netns second
ip -n first address add 10.77.0.1/24 dev cable
ip -n second address add 10.77.0.2/24 dev cable
for host in first second; do
    ip -n "$host" link set lo up
    ip -n "$host" link set cable up
done

CONFIG=$("$PYTHON" - "$WORK" "$STEPS" <<'END'
import sys
from pathlib import Path

sys.path.insert(0, "tests")
from torture import write_config

print(write_config(Path(sys.argv[1], "data"), steps=int(sys.argv[2])))
END
)

train_on() { # HOST OUTPUT LAUNCH_OPTIONS...
    local host=$1 output=$2
    shift 2
    # Gloo asks the host's name for an address, and a name often has that of the loopback: name the interface instead
    ip netns exec "$host" env GLOO_SOCKET_IFNAME=cable XDG_CACHE_HOME="$WORK/cache-$host" \
        "$PYTHON" -m accelerate.commands.launch "$@" scripts/train.py --config "$CONFIG" \
        --train.batch_size 4 --train.warmup_steps 0 --train.learning_rate 0.01 --train.output_dir "$output"
}

echo "one process"
train_on first "$WORK/one" --config_file configs/accelerate/cpu.yaml
echo "two hosts"
TWO=(--config_file configs/accelerate/two_machines.yaml --mixed_precision no --main_process_ip 10.77.0.1)
train_on second "$WORK/two" "${TWO[@]}" --machine_rank 1 &
SECOND=$!
train_on first "$WORK/two" "${TWO[@]}" --machine_rank 0
wait "$SECOND"

"$PYTHON" - "$WORK" "$STEPS" <<'END'
import json
import sys
from pathlib import Path

one, two = (
    [json.loads(line) for line in Path(sys.argv[1], run, "logs", "metrics.jsonl").read_text().splitlines()]
    for run in ("one", "two")
)
for lines, name in ((one, "one process"), (two, "two hosts")):
    print(f"losses of {name}:", *(line["loss"] for line in lines))
assert len(one) == len(two) == int(sys.argv[2]), "a run is not complete"
for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3)):
    far = max(abs(b[key] / a[key] - 1) for a, b in zip(one, two))
    print(f"{key}: at most {far:.1e} apart")
    assert far <= tolerance, f"{key} differs by more than {tolerance}"
END
