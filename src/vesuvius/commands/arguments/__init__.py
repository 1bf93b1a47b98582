"""Options that several commands share: config and overrides, volumes, sampling.

In: an argument parser, or parsed arguments.  Out: the options, or the checked values."""
