"""The nodes of the embedded cluster: namespaces, cgroups, first processes, and initial image stores."""
