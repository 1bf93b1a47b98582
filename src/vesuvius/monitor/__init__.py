"""Monitors time and memory.  In: clocks, /proc, cgroups, NVML.  Out: records, verdicts, orders of the memory guard."""
