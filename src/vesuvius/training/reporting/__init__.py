"""What a run says of itself: log line and record of each step, verdicts, news of the ranks, post-mortems, listeners."""
