"""What lies where in shared memory: one segment per replica, written by its owner alone and read by everybody else."""
