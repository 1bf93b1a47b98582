"""Whoever wants a run's records as they are written.  In: records.  Out: TensorBoard, Prometheus, a webhook, trackers."""
