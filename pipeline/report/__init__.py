"""Pictures of a run: the measured timeline over the predicted one."""
