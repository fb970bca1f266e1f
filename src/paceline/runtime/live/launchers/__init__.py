"""Ray, torchrun and Slurm: they place agents and exchange addresses and public keys."""
