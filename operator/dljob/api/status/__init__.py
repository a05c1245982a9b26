"""The status of a DLJob: the operator's report about a job, in parts that change at different times."""
