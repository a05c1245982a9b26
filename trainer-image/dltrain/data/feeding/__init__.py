"""Batches made ahead: the loader, its worker processes, and the copy to the device."""
