"""Output of a run: log line and record of each step, verdicts, rank telemetry, post-mortems, trackers."""
