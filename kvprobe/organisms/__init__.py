"""Small models trained from scratch on the task library: the subjects that ship with kvprobe."""
