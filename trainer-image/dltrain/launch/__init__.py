"""Start ranks: commands, the shim for mpirun, the zygote and its preloaded modules."""
