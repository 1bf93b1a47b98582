"""`vesuvius plan`: forecasts reads, data wait, hours and money of a run on many GPUs.

simulate.py simulates the readers of a node (pure), node.py feeds it with the plan of the run and computes the limits,
rates.py measures decoding and latency, forecast.py gathers the figures."""
