"""One cell of a bench, measured once: a training, a loader, a peer or any command.

In: a cell and the seconds to measure.  Out: a `Measurement`."""
