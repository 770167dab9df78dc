"""Pipeline-parallel training: schedules as data, and the partition, engine, training and report built on them."""
