"""How ranks start: commands, the shim below mpirun, the zygote and what it preloads."""
