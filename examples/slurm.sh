#!/bin/bash
# Digits on two nodes of a Slurm cluster: sbatch examples/slurm.sh
#SBATCH --job-name=paceline-digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --open-mode=append
set -euo pipefail

SCRIPT=${SCRIPT:-examples/digits.py}
WAY=${WAY:-host}

if [ "$WAY" = host ]; then
    # One agent on each node, which runs four workers: a worker that dies is started again, the others go on.
    srun --nodes=2 --ntasks-per-node=1 \
        python -m paceline host --workers "${WORKERS:-4}" --servers 2 --spread-servers --policy ssp:staleness=3 \
        --target accuracy=0.9 --restarts 3 --checkpoint-s 60 "$SCRIPT" "$@"
else
    # Slurm starts every worker itself, and paceline.init() finds the others: the script is all there is.
    export PACELINE_OPTIONS="--servers 2 --policy ssp:staleness=3 --target accuracy=0.9 --checkpoint-s 60"
    srun --nodes=2 --ntasks-per-node="${WORKERS:-4}" python "$SCRIPT" "$@"
fi
