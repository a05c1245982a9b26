"""How the global batch is split over ranks, and which samples each rank computes."""
