"""Exactness, accuracy, speed and capacity; measured runs lie in `results/`."""
