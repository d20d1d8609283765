#!/bin/bash
#SBATCH --job-name=gpt-1
#SBATCH --output=output-%j.txt
#SBATCH --open-mode=append
#SBATCH --time=0-04:00:00
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --account=def-someone
#SBATCH --distribution=block
#SBATCH --switches=1@10
#SBATCH --gres=gpu:a100:8

folder=$PWD
trap '' USR1
cd -- /home/me || exit 1
export SHOAL_NOTICE_S=60 SHOAL_WALL_END=$(($(date +%s) + 14400))
type module >/dev/null 2>&1 || . /etc/profile
module load python/3.11 || { echo 'module load python/3.11 failed' >&2; exit 1; }
module load cuda/12.6 || { echo 'module load cuda/12.6 failed' >&2; exit 1; }
module load arrow/17 || { echo 'module load arrow/17 failed' >&2; exit 1; }
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export TMPDIR="$SLURM_TMPDIR"

/venv/bin/python -m shoal conduct /home/me/runs/gpt-1 &
command=$!
trap 'told=1; kill -USR1 "$command" 2>/dev/null' USR1 TERM
while told=; do
  wait "$command"; code=$?
  { [ -n "$told" ] && [ "$code" -gt 128 ]; } || break  # a signal has only ended the waiting
done
[ "$code" -eq 75 ] || exit $code
refusals=0
for _ in {1..720}; do
  [ ! -e "$folder/cancelled" ] || break
  if scontrol requeue "$SLURM_JOB_ID"; then sleep 60; break; fi  # this start is ended meanwhile
  scontrol ping >/dev/null 2>&1 && refusals=$((refusals + 1))  # it is there, and will not
  [ "$refusals" -lt 3 ] || break
  sleep 5
done
exit $code
