"""Whoever wants the records of a run as they are written: TensorBoard, Prometheus, a webhook, trackers."""
