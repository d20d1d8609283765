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
module load python/3.11
module load cuda/12.6
module load arrow/17
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
if [ "$code" -eq 75 ] && [ ! -e "$folder/cancelled" ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $code
