"""What commands print: progress bars, tables of volumes."""
