"""The second floor: running a training job, and writing down what it did."""
