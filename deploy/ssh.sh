#!/usr/bin/env bash
# deploy/ssh.sh "host1 host2 host3" -i "/shared/in/*.jsonl" -o /shared/results.jsonl --model MODEL
# One independent process a host; paths are on a shared disk, or gs://. A process that dies is started again.
set -uo pipefail

read -ra hosts <<<"$1"
shift
options=$(printf '%q ' "$@" --num-processes "${#hosts[@]}" --resume)

serve() { # serve INDEX
  local attempt status
  for attempt in 1 2 3 4 5; do
    ssh "${hosts[$1]}" "mtp-jax run-batch $options --process-id $1" && return
    status=$?
    [[ $status == 2 ]] && break # an error that trying again does not mend
    echo "${hosts[$1]}: attempt $attempt ended with status $status" >&2
  done
  return "$status"
}

processes=()
for index in "${!hosts[@]}"; do
  serve "$index" &
  processes+=($!)
done
worst=0
for process in "${processes[@]}"; do
  wait "$process" || worst=$?
done
exit "$worst"
