"""The first floor: running a schedule's program with real tensors."""
