"""Services that the embedded cluster needs in addition to Kubernetes: DNS, shared volumes and simulated GPUs."""
