"""What the `vesuvius volume` commands do: info, copy, occupancy, the synthetic scroll."""
