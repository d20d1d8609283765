#!/bin/bash
#SBATCH "--job-name=a 'b' \"c\" é % \\ #d"
#SBATCH --output=/dev/null
#SBATCH --open-mode=append
#SBATCH --time=1-00:01:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH "--comment=it's \"so\""

folder=$PWD
trap '' USR1
exec >>"output-${SLURM_JOB_ID}.txt" 2>&1
cd -- '/tmp/a "b" '"'"'c'"'"' %j \ é #1' || exit 1
export SHOAL_NOTICE_S=60 SHOAL_WALL_END=$(($(date +%s) + 86460))

python 'it'"'"'s.py' '$HOME' 'a "b"' '`x`' 'ü %j' &
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
