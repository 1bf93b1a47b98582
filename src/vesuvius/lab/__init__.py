"""Experiments on whole runs: they start runs and look at what those wrote.  Only doors import them."""
