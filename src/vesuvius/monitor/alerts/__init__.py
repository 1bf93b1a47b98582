"""What an operator is told at once: troubles of the system, a disk that will be full, a run that stands still."""
