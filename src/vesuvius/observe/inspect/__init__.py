"""A run looked at from outside, as `vesuvius memcheck` does: needs neither the trainer's help nor its packages."""
