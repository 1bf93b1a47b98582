"""Reads the system.  In: /proc, /sys, NVML.  Out: processes, cgroups, machine, GPUs as plain data."""
