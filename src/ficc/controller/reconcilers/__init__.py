"""What brings the world in line with what is wanted. Reconcilers take no input, are safe to repeat, and run
on wake-up and on a timer."""
