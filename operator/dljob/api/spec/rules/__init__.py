"""Rules of a DLJobSpec that involve several fields, for the API server (CEL) and for the operator."""
