"""Models: ordered, named layers and a loss. Nothing here knows of pipelines."""
