"""What the system reports.  In: /proc, /sys, NVML.  Out: processes, cgroups, machine, GPUs as plain data."""
