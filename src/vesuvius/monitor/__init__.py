"""Where time and memory go.  In: clocks, /proc, cgroups, NVML.  Out: records, verdicts, the memory guard's orders."""
