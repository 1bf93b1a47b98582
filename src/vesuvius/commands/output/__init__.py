"""What commands print.  In: results and progress.  Out: lines, tables and progress bars."""
