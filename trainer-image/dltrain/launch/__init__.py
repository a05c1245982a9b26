"""Start ranks: command lines, the shim that mpirun starts in place of a rank, and the zygote that forks ranks."""
