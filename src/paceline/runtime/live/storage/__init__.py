"""What the processes of a host share and what a run keeps: shared memory, traces, checkpoints, logs."""
