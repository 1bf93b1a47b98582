"""What a tune leaves: options A, B, C, a report in four forms, and the tuned config."""
