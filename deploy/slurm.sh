#!/usr/bin/env bash
# sbatch deploy/slurm.sh -i "requests/*.jsonl" -o results.jsonl --model MODEL
# One process a GPU, each with an engine of its own; with --mesh data=2,model=8 one engine over all of them.
#SBATCH --job-name=mtp-jax-batch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

for attempt in {1..20}; do
  # Independent processes go on when one of them fails.
  srun --kill-on-bad-exit=0 mtp-jax run-batch "$@" --distributed --resume
  status=$?
  [[ $status == 0 || $status == 2 ]] && exit $status # done, or an error that trying again does not mend
  echo "attempt $attempt ended with status $status" >&2
done
exit $status
