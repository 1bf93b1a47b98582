"""Who gets the records as they are written.  In: records.  Out: TensorBoard, Prometheus, trackers."""
