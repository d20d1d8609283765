#!/bin/bash
#SBATCH --job-name=map
#SBATCH --output=output-%A_%a.txt
#SBATCH --open-mode=append
#SBATCH --time=0-00:30:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:USR1@60
#SBATCH --no-requeue
#SBATCH --array=0-39%10
#SBATCH --dependency=afterany:12

folder=$PWD
trap '' USR1
export SHOAL_NOTICE_S=60 SHOAL_WALL_END=$(($(date +%s) + 1800))

srun --kill-on-bad-exit=0 --cpus-per-task=1 /venv/bin/python work.py &
command=$!
trap 'told=1; kill -USR1 "$command" 2>/dev/null' USR1 TERM
while told=; do
  wait "$command"; code=$?
  { [ -n "$told" ] && [ "$code" -gt 128 ]; } || break  # a signal has only ended the waiting
done
exit $code
