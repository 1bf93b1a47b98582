"""One cell of a bench, measured once: a training, a loader, a peer or any command."""
