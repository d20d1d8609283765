#!/bin/bash
#SBATCH --job-name=gpt-1
#SBATCH --output=output-%j.txt
#SBATCH --open-mode=append
#SBATCH --time=0-00:02:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --signal=B:USR1@30
#SBATCH --requeue
#SBATCH --partition=compute
#SBATCH --account=other
#SBATCH --mem=61036M
#SBATCH --constraint=milan|genoa
#SBATCH --hint=nomultithread
#SBATCH --qos=high

folder=$PWD
trap '' USR1
cd -- /home/me || exit 1
export SHOAL_NOTICE_S=30 SHOAL_WALL_END=$(($(date +%s) + 120))
export TMPDIR="/dev/shm"

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
