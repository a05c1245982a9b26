"""What ranks and agents say to each other, the layout of the volume, and how a run ends early."""
