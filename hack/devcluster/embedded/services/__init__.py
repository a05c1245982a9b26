"""What a cluster needs beside Kubernetes itself: names, volumes and pretended GPUs, kept by one process."""
