"""Data: a step number in, that step's batch out. Nothing here knows of pipelines."""
