"""The command line: config groups (YAML), their typed schema, and Hydra's callbacks."""
