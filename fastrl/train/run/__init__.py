"""The frame of a run: its directory, log, checkpoints, start and end."""
